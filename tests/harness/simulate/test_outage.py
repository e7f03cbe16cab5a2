"""When replicas die, drain and come back."""

from random import Random
from typing import Any

from harness.simulate.outage import Outages, coarse_shares
from harness.workload.cluster import Outage

S = 1_000_000_000
NAMES = [f"worker-{n}" for n in range(10)]


def _outages(*outages: Outage, seed: int = 1) -> Outages:
    return Outages(outages, NAMES, Random(seed), start_ns=S)


def _outage(**settings: Any) -> Outage:
    return Outage(**{"at_s": 5.0, "kind": "die", "share": 0.2, **settings})


def _play(outages: Outages, *, takes_s: float = 0.0) -> list[tuple[float, str, str]]:
    """Each replica goes so long after its turn came."""
    seen = list[tuple[float, str, str]]()
    while (due_ns := outages.due_ns()) is not None:
        turn = outages.take()
        if turn is None:
            continue
        seen.append((due_ns / S, turn.change, turn.worker))
        if turn.change != "back":
            outages.gone(turn.worker, due_ns + round(takes_s * S))
    return seen


def test_a_share_dies_and_comes_back() -> None:
    seen = _play(_outages(_outage(back_after_s=3.0)))
    names = [name for _, _, name in seen[:2]]
    assert len(set(names)) == 2
    assert seen == [(6.0, "die", names[0]), (6.0, "die", names[1])] + [
        (9.0, "back", name) for name in names
    ]
    assert _play(_outages(_outage(back_after_s=3.0))) == seen  # of its seed


def test_what_never_comes_back_stays_away() -> None:
    assert [change for _, change, _ in _play(_outages(_outage()))] == ["die", "die"]


def test_a_rolling_restart_takes_one_after_another() -> None:
    rolling = _outage(kind="drain", share=1.0, back_after_s=2.0, rolling=True)
    seen = _play(_outages(rolling), takes_s=1.5)
    times = [(at, change) for at, change, _ in seen[:4]]
    assert times == [(6, "drain"), (9.5, "back"), (9.5, "drain"), (13, "back")]
    assert [name for _, change, name in seen if change == "drain"] == NAMES


def test_a_replica_that_is_away_is_passed_over() -> None:
    both = _outages(_outage(share=1.0, back_after_s=9.0), _outage(at_s=6.0, share=1.0))
    assert [change for _, change, _ in _play(both)] == ["die"] * 10 + ["back"] * 10
    killed = _outages(_outage(share=1.0))
    killed.gone("worker-3", 2 * S)
    assert "worker-3" not in {name for _, _, name in _play(killed)}


def test_few_replicas_have_only_coarse_shares() -> None:
    assert not coarse_shares([_outage(share=0.25)], 4)
    assert coarse_shares([_outage(share=0.1)], 4) == [
        "the outage at 5 s hits 1 of 4 simulated replicas instead of 10%"
    ]
