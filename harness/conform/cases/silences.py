"""Clients leave by the clock, in the middle of an answer's longest silence.

A server that writes its tokens in few large pieces, or none while it composes the arguments of a
tool call, writes nothing for many steps. One that sees a disconnect only when it writes notices a
leave in such a silence at its end.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any, Final, NamedTuple

from harness.client.dialect import route
from harness.client.live_stream import LiveStream
from harness.conform.bench import Bench
from harness.conform.bystanders import leave_each, rows_of
from harness.conform.case import FREED, case, reports
from harness.conform.finding import Finding
from harness.conform.judgement import AT_ONCE
from harness.experiments.idle_server import PROBE_TOKENS
from harness.experiments.outcome import CannotDecideError
from harness.experiments.patience import READY_S
from harness.records import Outcome, RequestRow
from harness.store.conform_result import Failure, Level
from harness.workload.abandon import RequestSpec

LOOK_TOKENS: Final = 64  # of the control, in which the longest silence is looked for
LONG_SILENCE: Final = 3.0  # steps; a shorter one does not count
REMEDY: Final = "watch the connection itself, also while nothing is written to it"


class Silence(NamedTuple):
    """An answer's longest silence. It begins after `tokens` tokens (0: before the first one) and
    lasts `lasts_s`."""

    tokens: int
    lasts_s: float

    @classmethod
    def of(cls, row: RequestRow) -> "Silence":
        """Raises CannotDecideError for an answer without tokens."""
        if not row.token_times_ns:
            raise CannotDecideError("the control's answer has no token")
        times = [row.sent_ns, *row.token_times_ns]
        gaps = [(late - early, number) for number, (early, late) in enumerate(pairwise(times))]
        lasts_ns, pieces = max(gaps)
        each = max(row.tokens_read, row.completion_tokens or 0) / len(row.token_times_ns)
        return cls(round(pieces * each), lasts_ns / 1e9)

    def wait(self, bench: Bench, stream: LiveStream) -> None:
        """Waits until the middle of the silence. Raises CannotDecideError if this answer has none
        there."""
        if self.tokens and not stream.wait_tokens(self.tokens, READY_S):
            raise CannotDecideError(f"a stream did not get {self.tokens} tokens")
        bench.pause(self.lasts_s / 2)
        if stream.has_ended:
            raise CannotDecideError("a stream that was to leave in its silence had ended")


def leave_in_silence(
    bench: Bench, spec: RequestSpec, silence: Silence, *, prompt_s: float
) -> Finding:
    """`prompt_s`: the time of its prompt, which may be in flight in a silence before the first
    token."""
    inside = 0
    in_flight = 0.0 if silence.tokens else prompt_s / bench.step_s
    bound = AT_ONCE._replace(steps=round(AT_ONCE.steps + in_flight, 2))
    until = silence.tokens + int(silence.lasts_s / bench.step_s)
    longest = max(until, bench.patience.longest_read)
    bench.patience = bench.patience._replace(longest_read=longest)

    def ready(leaver: LiveStream, _number: int) -> None:
        nonlocal inside
        silence.wait(bench, leaver)
        inside += leaver.tokens <= silence.tokens

    finding = bench.recoveries.find(spec, ready=ready, queues_first=False, bound=bound)
    steps = silence.lasts_s / bench.step_s
    return finding._replace(
        reason=f"left in a silence of {steps:.1f} steps: {finding.reason}",
        evidence=finding.evidence
        | {
            "silence_ms": round(1e3 * silence.lasts_s, 1),
            "silence_after_tokens": silence.tokens,
            "left_inside": inside,
        },
    )


def first_token_s(bench: Bench, spec: RequestSpec) -> float:
    """Until the first token of such a request, whose answer ends there: a server cannot wait for
    more of it before it writes."""
    row = bench.ask(replace(spec, max_tokens=PROBE_TOKENS))
    return ((row.first_token_ns or row.ended_ns) - row.sent_ns) / 1e9


@case(
    "silence/leave",
    Level.MUST,
    "A client that leaves while nothing is written to it is noticed then.",
    wire="A control of 64 tokens shows where its longest silence between two pieces is. Behind "
    "full slots, streams close their connections in the middle of that silence, by the clock; a "
    "short request comes then.",
    passes="the short request's first token comes at most 4 steps later than on the idle server at "
    "the median of the tries, and at most 12 in each, as in stream/before-first if the silence is "
    "before the first token; where no silence is longer than 3 steps, the figures of "
    "stream/fin-decode hold",
    methods="P",
    why="Clients leave when nothing comes. A test that leaves right after a token never does.",
    remedy=REMEDY,
    caught=reports("Mesh-LLM/mesh-llm#1371"),
)
def in_silence(bench: Bench) -> Finding:
    silence = Silence.of(bench.whole(bench.short(LOOK_TOKENS)))
    steps = silence.lasts_s / bench.step_s
    if silence.tokens and steps < LONG_SILENCE:
        said = f"the longest silence of an answer is {steps:.1f} steps: none to leave in"
        return Finding(None, said, {"silence_ms": round(1e3 * silence.lasts_s, 1)})
    return leave_in_silence(bench, bench.long(), silence, prompt_s=bench.ttft_s)


def tool_call() -> dict[str, Any]:
    """Keys of a body that make the answer a call with a long argument."""
    text = {"type": "string", "description": "The whole letter, at least 1,000 words long."}
    write = {
        "name": "write_letter",
        "description": "Write a letter to a friend.",
        "parameters": {"type": "object", "properties": {"text": text}, "required": ["text"]},
    }
    return {"tools": [{"type": "function", "function": write}], "tool_choice": "required"}


@case(
    "tools/leave",
    Level.SHOULD,
    "A client that leaves while a tool call is composed is noticed then, and harms no other call.",
    wire="Chat requests whose answer is a tool call. A control shows where their longest silence "
    "is; streams close their connections in its middle, by the clock, behind full slots. Before "
    "that, one stream closes in its silence while another tool call runs, whose client stays.",
    passes=f"{FREED}, as in stream/before-first if the silence is before the first token; the call "
    "that stays is answered whole",
    methods="P B",
    why="The arguments of a call are parsed before they are sent, so a server may write nothing "
    "for a whole answer.",
    remedy=REMEDY,
    needs=("http",),
    caught=reports("Mesh-LLM/mesh-llm#1371 vllm-project/vllm#46263"),
)
def tools(bench: Bench) -> Finding:
    path = route(bench.session.plan.target.path, "chat/completions")
    asked = {"path": path, "body": tool_call()}
    look = bench.short(LOOK_TOKENS, **asked)
    silence = Silence.of(bench.offered(look, "a request with tools"))
    prompt_s = 0.0 if silence.tokens else first_token_s(bench, look)
    stays, leaves = bench.start(look), bench.start(bench.long(**asked))
    silence.wait(bench, leaves)
    leave_each(bench, [leaves])
    (row,) = rows_of([stays])
    if row.outcome is not Outcome.COMPLETED:
        said = f"a tool call was not answered whole when another one was left: {row.error}"
        return Finding(Failure.HARM, said, {})
    return leave_in_silence(bench, bench.long(**asked), silence, prompt_s=prompt_s)
