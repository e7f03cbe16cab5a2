"""Losses that last: leaks, their slopes, growth, and a server that is wedged."""

from typing import Any

import pytest

from harness.analysis.counters import count_figures
from harness.analysis.figure import Figures
from harness.analysis.leaks import growth_figures, leak_figures
from harness.analysis.run_facts import run_facts
from harness.analysis.scraped import readings_of
from harness.store.manifest import IdleReading, Probing
from tests.harness.told import known, metric, reason, remarks, summary_of
from tests.made_up.rows import at
from tests.made_up.run import RunBuilder
from tests.made_up.servers import lonely


def leaks_of(run: RunBuilder) -> Figures:
    frames = run.frames()
    return leak_figures(frames, run_facts(frames))


def test_a_gauge_that_was_above_zero_before_shows_no_leak(run: RunBuilder) -> None:
    run.metrics(running="exact", free_blocks="exact")
    run.idle({"running": 2, "free_blocks": 100}, {"running": 0, "free_blocks": 100})
    assert reason(leaks_of(run)["leaked_slots"]).startswith("its_running was 2 before the load")
    assert str(metric(leaks_of(run)["leaked_blocks"]).mean) == "0.0"


def test_gauges_that_were_not_read_leak_nothing_known(run: RunBuilder) -> None:
    assert reason(leaks_of(run)["leaked_slots"]) == "reference does not show its running requests"
    run.metrics(running="exact")
    assert "its_running was not read" in reason(leaks_of(run)["leaked_slots"])


def test_blocks_follow_from_their_share_where_their_number_is_known(run: RunBuilder) -> None:
    run.another_engine()
    run.metrics(running="exact", kv_usage="exact")
    run.idle({"running": 0.0, "kv_usage": 0.0}, {"running": 0.0, "kv_usage": 0.0102})
    assert "does not show its free blocks" in reason(leaks_of(run)["leaked_blocks"])
    run.target.blocks_found = 1000
    assert metric(leaks_of(run)["leaked_blocks"]).mean == 10
    assert metric(leaks_of(run)["leaked_kv_share"]).mean == 0.0102


def test_a_gauge_in_percent_is_no_share(run: RunBuilder) -> None:
    run.another_engine()
    run.metrics(kv_usage="exact")
    run.idle({"kv_usage": 0.0}, {"kv_usage": 0.8})
    run.scrape(10, "its_kv_usage", 43.0)
    assert "its_kv_usage was 43, and a share is at most 1" in reason(
        leaks_of(run)["leaked_kv_share"]
    )


def test_a_counter_that_falls_between_two_scrapes_says_nothing(run: RunBuilder) -> None:
    run.another_engine()
    run.metrics(preemptions="exact", generated_tokens="exact")
    run.idle({"preemptions": 5.0}, {"preemptions": 9.0})
    for t, value in ((10, 7.0), (20, 1.0), (30, 9.0)):
        run.scrape(t, "its_preemptions", value)
        run.scrape(t, "its_generated_tokens", 100.0 + t)
    frames = run.frames()
    facts = run_facts(frames)
    preemptions = count_figures(frames.lifecycle, facts)["preemptions"]
    assert reason(preemptions).startswith("its_preemptions fell from 7 to 1 during the run")
    assert set(facts.fallen) == {"preemptions"}


def test_of_two_engines_on_a_page_the_mean_is_their_share(run: RunBuilder) -> None:
    run.metrics(kv_usage="exact", running="exact")
    for engine in (0, 1):
        run.scrape(10, "its_kv_usage", 0.2 + 0.4 * engine, f'{{"engine": "{engine}"}}')
        run.scrape(10, "its_running", 2.0, f'{{"engine": "{engine}"}}')
    frames = run.frames()
    levels = {
        role: readings.level.tolist()
        for role in ("kv_usage", "running")
        if (readings := readings_of(frames, run_facts(frames), role)) is not None
    }
    assert levels == {"kv_usage": [pytest.approx(0.4)], "running": [4.0]}


