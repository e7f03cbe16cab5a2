"""Cases about services that the bundled engine does not offer, or does not offer so: green on a
scripted server that does all of them well, and red under each of its bad habits
(tools/truth/services.py)."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from harness.store.conform_result import CaseResult, Failure, Verdict
from tests.e2e.running import service_server, until_decided
from tests.reference_engine.running_engine import running
from tools.truth.conform_cases import HABITS, Odd, conform, engine_flags
from tools.truth.services import ADAPTER

TARGET = """
description = "The scripted server of services"
stream_options = { include_usage = true, continuous_usage_stats = true }
continuous_usage = true
bytes_are_tokens = true
slots_from = "workload"
settle_s = 0.6
uncached_body = { cache_salt = "{random}" }
"""
NO_BYPASS = TARGET.replace('uncached_body = { cache_salt = "{random}" }', "")
RESUMES = """
disconnect = "resume"

[resume]
header = "X-Conversation-Id"
read_path = "/v1/stream/{id}"
stop_path = "/v1/stream/{id}"
"""
SLOTS = 4
CASES = (
    *("silence/leave", "tools/leave", "same/answer", "same/twin", "n/prompts"),
    *("background/cancel", "pooling/leave", "adapter/pinned"),
)
RESUMED = ("resume/stop", "resume/abandoned")
WITHOUT = ("tools/leave", "background/cancel", "pooling/leave")  # the bundled engine


def judged(
    folder: Path, *cases: str, habits: Mapping[str, float | str], target: str = TARGET
) -> list[CaseResult]:
    (folder / "target.toml").write_text(target)

    def once(turn: int) -> list[CaseResult]:
        flags = ["--engine", str(folder / "target.toml"), "--slots", str(SLOTS), "--tries", "3"]
        settings: dict[str, float | str] = {
            "slots": SLOTS,
            "step_s": 0.01,
            "num_blocks": 4096,
            **habits,
        }
        with service_server(**settings) as server:
            flags += ["--target", server.url, "--adapter", ADAPTER]
            return conform(folder / f"{turn}", *cases, *flags).cases

    return until_decided(
        once, lambda results: all(one.verdict is not Verdict.CANNOT_DECIDE for one in results)
    )


@pytest.mark.e2e
@pytest.mark.parametrize(("cases", "target"), [(CASES, TARGET), (RESUMED, TARGET + RESUMES)])
def test_a_server_with_good_habits_passes(
    tmp_path: Path, cases: Sequence[str], target: str
) -> None:
    habits = {"piece_tokens": 16, "silent_tokens": 24}
    results = judged(tmp_path, *cases, habits=habits, target=target)
    assert {one.id: (one.verdict, one.reason) for one in results if one.verdict != "pass"} == {}
    assert {one.id for one in results} == set(cases)


@pytest.mark.e2e
@pytest.mark.table
@pytest.mark.parametrize("odd", [pytest.param(one, id=f"{one.case} {one}") for one in HABITS])
def test_a_bad_habit_is_red(tmp_path: Path, odd: Odd) -> None:
    target = TARGET + RESUMES if odd.case in RESUMED else TARGET
    (result,) = judged(tmp_path, odd.case, habits=odd.settings, target=target)
    assert (result.verdict, result.kind) == (Verdict.FAIL, odd.kind), result.reason


@pytest.mark.e2e
@pytest.mark.table
def test_a_cache_that_cannot_be_bypassed_is_known_by_what_was_read_before_the_leave(
    tmp_path: Path,
) -> None:
    """Nothing was read of an answer that was left in its prefill: that is not seen."""
    cases = ("same/answer", "same/prefill")
    results = judged(tmp_path, *cases, habits={"spoils_cold": 1}, target=NO_BYPASS)
    found = {one.id: (one.verdict, one.kind) for one in results}
    assert found["same/answer"] == (Verdict.FAIL, Failure.HARM), results
    assert found["same/prefill"] == (Verdict.PASS, None), results


@pytest.mark.e2e
@pytest.mark.table
def test_without_a_bypass_a_good_server_has_the_same_texts(tmp_path: Path) -> None:
    results = judged(tmp_path, "same/", habits={}, target=NO_BYPASS)
    assert {one.verdict for one in results} == {Verdict.PASS}, results


@pytest.mark.e2e
@pytest.mark.table
def test_what_the_bundled_engine_does_not_offer_is_not_supported(tmp_path: Path) -> None:
    with running(*engine_flags("")) as engine:
        flags = ("--target", engine.url, "--engine", "reference", "--adapter", "none")
        result = conform(tmp_path / "out", *WITHOUT, "adapter/", "resume/", *flags)
    assert {one.id: one.verdict for one in result.cases} == {
        **dict.fromkeys(WITHOUT, Verdict.NOT_SUPPORTED),
        "adapter/pinned": Verdict.CANNOT_DECIDE,
    }
    assert set(result.not_run) == set(RESUMED)
