"""One request with many answers: all of them end with it."""

from typing import Final

from harness.client.dialect import route
from harness.client.ending import ENDED_EARLY
from harness.conform.bench import Bench
from harness.conform.case import case, reports
from harness.conform.finding import Evidence, Finding
from harness.experiments.outcome import CannotDecideError, RefusedError
from harness.experiments.patience import READY_S
from harness.store.conform_result import Failure, Level
from harness.workload.abandon import RequestSpec

READ_TOKENS: Final = 8  # of each answer
LOOK_TOKENS: Final = 4
LIST_TIMES: Final = 8  # times the slots: most prompts of the list wait
MOST_PROMPTS: Final = 512
MOST_ANSWERS: Final = 16


@case(
    "n/parent",
    Level.MUST,
    "All n answers end with their request.",
    wire="One request asks for as many answers (`n`) as there are slots, reads 8 tokens of each, "
    "and closes its connection.",
    passes="no slot is held afterwards",
    methods="O",
    remedy="abort all answers of a request with it",
    why="An abort that knows the request's own id alone leaves its children running.",
    quick=True,
    caught=reports("vllm-project/vllm#14326 vllm-project/vllm#14512 sgl-project/sglang#39461"),
)
def parent(bench: Bench) -> Finding:
    n = bench.crowd(MOST_ANSWERS)
    return _leave_all(bench, bench.long(n=n), bench.short(LOOK_TOKENS, n=n), "n")


@case(
    "n/prompts",
    Level.MUST,
    "All prompts of a list end with their request.",
    wire="One completions request has a list of 8 times as many prompts as there are slots (of as "
    "many, where the server takes no more), reads 8 tokens a slot, and closes its connection.",
    passes="no slot is held afterwards",
    methods="O",
    remedy="abort all prompts of a request with it",
    why="A list of prompts becomes as many requests inside, which share one connection and no id.",
    needs=("http",),
    caught=reports("tetherto/qvac#4165"),
)
def prompts(bench: Bench) -> Finding:
    path = route(bench.session.plan.target.path, "completions")

    def leave_list(count: int) -> Finding:
        texts = [bench.session.prompt(bench.long(), n=number) for number in range(count)]
        asked = {"n": count, "path": path, "body": {"prompt": texts, "n": 1}}
        return _leave_all(bench, bench.long(**asked), bench.short(LOOK_TOKENS, **asked), "a list")

    some = bench.crowd(MOST_ANSWERS)
    if not bench.facts.has_queue:
        return leave_list(some)
    try:
        return leave_list(min(LIST_TIMES * bench.slots, MOST_PROMPTS))
    except RefusedError:
        return leave_list(some)


def _leave_all(bench: Bench, asked: RequestSpec, look: RequestSpec, what: str) -> Finding:
    try:
        row = bench.offered(look, f"a request with {what} of {look.n}")
    except CannotDecideError:
        row = bench.rows()[-1]
        # Without [DONE] the one answer of a server that ignores n seems to lack the others.
        if row.error != ENDED_EARLY or not 0 < row.tokens_read <= LOOK_TOKENS:
            raise
    wanted, came = look.n * LOOK_TOKENS, row.completion_tokens or row.tokens_read
    if came <= LOOK_TOKENS:
        raise RefusedError(f"{came} tokens came where {wanted} were asked for: {what} is ignored")

    read = asked.n * READ_TOKENS
    if not bench.facts.can_fill:
        return bench.recoveries.find(asked, tokens=[read])

    def leave() -> int:
        stream = bench.start(asked)
        if not stream.wait_tokens(read, READY_S):
            raise CannotDecideError(f"{READ_TOKENS} tokens of each answer did not come")
        stream.leave()
        return asked.n

    held = bench.occupancy.held(leave)
    evidence: Evidence = {"answers": asked.n, "held": held}
    if held:
        return Finding(Failure.NEVER, f"{held} of {bench.slots} slots are still held", evidence)
    return Finding(None, f"{asked.n} answers ended with their request", evidence)
