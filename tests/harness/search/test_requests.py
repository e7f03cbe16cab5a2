"""A visit as a request, and what a server takes."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from harness.conform.bench import Bench
from harness.experiments.idle_server import ServerFacts
from harness.experiments.outcome import CannotDecideError, RefusedError
from harness.records import Outcome, Role
from harness.search.requests import body_of, check_taken, find_offered, spec_of, text_of
from harness.search.schedule import Feature, Leave, Schedule, Visit
from harness.workload.abandon import RequestSpec
from harness.workload.workload import load_target
from tests.made_up.rows import request_row

REFERENCE = load_target("reference")


def bench_of(
    refused: tuple[str, ...] = (),
    adapter: str | None = None,
    *,
    context: int | None = 4096,
    token_s: float = 1e-3,
) -> Bench:
    """A server that refuses bodies with these keys, gives one answer to each request, and takes
    `token_s` for each token of its prompt."""

    def ask(spec: RequestSpec) -> Any:
        if any(key in (spec.body or {}) for key in refused):
            raise RefusedError("it is not offered")
        first_ns = int(1e9 * token_s * spec.prompt_tokens)
        row = request_row(
            "r", sent_ns=0, ended_ns=9, outcome=Outcome.COMPLETED, token_times_ns=[first_ns]
        )
        row.completion_tokens = spec.max_tokens
        return row

    bench: Any = SimpleNamespace(
        session=SimpleNamespace(
            plan=SimpleNamespace(
                target=REFERENCE, prompt_scale=SimpleNamespace(num_bytes=lambda tokens: tokens)
            )
        ),
        asked=SimpleNamespace(adapter=adapter),
        facts=ServerFacts(4, 0.02, 0.02, context),
        room=lambda tokens: (context or 1 << 20) - tokens,
        patience=SimpleNamespace(answer_tokens=300),
        capacity=SimpleNamespace(prompt_tokens=0),
        short=lambda tokens, **more: RequestSpec(
            **{"user": 0, "max_tokens": tokens, "prompt_tokens": 32, **more}
        ),
        ask=ask,
    )
    return cast(Bench, bench)


def test_features_are_keys_of_the_body_and_routes() -> None:
    chat = Visit(features=(Feature.CHAT, Feature.LOGPROBS, Feature.ADAPTER))
    spec = spec_of(bench_of(adapter="one"), chat, 3)
    assert spec.path == "/v1/chat/completions"
    assert spec.body == {"logprobs": True, "top_logprobs": 2, "model": "one"}
    assert spec.user == 4
    assert body_of(Visit(features=(Feature.STOP,)), "/v1/completions", None).keys() == {"stop"}


@pytest.mark.parametrize(
    ("visit", "role"),
    [
        (Visit(), Role.CANARY),
        (Visit(n=2), Role.CHECK),
        (Visit(features=(Feature.SAMPLED,)), Role.CHECK),
        (Visit(leave=Leave()), Role.USER),
    ],
)
def test_the_text_of_one_greedy_answer_is_kept(visit: Visit, role: Role) -> None:
    assert spec_of(bench_of(), visit, 0).role is role


def test_a_visit_that_repeats_another_has_its_prompt_and_all_share_a_beginning() -> None:
    visits = (Visit(prompt=64, shared=20), Visit(prompt=64, shared=20), Visit(repeats=1, prompt=64))
    schedule = Schedule(seed=3, visits=visits)
    first, second, third = (text_of(bench_of(), schedule, number) for number in range(3))
    assert first != second == third
    assert first[:20] == second[:20]
    assert len(first) == 64


def test_what_is_refused_is_not_offered() -> None:
    offered = find_offered(bench_of(refused=("response_format",)))
    assert Feature.SCHEMA not in offered.features
    assert Feature.ADAPTER not in offered.features, "none was named"
    assert {Feature.CHAT, Feature.STOP} <= offered.features
    assert (offered.slots, offered.chunks) == (4, (256,))
    assert offered.long_prompt == 500, "in half a second"
    assert offered.fan_out == 1, "no more tokens came than one answer has"
    assert offered.filling_prompt is None


@pytest.mark.parametrize(
    ("context", "token_s", "chunks", "longest"),
    [
        (16_384, 1e-5, (256, 512, 2048, 8192), 8201),
        (None, 1e-5, (256, 512, 2048, 8192), 8201),
        (8192, 1e-5, (256, 512, 2048), 2057),  # no room for the longest
        (16_384, 1e-4, (256, 512, 2048), 2057),  # it would take 0.8 s
        (16_384, 1e-3, (256,), 500),
        (16_384, 1.0, (55,), 64),
    ],
)
def test_edges_of_chunks_are_those_that_a_quick_prompt_can_cross(
    context: int | None, token_s: float, chunks: tuple[int, ...], longest: int
) -> None:
    offered = find_offered(bench_of(context=context, token_s=token_s))
    assert (offered.chunks, offered.longest_prompt) == (chunks, longest)
    assert offered.token_steps == pytest.approx(token_s / 0.02, abs=0.01)


def test_a_schedule_with_a_feature_that_the_server_refuses_is_not_played() -> None:
    bench = bench_of(refused=("response_format",))
    check_taken(bench, Schedule(seed=1, visits=(Visit(features=(Feature.STOP,)),)))
    with pytest.raises(CannotDecideError, match="asks for schema, which this server does not take"):
        check_taken(bench, Schedule(seed=1, visits=(Visit(features=(Feature.SCHEMA,)),)))
