"""Clean and defective servers of any number of slots, with a queue or without one, with short steps
and with flushes: `walkaway conform` as it is typed, on scripted servers whose truth is known."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from harness.store.conform_result import CaseResult, Failure, Verdict
from tests.e2e.running import scripted_server
from tests.harness.conform.slot_server import Manners, serving
from tools.truth.conform_cases import conform

TARGET = """
description = "A scripted server with slots"
stream_options = { include_usage = true }
bytes_are_tokens = true
slots_from = "workload"
settle_s = 1.0
"""
GAUGES = """
[metrics]
running = { name = "slots_running", refresh = "at once", trust = "exact" }
waiting = { name = "slots_waiting", refresh = "at once", trust = "exact" }
"""
DRAINS = 'disconnect = "drain"\n'
CASE = "stream/fin-decode"
QUEUE = Manners(step_s=0.01)
REFUSE = Manners(step_s=0.01, full=429)
SHORT = Manners(step_s=0.0016)
FLUSH = Manners(step_s=0.01, flush=16)
MANY = Manners(slots=64, step_s=0.02)
GAUGE = Manners(slots=0, metrics=True)
PACE = Manners(slots=0, stream_s=0.003, chunk_s=0.03)


def judged(folder: Path, manners: Manners, *cases: str, target: str = TARGET) -> list[CaseResult]:
    (folder / "target.toml").write_text(target + (GAUGES if manners.metrics else ""))
    with serving(manners, folder / "server.log") as url:
        flags = ["--target", url, "--engine", str(folder / "target.toml"), "--tries", "4"]
        flags += ["--metrics-url", f"{url}/metrics"] if manners.metrics else []
        flags += [] if manners.slots else ["--slots", "5000"]  # they need not be counted
        return conform(folder / "out", *cases, *flags).cases


def changed(manners: Manners, **changes: float | str) -> Manners:
    fields = {name: getattr(manners, name) for name in Manners.__slots__}
    return Manners(**{**fields, **changes})


def table(*values: object) -> object:
    """Left to `make conform-faults`."""
    return pytest.param(*values, marks=pytest.mark.table)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("manners", "way"),
    [
        (QUEUE, "full_slots"),
        (REFUSE, "admission"),
        table(SHORT, "full_slots"),
        table(changed(FLUSH, events=False), "full_slots"),
        table(MANY, "full_slots"),
    ],
)
def test_a_good_server_of_any_kind_stops(tmp_path: Path, manners: Manners, way: str) -> None:
    (result,) = judged(tmp_path, manners, CASE)
    assert (result.verdict, result.stops, result.way) == (Verdict.PASS, True, way), result.reason


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("manners", "kind"),
    [
        (changed(QUEUE, hold_s=0.3), Failure.LATE),
        (changed(QUEUE, stall_s=0.3), Failure.HARM),
        table(changed(QUEUE, cuts=True), Failure.HARM),
        (changed(REFUSE, hold_s=-1), Failure.NEVER),
        table(changed(SHORT, forgets=True), Failure.NEVER),
        table(changed(FLUSH, forgets=True), Failure.NEVER),
        table(changed(MANY, forgets=True), Failure.NEVER),
    ],
)
def test_a_bad_server_of_any_kind_is_red_for_its_fault(
    tmp_path: Path, manners: Manners, kind: Failure
) -> None:
    (result,) = judged(tmp_path, manners, CASE)
    assert (result.verdict, result.kind) == (Verdict.FAIL, kind), result.reason
    if kind is not Failure.HARM:
        assert result.stops is False


EARLY = ("stream/before-first", "prefill/leave")
CROWDS = ("storm/all", "leak/slots", "wedge/health")


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("manners", "way", "cases"),
    [
        (GAUGE, "gauge", EARLY),
        table(GAUGE, "gauge", (CASE, *CROWDS)),
        table(PACE, "pace", (CASE, *EARLY, *CROWDS)),
    ],
)
def test_a_good_server_whose_slots_cannot_be_filled_passes(
    tmp_path: Path, manners: Manners, way: str, cases: Sequence[str]
) -> None:
    for result in judged(tmp_path, manners, *cases):
        assert result.verdict is Verdict.PASS, result.reason
        assert result.way == ("text" if result.id == "wedge/health" else way)


@pytest.mark.e2e
@pytest.mark.table
@pytest.mark.parametrize("manners", [GAUGE, PACE], ids=["gauge", "pace"])
@pytest.mark.parametrize(
    ("forgets", "kinds"),
    [
        ("early", {"stream/before-first": Failure.NEVER}),
        ("prefill", {"prefill/leave": Failure.LATE}),
        ("resets", {CASE: None, "stream/rst-decode": Failure.NEVER}),
        (True, {CASE: Failure.NEVER, "storm/all": Failure.NEVER}),
        (True, {"leak/slots": Failure.NEVER}),
    ],
)
def test_a_bad_server_whose_slots_cannot_be_filled_is_red_for_its_fault(
    tmp_path: Path, manners: Manners, forgets: bool | str, kinds: Mapping[str, Failure | None]
) -> None:
    results = judged(tmp_path, changed(manners, forgets=forgets), *kinds)
    assert {one.id: one.kind for one in results} == kinds, [one.reason for one in results]


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("manners", "kind", "way"), [(GAUGE, Failure.NEVER, "gauge"), table(PACE, None, None)]
)
def test_what_runs_on_after_a_silence_is_seen_before_it_ends(
    tmp_path: Path, manners: Manners, kind: Failure | None, way: str | None
) -> None:
    """By pace nothing is seen without traffic."""
    (result,) = judged(tmp_path, changed(manners, forgets=True), "rest/no-traffic")
    assert (result.kind, result.way) == (kind, way), result.reason
    assert result.verdict is (Verdict.FAIL if kind else Verdict.CANNOT_DECIDE)


@pytest.mark.e2e
@pytest.mark.parametrize("ghost_every", [table(0), table(1)])
def test_where_neither_slots_nor_requests_are_known_a_rest_is_judged(
    tmp_path: Path, ghost_every: int
) -> None:
    cases = ("leak/slots", "rest/no-traffic", "stream/last-token")
    (tmp_path / "target.toml").write_text(TARGET)
    settings = {"slots": 64, "num_blocks": 16384, "step_s": 0.02, "busy_s": 0.006}
    with scripted_server(**settings, ghost_every=ghost_every) as server:
        flags = ["--target", server.url, "--engine", str(tmp_path / "target.toml")]
        flags += ["--slots", "5000", "--pid", str(server.process.pid)]
        results = {one.id: one for one in conform(tmp_path / "out", *cases, *flags).cases}
    last = results.pop("stream/last-token")
    assert "ended by themselves" in last.reason
    for one in results.values():
        assert one.kind is (Failure.NEVER if ghost_every else None), one.reason
        assert one.way == "quiet"


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("manners", "case", "verdict"),
    [
        table(Manners(slots=1, full=429), "prefill/retry-at-once", Verdict.PASS),
        table(Manners(slots=1, forgets=True, chunk_s=0.03), "prefill/leave", Verdict.FAIL),
        table(Manners(slots=1), "bystander/ends", Verdict.NOT_SUPPORTED),
    ],
)
def test_a_server_with_one_slot_is_judged_as_far_as_one_can_be(
    tmp_path: Path, manners: Manners, case: str, verdict: Verdict
) -> None:
    (result,) = judged(tmp_path, manners, case)
    assert result.verdict is verdict, result.reason


@pytest.mark.e2e
@pytest.mark.table
@pytest.mark.parametrize("bad", [{"stall_s": 0.4}, {"cuts": True}])
def test_harm_to_neighbours_is_seen_where_many_leave_at_once(
    tmp_path: Path, bad: dict[str, float]
) -> None:
    (result,) = judged(tmp_path, changed(MANY, **bad), CASE)
    assert result.kind is Failure.HARM, result.reason


@pytest.mark.e2e
@pytest.mark.table
@pytest.mark.parametrize("manners", [QUEUE, REFUSE, SHORT, FLUSH])
def test_a_server_that_does_not_see_resets_is_red_for_them_alone(
    tmp_path: Path, manners: Manners
) -> None:
    deaf = changed(manners, forgets="resets")
    closed, reset = judged(tmp_path, deaf, CASE, "stream/rst-decode")
    assert closed.verdict is Verdict.PASS, closed.reason
    assert (reset.verdict, reset.kind) == (Verdict.FAIL, Failure.NEVER), reset.reason


@pytest.mark.e2e
@pytest.mark.table
@pytest.mark.parametrize(("leaks", "kind"), [(0, None), (60, Failure.NEVER)])
def test_a_server_that_drains_must_have_its_memory_back(
    tmp_path: Path, leaks: int, kind: Failure | None
) -> None:
    manners = Manners(step_s=0.005, memory=4000, forgets=True, leaks=leaks)
    results = judged(tmp_path, manners, "leak/kv", "rest/no-traffic", target=DRAINS + TARGET)
    assert [one.kind for one in results] == [kind, kind], [one.reason for one in results]
    assert all(one.verdict in (Verdict.PASS, Verdict.FAIL) for one in results)


@pytest.mark.e2e
@pytest.mark.table
def test_a_server_that_drains_and_shows_its_slots_to_nobody_passes(tmp_path: Path) -> None:
    for manners in (GAUGE, PACE):
        forgetful = changed(manners, forgets=True)
        (result,) = judged(tmp_path, forgetful, CASE, target=DRAINS + TARGET)
        assert (result.verdict, "`drain`" in result.reason) == (Verdict.PASS, True), result.reason


@pytest.mark.e2e
@pytest.mark.table
@pytest.mark.parametrize(
    ("manners", "why"),
    [
        (Manners(rate=6), "limits the rate of requests"),
        (Manners(step_s=1.0), "too slow for this suite"),
    ],
)
def test_a_server_that_cannot_be_loaded_says_why_and_is_not_called_bad(
    tmp_path: Path, manners: Manners, why: str
) -> None:
    (result,) = judged(tmp_path, manners, CASE)
    assert (result.verdict, why in result.reason) == (Verdict.CANNOT_DECIDE, True), result.reason


@pytest.mark.e2e
@pytest.mark.table
@pytest.mark.parametrize(("before", "after"), [(4, 8), (8, 4)])
def test_a_server_that_changes_its_slots_is_counted_again(
    tmp_path: Path, before: int, after: int
) -> None:
    manners = Manners(step_s=0.01, slots=before, slots_later=after, later=90)
    cases = (CASE, "stream/rst-decode", "unary/leave", "queue/leave")
    results = judged(tmp_path, manners, *cases)
    assert Verdict.FAIL not in {one.verdict for one in results}, results
    assert [one.verdict for one in results].count(Verdict.CANNOT_DECIDE) <= 2, results
    assert results[-1].verdict is Verdict.PASS, results[-1].reason
    assert any(f"had {before} slots before" in one.reason for one in results), results


@pytest.mark.parametrize("says_done", [True, False])
def test_a_server_that_ignores_n_does_not_support_it(tmp_path: Path, *, says_done: bool) -> None:
    """Its one answer is whole, though the other ones that were asked for do not come."""
    (case,) = judged(tmp_path, Manners(step_s=0.005, says_done=says_done), "n/parent")
    assert case.verdict is Verdict.NOT_SUPPORTED
    assert case.reason == "4 tokens came where 16 were asked for: n is ignored"