@pytest.mark.parametrize(
    ("ghosts", "later", "trust", "bound"),
    [
        (3.0, 50.0, "exact", "upper"),
        (3.0, 50.0, "exact_when_idle", "upper"),
        (3.0, None, "exact", "upper"),  # whether they compute is not known
        (3.0, 40.0, "exact", "point"),  # nothing computes: all that is missing is lost
        (0.0, 40.0, "exact_when_idle", "point"),
        (None, None, "exact", "upper"),  # whether something runs is not known
        (3.0, 50.0, "lower", None),  # at least what is lost and in use: says nothing of either
    ],
)
@pytest.mark.parametrize("role", ["free_blocks", "kv_usage"])
def test_blocks_that_ghosts_may_hold_are_lost_at_most(
    run: RunBuilder,
    role: str,
    ghosts: float | None,
    later: float | None,
    trust: str,
    bound: str | None,
) -> None:
    """On a server of 1,000 blocks, 475 are missing."""
    run.another_engine()
    known_roles = {} if ghosts is None else {"running": "exact"}
    run.metrics(**{role: trust}, generated_tokens="exact", **known_roles)
    before = {"free_blocks": 1000.0, "kv_usage": 0.0, "running": 0.0, "generated_tokens": 0.0}
    after = {"free_blocks": 525.0, "kv_usage": 0.475, "generated_tokens": 40.0}
    after |= {"running": ghosts or 0.0}
    shown = {role, "generated_tokens", *known_roles}
    was, now = ({key: idle[key] for key in shown} for idle in (before, after))
    run.idle(was, now)
    if later is not None:
        run.manifest.idle.later = {"generated_tokens": later}
    name, missing = ("leaked_blocks", 475) if role == "free_blocks" else ("leaked_kv_share", 0.475)
    found = leaks_of(run)
    if bound is None:
        assert "shows at least what they and a leak hold together" in reason(found[name])
        return
    assert (metric(found[name]).mean, metric(found[name]).bound) == (missing, bound)
    if ghosts is not None:
        assert metric(found["leaked_slots"]).mean == ghosts


def test_no_missing_block_is_no_bound(run: RunBuilder) -> None:
    run.another_engine()
    run.metrics(running="exact", free_blocks="exact")
    run.idle({"running": 0.0, "free_blocks": 9.0}, {"running": 1.0, "free_blocks": 9.0})
    assert metric(leaks_of(run)["leaked_blocks"]).bound == "point"


def loops(run: RunBuilder, free: list[float]) -> Figures:
    run.another_engine()
    run.metrics(free_blocks="exact")
    run.idle({"free_blocks": 100.0}, {"free_blocks": free[-1]})
    for number, value in enumerate(free, start=1):
        for i in range(3):
            run.abandon(f"{number}-{i}", t0=100 * number + i, tokens=[50])
        read = IdleReading(t_ns=at(100 * number + 50), values={"free_blocks": value})
        run.manifest.idle.loops.append(read)
    frames = run.frames()
    return growth_figures(frames, run_facts(frames))


def test_a_leak_is_a_slope_and_one_odd_reading_does_not_move_it(run: RunBuilder) -> None:
    slope = metric(loops(run, [94.0, 88.0, 60.0, 76.0, 70.0, 64.0])["leaked_blocks_per_abandon"])
    assert slope.n == 6
    assert slope.mean == pytest.approx(2.0)
    assert slope.bound == "upper", "nothing says that no ghost holds them"


def test_what_only_varies_does_not_leak_and_a_server_elsewhere_shows_no_growth(
    run: RunBuilder,
) -> None:
    found = loops(run, [99.0, 100.0, 99.0, 100.0, 100.0])
    low, high = known(metric(found["leaked_blocks_per_abandon"]).mean_ci95)
    assert low <= 0.0 <= high
    assert "not on this machine" in reason(found["handles_per_abandon"])


