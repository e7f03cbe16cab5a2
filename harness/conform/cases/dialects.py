"""The other routes by which a stream is asked for, and a request that brings a grammar."""

from typing import Any, Final

from harness.client.dialect import route
from harness.conform.bench import Bench
from harness.conform.case import ABORT, FREED, case, reports
from harness.conform.finding import Finding
from harness.conform.judgement import Bound
from harness.experiments.outcome import CannotDecideError, TooQuickError
from harness.formatting import quantity
from harness.store.conform_result import Level
from harness.workload.abandon import RequestSpec

CHECK_TOKENS: Final = 64  # of an answer, to see that its length can be asked for
MOST_STEPS: Final = 20.0
FEWEST_STEPS: Final = 4.0  # that a compilation must take
FIELDS: Final = 400  # of the schema


def _on_route(bench: Bench, name: str) -> Finding:
    path = route(bench.session.plan.target.path, name)
    row = bench.offered(bench.short(CHECK_TOKENS, path=path), f"POST {path}")
    if row.tokens_read < CHECK_TOKENS // 2:
        raise CannotDecideError(
            f"an answer of {CHECK_TOKENS} tokens was asked for and {row.tokens_read} came: a "
            "stream that is to leave may have ended before"
        )
    return bench.recoveries.find(bench.long(path=path))


def _declare(name: str, path: str, whose: str = "") -> None:
    def check(bench: Bench) -> Finding:
        return _on_route(bench, path)

    case(
        f"dialect/{name}",
        Level.MUST,
        f"A stream of {whose}/v1/{path} is cancelled like any other.",
        wire="As stream/fin-decode; the streams that leave are asked for on this route.",
        passes=FREED,
        methods="P",
        remedy=ABORT,
        why="Each route has its own handler, and each handler its own way to miss a disconnect.",
        needs=("http",),
        quick=name == "chat",
        caught=reports("BerriAI/litellm#36123"),
    )(check)


_declare("chat", "chat/completions")
_declare("responses", "responses")
_declare("messages", "messages", "Anthropic's ")


@case(
    "structured/leave",
    Level.SHOULD,
    "The compilation of a grammar does not outlive its client.",
    wire="All slots but one are full. A request with a large JSON schema, a new one each time, is "
    "sent and its connection closed a step later; a short request comes then.",
    passes="the short request's first token comes at most 20 steps later than on the idle server "
    "at the median of the tries, and at most 60 in each",
    methods="P",
    remedy="compile grammars off the engine's thread, and drop the grammars of clients that left",
    why="Compiling a schema takes seconds, often on the thread that steps the engine, and nobody "
    "looks at the connection meanwhile.",
    needs=("http",),
    caught=reports("vllm-project/vllm#14151 vllm-project/vllm#54003"),
)
def structured(bench: Bench) -> Finding:
    def asked(tokens: int) -> RequestSpec:
        return bench.short(tokens, body={"response_format": schema(bench.rng.getrandbits(32))})

    plain = bench.whole(bench.short(1))
    row = bench.offered(asked(1), "a request with a JSON schema")
    first, usual = (one.first_token_ns or one.ended_ns for one in (row, plain))
    compiled_s = max(0.0, (first - row.sent_ns - usual + plain.sent_ns) / 1e9)
    if compiled_s < FEWEST_STEPS * bench.step_s:
        raise TooQuickError(
            f"a schema of {FIELDS} fields takes {quantity(compiled_s, 's')}, less than "
            f"{FEWEST_STEPS:g} steps: there is no compilation to leave"
        )
    finding = bench.recoveries.find(
        begin=lambda _spec: bench.start(asked(bench.patience.answer_tokens)),
        ready=lambda *_: bench.pause(bench.step_s),
        queues_first=False,
        is_alone=True,  # several compilations take turns
        is_heavy=True,  # on a machine with few processors the streams that stay wait for each
        bound=Bound(MOST_STEPS, MOST_STEPS),
    )
    return finding._replace(
        evidence=finding.evidence | {"compilation_ms": round(1e3 * compiled_s, 1)}
    )


def schema(number: int) -> dict[str, Any]:
    """No server has compiled this one before: its names are new."""
    names = [f"field_{number}_{field}" for field in range(FIELDS)]
    text = {"type": "string", "pattern": "^[a-z]{3,40}(-[a-z]{3,40}){0,5}$"}
    properties = dict.fromkeys(names, text)
    return {
        "type": "json_schema",
        "json_schema": {
            "name": f"answer_{number}",
            "strict": True,
            "schema": {
                "type": "object",
                "properties": properties,
                "required": names,
                "additionalProperties": False,
            },
        },
    }
