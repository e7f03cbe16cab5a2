"""Several runs as one summary: what is pooled, what is a value a round, what is missing."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from harness.analysis.figure import reading
from harness.compare.pool import ArmRound, all_requests, analyse_round
from harness.records import Remark
from tests.harness.told import MakeRun, pooled_summary
from tests.made_up.rows import at
from tests.made_up.run import RunBuilder
from tests.made_up.servers import lonely

MakeArm = Callable[..., ArmRound]

MANIFEST: dict[str, Any] = {
    "run_id": "parent",
    "status": "complete",
    "workload": {
        "name": "w",
        "headlines": ["preemptions"],
        "run": {"rounds": 3, "reference_arm": None},
        "arms": [{"name": "off"}, {"name": "on"}],
    },
}


@pytest.fixture
def make_arm(make_run: MakeRun) -> MakeArm:
    """One run with these numbers of requests and preemptions."""

    def make(number: int, arm: str, *, requests: int = 1, preemptions: float = 8) -> ArmRound:
        run = make_run()
        for i in range(requests):
            name = f"{number}-{arm}-{i}"
            run.request(name, sent=0, tokens=[10, 20], outcome="completed", end=500)
        run.idle({"running": 0, "preemptions": 5}, {"running": 0, "preemptions": 5 + preemptions})
        run.metrics(running="exact", preemptions="exact")
        return analyse_round(run.frames(), round_number=number, arm=arm)

    return make


def six_of(one: ArmRound) -> list[ArmRound]:
    return [replace(one, round=n, arm=arm) for n in (1, 2, 3) for arm in ("off", "on")]


def with_rounds(rounds: int, reference: str | None = None) -> dict[str, Any]:
    run = {"rounds": rounds, "reference_arm": reference}
    return MANIFEST | {"workload": MANIFEST["workload"] | {"run": run}}


def test_another_arm_may_be_the_reference_and_too_few_rounds_are_told_of_once(
    make_arm: MakeArm,
) -> None:
    rounds = [make_arm(1, arm) for arm in ("off", "on")]
    summary = pooled_summary(rounds, with_rounds(1, "on"))
    (found,) = summary["differences"]["preemptions"]["mean"]
    assert (found["arm"], found["reference"], found["n"]) == ("off", "on", 1)
    (said,) = [one["text"] for one in summary["validity"] if "paired rounds" in one["text"]]
    assert said.endswith("an interval takes at least 3 of them, and `run.rounds` is 1")


def test_what_is_missing_is_said_and_left_out_of_the_pairs(make_arm: MakeArm) -> None:
    rounds = [make_arm(1, "off"), make_arm(1, "on", preemptions=4), make_arm(3, "off")]
    summary = pooled_summary(rounds, MANIFEST)
    assert summary["arms"]["on"]["per_round"]["preemptions"]["mean"] == [4.0, None, None]
    assert summary["differences"]["preemptions"]["mean"][0]["n"] == 1
    (text, *_) = [said["text"] for said in summary["validity"] if said["level"] == "warning"]
    assert text == "3 of 6 runs gave no figures: 2-off, 2-on, 3-on"
    only_on = pooled_summary(rounds[1:2], MANIFEST)
    assert (only_on["arms"]["off"]["metrics"], only_on["differences"]) == ({}, {})


def test_remarks_that_differ_in_numbers_alone_are_said_once(make_arm: MakeArm) -> None:
    rounds = six_of(make_arm(1, "off"))
    texts = [said["text"] for said in pooled_summary(rounds, MANIFEST)["validity"]]
    (nobody,) = [text for text in texts if text.startswith("no request was abandoned")]
    assert nobody.endswith("(in 1-off and 5 more)")
    late = [Remark(level="warning", text=f"{time} late") for time in ("950 µs", "1.5 ms", "2 s")]
    rounds = [replace(one, remarks=[said]) for one, said in zip(rounds[:3], late, strict=True)]
    texts = [said["text"] for said in pooled_summary(rounds, MANIFEST)["validity"]]
    assert "950 µs late (in 1-off and 2 more)" in texts


def test_all_requests_tell_their_round_and_arm(make_arm: MakeArm) -> None:
    rows = all_requests([make_arm(1, "off", requests=2), make_arm(2, "on")])
    assert rows[["round", "arm"]].to_numpy().tolist() == [[1, "off"], [1, "off"], [2, "on"]]
    assert set(rows["trial_arm"]) == {"main"}


def test_ghosts_and_first_tokens_that_never_came_have_the_largest_ranks(make_run: MakeRun) -> None:
    rounds = []
    for arm in ("off", "on"):
        run = make_run()
        run.manifest.window.settled_ns = at(8000)
        for i in range(6):
            name, is_ghost = f"{arm}{i}", arm == "on" and i < 4
            run.abandon(name, t0=100, tokens=[50])
            run.events(name, arrived=1, admitted=2, first_token=40)
            if not is_ghost:
                run.events(name, removed=120, blocks_freed=120, finished=120)
            tokens = [] if is_ghost else [150.0]
            outcome = "cut_off" if is_ghost else "completed"
            run.request(f"{name} stays", sent=140, tokens=tokens, outcome=outcome, end=160)
        rounds.append(analyse_round(run.frames(), round_number=1, arm=arm))
    shifts = pooled_summary(rounds, MANIFEST)["shifts"]
    for metric in ("cancel_latency_s", "ttft_s"):
        found = shifts[metric]["on"]
        assert (found["n"], found["n_censored"], found["n_reference_censored"]) == (6, 4, 0)
        assert found["superiority"] == pytest.approx((4 + 2 / 2) / 6)
        assert found["shift"] is None
        assert found["note"] == "too many of the values are only known to exceed a time"


def test_limits_and_other_methods_are_not_compared_between_rounds(run: RunBuilder) -> None:
    rounds = six_of(analyse_round(lonely(run).frames(), round_number=1, arm="off"))
    summary = pooled_summary(rounds, MANIFEST)
    on = summary["arms"]["on"]
    assert on["metrics"]["cancel_latency_s"]["bound"] == "upper"
    assert "cancel_latency_s" not in on["per_round"]
    assert "cancel_latency_s" not in summary["differences"]
    assert on["per_round"]["wasted_tokens"] == {"mean": [4.0, 4.0, 4.0]}
    exact = reading("wasted_tokens", 9.0, method="exact")
    rounds[1] = replace(rounds[1], figures=rounds[1].figures | {"wasted_tokens": exact})
    summary = pooled_summary(rounds, MANIFEST)
    assert summary["arms"]["on"]["per_round"]["wasted_tokens"] == {"mean": [None, 4.0, 4.0]}


def test_a_round_in_which_nobody_left_is_pooled_with_others(make_run: MakeRun) -> None:
    made = []
    for number in (1, 2):
        run = make_run()
        run.steps(0, 9, "a")
        run.step(100, 110, b=1)
        run.request("b", sent=5, tokens=[115], outcome="completed", end=120)
        run.events("b", arrived=6, admitted=100.5)
        if number == 2:
            run.abandon("a", t0=93, tokens=[20, 30])
            run.events("a", arrived=0, admitted=0, first_token=10, disconnected=94)
            run.events("a", abort_received=95, removed=100.1, blocks_freed=100.2, finished=100.3)
        run.configure(max_num_seqs=1)
        made.append(analyse_round(run.frames(), round_number=number, arm="off"))
    off = pooled_summary(made, MANIFEST)["arms"]["off"]
    assert off["metrics"]["slot_refill_s"]["n"] == 1