def test_too_few_loops_are_said_to_be(run: RunBuilder) -> None:
    found = loops(run, [94.0, 88.0])
    why = "not enough data for a slope: 2 {} readings, and {} are needed (`run.loops`)"
    assert reason(found["leaked_blocks_per_abandon"]) == why.format("idle", 4)
    assert reason(found["handles_per_abandon"]) == why.format("calm", 5)


@pytest.mark.parametrize(
    ("after", "later", "trust", "lost", "of", "said"),
    [
        (6, 31, "exact", [], "ghosts or lost slots", "ghosts: 25 more tokens were counted"),
        (6, 6, "exact", ["slots", "blocks"], None, "no token was counted any more: lost slots"),
        # A counter that rests until a request is released proves no loss.
        (6, 6, "exact_when_idle", [], "ghosts or lost slots", "still generate is not known"),
    ],
)
def test_a_slot_is_lost_only_if_nothing_is_computed(
    run: RunBuilder,
    after: float,
    later: float,
    trust: str,
    lost: list[str],
    of: str | None,
    said: str,
) -> None:
    lonely(run)
    run.metrics(running="exact", waiting="exact", generated_tokens=trust)
    run.manifest.idle.after |= {"running": 1.0, "generated_tokens": after}
    run.manifest.idle.later = {"running": 1.0, "waiting": 0.0, "generated_tokens": later}
    summary = summary_of(run.frames())
    assert summary["breakdown"]["leaks_lost"] == lost
    assert any(said in one["text"] for one in summary["validity"])
    ghosts = summary["metrics"]["ghost_rate"]
    assert (ghosts["of"], ghosts["bound"]) == (of, "lower")
    assert (ghosts["mean"], ghosts["others"].get("lost_slots")) == ((0, 1) if lost else (1, None))
    assert ghosts["others"].get("still_generating", 0.0) == later - after
    assert summary["metrics"]["leaked_slots"]["mean"] == 1.0


def test_calls_to_decode_show_whether_anything_is_computed(run: RunBuilder) -> None:
    lonely(run)
    run.metrics(running="exact", generated_tokens="exact_when_idle", decode_calls="exact")
    run.manifest.idle.after |= {"running": 1.0, "decode_calls": 10.0}
    for later, lost in ((10.0, ["slots", "blocks"]), (30.0, [])):
        run.manifest.idle.later = {"running": 1.0, "generated_tokens": 6.0, "decode_calls": later}
        assert summary_of(run.frames())["breakdown"]["leaks_lost"] == lost
        assert bool(remarks(run, "ghosts: the server still computed")) is (not lost)


SILENT = "wedged: after the settle time 1 of 1 short requests were not answered (ReadTimeout), and "


@pytest.mark.parametrize(
    ("probing", "wedged", "said"),
    [
        ({"healthy": True, "errors": ["ReadTimeout"]}, True, f"{SILENT}the server calls itself"),
        ({"healthy": False, "errors": ["ReadTimeout"]}, False, SILENT.removeprefix("wedged: ")),
        ({"healthy": None, "errors": ["ReadTimeout"]}, None, "and the server has no /health"),
        ({"healthy": True}, False, None),
        (
            {"healthy": True, "errors": ["status 429"], "is_silent": False},
            False,
            "the server answers short requests with: status 429; it calls itself healthy",
        ),
    ],
)
def test_wedged_is_healthy_without_answers(
    run: RunBuilder, probing: dict[str, Any], wedged: bool | None, said: str | None
) -> None:
    lonely(run)
    default: dict[str, Any] = {"sent": 1, "errors": [], "is_silent": True}
    run.manifest.probing = Probing(**default | probing)
    assert summary_of(run.frames())["wedged"] is wedged
    found = remarks(run, "short requests")
    assert len(found) == (said is not None)
    assert said is None or said in found[0]
