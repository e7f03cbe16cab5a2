"""After the load, seen from outside: ghosts, lost slots, leaks, and a server that is wedged."""

import pytest

from harness.analysis.black_box import Methods, figures_from_outside, seen_from_outside
from harness.analysis.facts import run_facts
from harness.analysis.figure import NotMeasurable
from harness.analysis.leaks import growth_figures
from harness.analysis.littles_law import unread_tokens
from harness.records import Outcome
from harness.store.frames import RunFrames
from harness.store.manifest import IdleReading, Probing
from tests.harness.told import metric, summary_of
from tests.made_up.rows import at
from tests.made_up.run import RunBuilder
from tests.made_up.servers import lonely


def outside(*runs: RunFrames) -> dict[str, Methods]:
    return figures_from_outside([seen_from_outside(frames, run_facts(frames)) for frames in runs])


def test_unread_tokens_are_counted_by_blocks(run: RunBuilder) -> None:
    lonely(run)
    frames = run.frames()
    found = unread_tokens(frames, run_facts(frames))
    assert not isinstance(found, NotMeasurable)
    assert found.mean == 4.0


def test_ghosts_are_those_who_are_still_there(run: RunBuilder) -> None:
    lonely(run)
    run.manifest.idle.after |= {"running": 1.0}
    run.manifest.idle.later = {"running": 1.0, "waiting": 0.0, "generated_tokens": 31.0}
    frames = run.frames()
    found = metric(outside(frames)["ghost_rate"]["gauge"])
    assert (found.mean, found.bound) == (1.0, "lower")
    assert (found.others["still_generating"], found.of) == (25.0, "ghosts or lost slots")
    assert "lost_slots" not in found.others
    texts = [one["text"] for one in summary_of(frames)["validity"]]
    assert any("ghosts: 25 more tokens were counted" in text for text in texts)


def test_a_lost_slot_is_no_ghost(run: RunBuilder) -> None:
    lonely(run)
    run.manifest.idle.after |= {"running": 1.0}
    run.manifest.idle.later = {"running": 1.0, "waiting": 0.0, "generated_tokens": 6.0}
    summary = summary_of(run.frames())
    texts = [one["text"] for one in summary["validity"]]
    assert any("no token was counted any more: lost slots" in text for text in texts)
    ghosts = summary["metrics"]["ghost_rate"]
    assert (ghosts["mean"], ghosts["others"]["lost_slots"], ghosts["of"]) == (0.0, 1.0, None)
    assert summary["metrics"]["leaked_slots"]["mean"] == 1.0


def test_a_counter_that_rests_until_a_release_proves_no_loss(run: RunBuilder) -> None:
    lonely(run)
    run.metrics(running="exact", waiting="exact", generated_tokens="exact_when_idle")
    run.manifest.idle.after |= {"running": 1.0}
    run.manifest.idle.later = {"running": 1.0, "waiting": 0.0, "generated_tokens": 6.0}
    summary = summary_of(run.frames())
    assert summary["breakdown"]["leaks_lost"] == []
    assert any("still generate is not known" in one["text"] for one in summary["validity"])
    assert summary["metrics"]["ghost_rate"]["of"] == "ghosts or lost slots"
    assert summary["metrics"]["wasted_tokens"]["mean_ci95"] is None


def test_calls_to_decode_tell_whether_anything_is_computed(run: RunBuilder) -> None:
    lonely(run)
    run.metrics(running="exact", generated_tokens="exact_when_idle", decode_calls="exact")
    run.manifest.idle.after |= {"running": 1.0, "decode_calls": 10.0}
    for later, lost in ((10.0, ["slots", "blocks"]), (30.0, [])):
        run.manifest.idle.later = {"running": 1.0, "generated_tokens": 6.0, "decode_calls": later}
        summary = summary_of(run.frames())
        assert summary["breakdown"]["leaks_lost"] == lost
        texts = [one["text"] for one in summary["validity"]]
        assert any("ghosts: the server still computed" in t for t in texts) is (not lost)


def loops(run: RunBuilder, free: list[float]) -> None:
    run.another_engine()
    run.metrics(free_blocks="exact")
    run.idle({"free_blocks": 100.0}, {"free_blocks": free[-1]})
    for number, value in enumerate(free, start=1):
        for i in range(3):
            run.abandon(f"{number}-{i}", t0=100 * number + i, tokens=[50])
        reading = IdleReading(t_ns=at(100 * number + 50), values={"free_blocks": value})
        run.manifest.idle.loops.append(reading)


def test_a_leak_is_a_slope_and_one_odd_reading_does_not_move_it(run: RunBuilder) -> None:
    loops(run, [94.0, 88.0, 60.0, 76.0, 70.0, 64.0])
    found = metric(growth_figures(f := run.frames(), run_facts(f))["leaked_blocks_per_abandon"])
    assert found.mean == pytest.approx(2.0)


def test_what_only_varies_does_not_leak(run: RunBuilder) -> None:
    loops(run, [99.0, 100.0, 99.0, 100.0, 100.0])
    limits = metric(growth_figures(f := run.frames(), run_facts(f))["leaked_blocks_per_abandon"])
    assert limits.mean_ci95 is not None
    assert limits.mean_ci95[0] <= 0.0 <= limits.mean_ci95[1]


def test_too_few_loops_are_said_to_be(run: RunBuilder) -> None:
    loops(run, [94.0, 88.0])
    found = growth_figures(f := run.frames(), run_facts(f))["leaked_blocks_per_abandon"]
    assert isinstance(found, NotMeasurable)
    assert found.reason.startswith("not enough data for a slope: 2 idle readings, and 4 are needed")


@pytest.mark.parametrize(
    ("healthy", "errors", "wedged"),
    [
        (True, ["ReadTimeout"], True),
        (False, ["ReadTimeout"], False),
        (None, ["ReadTimeout"], None),
        (True, [], False),
    ],
)
def test_wedged_is_healthy_without_answers(
    run: RunBuilder, healthy: bool | None, errors: list[str], wedged: bool | None
) -> None:
    lonely(run)
    run.manifest.probing = Probing(sent=1, healthy=healthy, errors=errors, is_silent=bool(errors))
    summary = summary_of(run.frames())
    assert summary["wedged"] is wedged
    warned = [one["text"] for one in summary["validity"] if one["level"] == "warning"]
    assert any("were not answered" in text for text in warned) is bool(errors)


def test_a_wrong_answer_is_an_answer(run: RunBuilder) -> None:
    lonely(run)
    run.manifest.probing = Probing(sent=2, healthy=True, errors=["status 429"])
    summary = summary_of(run.frames())
    assert summary["wedged"] is False
    texts = [one["text"] for one in summary["validity"]]
    assert (
        "after the settle time the server answers short requests with: status 429; "
        "it calls itself healthy"
    ) in texts


def test_who_was_cut_off_makes_no_figure_of_cancellation(run: RunBuilder) -> None:
    lonely(run)
    for row in run.requests:
        row.outcome, row.abandoned_ns = Outcome.CUT_OFF, None
    summary = summary_of(run.frames())
    for name in ("cancel_latency_s", "ghost_rate", "wasted_tokens"):
        assert "no request was abandoned" in summary["not_measurable"][name]
    assert summary["audit"]["client"]["cut_off"] == 1
