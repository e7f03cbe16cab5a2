"""The sample of requests that a page lists, and their data."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dashboards.request_sample import MOST_TICKS, request_rows, sample_requests, worst_first
from harness.export.library import load_run
from harness.records import Outcome
from tests.made_up.played import save_played


def made_up(
    outcomes: list[Outcome],
    ttft_ms: list[float | None],
    let_go_s: dict[int, float],
    ghosts: set[int],
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Requests r0, r1, ...; the numbers in `let_go_s` were abandoned."""
    first = [None if one is None else int(one * 1e6) for one in ttft_ms]
    requests = pd.DataFrame(
        {
            "request_id": [f"r{n}" for n in range(len(outcomes))],
            "outcome": [one.value for one in outcomes],
            "sent_ns": 0,
            "first_token_ns": pd.array(first, dtype="Int64"),
        }
    )
    cancels = pd.DataFrame(
        {
            "request_id": [f"r{n}" for n in let_go_s],
            "cancel_latency_s": list(let_go_s.values()),
            "ghost": pd.array([n in ghosts for n in let_go_s], dtype="boolean"),
        }
    )
    return requests, cancels


def test_ghosts_come_first_then_what_went_wrong_then_the_tails() -> None:
    left, stayed, failed = Outcome.ABANDONED, Outcome.COMPLETED, Outcome.FAILED
    requests, cancels = made_up(
        [left, stayed, failed, left, stayed, left],
        [9.0, 5.0, None, 1.0, 80.0, 1.0],
        {0: 0.01, 3: 2.0, 5: 0.5},
        ghosts={3},
    )
    assert worst_first(requests, cancels).tolist() == [3, 2, 4, 5, 1, 0]
    # A first token that is not known is not called slow.
    requests, cancels = made_up([Outcome.CUT_OFF, stayed], [None, 5.0], {}, ghosts=set())
    assert worst_first(requests, cancels).tolist() == [1, 0]


def many(n: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    return made_up([Outcome.COMPLETED] * n, [float(k) for k in range(n)], {}, ghosts=set())


def test_of_many_the_worst_are_listed_and_a_seeded_sample_of_the_others() -> None:
    chosen = sample_requests(*many(1_000), seed=7, worst=20, sample=5)
    assert chosen.positions[:20].tolist() == list(range(999, 979, -1))
    drawn = chosen.positions[20:].tolist()
    assert len(set(drawn)) == 5
    assert max(drawn) < 980
    assert chosen.text == (
        "The worst 20 of 1,000 requests are listed, and a random sample of 5 of the others "
        "(seed 7)."
    )
    again = sample_requests(*many(1_000), seed=7, worst=20, sample=5)
    other = sample_requests(*many(1_000), seed=8, worst=20, sample=5)
    assert np.array_equal(again.positions, chosen.positions)
    assert not np.array_equal(other.positions, chosen.positions)
    few = sample_requests(*many(25), seed=7, worst=20, sample=5)
    assert sorted(few.positions.tolist()) == list(range(25))
    assert few.text == "All 25 requests of the run are listed, the worst first."


def test_the_life_of_a_request_is_told_in_milliseconds_since_it_was_sent(tmp_path: Path) -> None:
    run = load_run(save_played(tmp_path / "run", ghosts=2))
    chosen, data = request_rows(run)
    columns, stamps, ticks = data["columns"], data["stamps"], data["ticks"]
    lengths = {len(values) for values in (*columns.values(), *stamps.values(), ticks)}
    assert lengths == {len(run.frames.requests)} == {chosen.total}
    assert columns["ghost"][:2] == [True, True]
    assert True not in columns["ghost"][2:]
    n = columns["request_id"].index("u-4")  # leaves after 4 tokens, 8 ms into the step after them
    assert (columns["planned_abandon"][n], columns["tokens_read"][n]) == (4, 4)
    assert ticks[n] == [20, 40, 60, 80]
    assert (stamps["admitted"][n], stamps["first_token"][n], stamps["last_token"][n]) == (1, 20, 80)
    left = stamps["left"][n]
    assert stamps["saw"][n] == left + 1
    assert stamps["heard"][n] == left + 2
    assert stamps["freed"][n] == pytest.approx(left + columns["let_go_ms"][n])
    stayed = columns["request_id"].index("u-3")
    assert stamps["left"][stayed] is None
    assert columns["let_go_ms"][stayed] is None


def test_stamps_of_another_clock_are_left_out(tmp_path: Path) -> None:
    run = load_run(save_played(tmp_path / "run", lifecycle=False))
    _, data = request_rows(run)
    assert set(data["stamps"]) == {"intended", "first_token", "last_token", "left", "ended"}
    assert all(len(one) <= MOST_TICKS for one in data["ticks"])
