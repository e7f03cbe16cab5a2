"""The requests of a schedule on the wire, and which of them a server takes.

A feature is keys of a body, or another route. Before the search each one is asked for once; what
the server refuses is never drawn.
"""

from collections.abc import Mapping
from typing import Any, Final

from harness.client.dialect import route
from harness.conform.bench import Bench
from harness.conform.cases.silences import tool_call
from harness.experiments.outcome import CannotDecideError, RefusedError
from harness.records import Outcome, Role
from harness.search.grammar import PAST_EDGE, Offered
from harness.search.schedule import MOST_ANSWER, Feature, Schedule, Visit, ways_of
from harness.workload.abandon import RequestSpec
from harness.workload.prompts import prompt

_LOOK_TOKENS: Final = 4
_FAN_OUTS: Final = (4, 2)  # answers to one request, the most first
_CHUNKS: Final = (256, 512, 2048, 8192)  # tokens: nothing says how many a step computes
_LONG: Final = 2048  # tokens of a prompt, where the context allows it
_LONG_S: Final = 0.5  # that it takes at most, until its first token
_LEAST: Final = 64
_SCHEMA: Final = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "ages": {"type": "array"}},
    "required": ["name", "ages"],
}
_KEYS: Final[Mapping[Feature, Mapping[str, Any]]] = {
    Feature.SCHEMA: {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "strict": True, "schema": _SCHEMA},
        }
    },
    Feature.TOOLS: tool_call(),
    Feature.STOP: {"stop": ["\n\n\n", "never said"]},
    Feature.LOGPROBS: {"logprobs": 2},
    Feature.SAMPLED: {"temperature": 1.0, "top_p": 0.9, "seed": 7},
    Feature.PRIORITY: {"priority": 5},
}
_CHAT_LOGPROBS: Final = {"logprobs": True, "top_logprobs": 2}


def body_of(visit: Visit, path: str, adapter: str | None) -> dict[str, Any]:
    """The keys that its features lay over the ordinary body, on the route `path`."""
    body: dict[str, Any] = {}
    for one in visit.features:
        if one is Feature.LOGPROBS and path.endswith("chat/completions"):
            body |= _CHAT_LOGPROBS
        elif one is Feature.ADAPTER and adapter is not None:
            body["model"] = adapter
        else:
            body |= _KEYS.get(one, {})
    return body


def spec_of(bench: Bench, visit: Visit, number: int, *, request_id: str = "") -> RequestSpec:
    usual = bench.session.plan.target.path
    path = usual if visit.route is None else route(usual, visit.route)
    return RequestSpec(
        user=number + 1,
        role=_role(visit),
        max_tokens=visit.answer,
        prompt_tokens=visit.prompt,
        n=visit.n,
        delivery=visit.delivery,
        way=None if visit.leave is None else visit.leave.way,
        path=None if path == usual else path,
        body=body_of(visit, path, bench.asked.adapter) or None,
        request_id=request_id,
    )


def is_greedy(visit: Visit) -> bool:
    """Its text says something: it is one answer, and nobody draws its words."""
    return visit.n == 1 and Feature.SAMPLED not in visit.features


def _role(visit: Visit) -> Role:
    """A row keeps the text of a canary."""
    if visit.leave is not None:
        return Role.USER
    return Role.CANARY if is_greedy(visit) else Role.CHECK


def text_of(bench: Bench, schedule: Schedule, number: int) -> str:
    """The prompt's text: the same for a visit that repeats another."""
    visit = schedule.visits[number]
    if visit.repeats is not None:
        return text_of(bench, schedule, visit.repeats)
    plan = bench.session.plan
    return prompt(
        seed=schedule.seed,
        user=number,
        n=0,
        num_bytes=plan.prompt_scale.num_bytes(visit.prompt),
        shared_bytes=plan.prompt_scale.num_bytes(visit.shared) if visit.shared else 0,
        salt="search",
    )


def find_offered(bench: Bench) -> Offered:
    """Asks for each feature once."""
    facts = bench.facts
    features = {one for one in Feature if _is_taken(bench, Visit(features=(one,)))}
    more = _LOOK_TOKENS + 1  # than one answer has
    fan_out = next((n for n in _FAN_OUTS if _is_taken(bench, Visit(n=n), tokens=more)), 1)
    long_prompt, token_s = _long_prompt(bench)
    chunks = _chunks(bench, long_prompt)
    return Offered(
        slots=facts.slots if facts.can_fill else None,
        chunks=chunks,
        long_prompt=long_prompt,
        longest_prompt=max(long_prompt, chunks[-1] + PAST_EDGE),
        long_answer=min(MOST_ANSWER, bench.patience.answer_tokens),
        features=frozenset(features),
        ways=ways_of(bench.session.plan.target),
        fan_out=fan_out,
        filling_prompt=bench.capacity.prompt_tokens or None,
        token_steps=token_s / facts.step_s,
    )


def check_taken(bench: Bench, schedule: Schedule) -> None:
    """Raises CannotDecideError for a schedule with features that the server refuses: then that
    nothing breaks would say nothing."""
    asked = sorted({feature for one in schedule.visits for feature in one.features})
    if refused := [one for one in asked if not _is_taken(bench, Visit(features=(one,)))]:
        raise CannotDecideError(
            f"the schedule asks for {', '.join(refused)}, which this server does not take"
        )


def _long_prompt(bench: Bench) -> tuple[int, float]:
    """Its length in tokens: many chunks if possible, but quick enough to be asked for often; and
    the seconds that each token takes, 0 if that is not known."""
    context = bench.facts.context
    tokens = _LONG if context is None else min(_LONG, context // 2)
    if (took_s := _first_token_s(bench, tokens)) is None:
        return _LEAST, 0.0
    token_s = max(0.0, took_s - bench.facts.ttft_s) / tokens
    return max(_LEAST, min(tokens, int(tokens * _LONG_S / took_s))), token_s


def _chunks(bench: Bench, long_prompt: int) -> tuple[int, ...]:
    """Those whose edge a prompt crosses, also a longer one if it is quick enough and leaves the
    context room for an answer; else one that the long prompt just crosses."""
    crossed = list[int]()
    for chunk in _CHUNKS:
        tokens = chunk + PAST_EDGE
        if tokens > long_prompt:
            has_room = bench.room(tokens) >= bench.patience.answer_tokens
            if long_prompt < _LONG or not has_room:
                break
            took_s = _first_token_s(bench, tokens)
            if took_s is None or took_s > _LONG_S:
                break
        crossed.append(chunk)
    return tuple(crossed) or (long_prompt - PAST_EDGE,)


def _first_token_s(bench: Bench, prompt_tokens: int) -> float | None:
    """None: the server does not answer such a prompt."""
    try:
        row = bench.ask(bench.short(1, prompt_tokens=prompt_tokens))
    except (CannotDecideError, RefusedError):
        return None
    if row.outcome is not Outcome.COMPLETED or row.first_token_ns is None:
        return None
    return (row.first_token_ns - row.sent_ns) / 1e9


def _is_taken(bench: Bench, visit: Visit, tokens: int = 1) -> bool:
    """It is answered, with at least as many tokens."""
    if Feature.ADAPTER in visit.features and bench.asked.adapter is None:
        return False
    spec = spec_of(bench, visit, 0)
    spec = bench.short(_LOOK_TOKENS, n=spec.n, path=spec.path, body=spec.body)
    try:
        row = bench.ask(spec)
    except (CannotDecideError, RefusedError):
        return False
    came = row.completion_tokens or row.tokens_read
    return row.outcome is Outcome.COMPLETED and came >= tokens
