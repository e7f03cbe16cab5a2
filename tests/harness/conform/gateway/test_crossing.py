"""What a gateway does with a leave, from the times of both sides."""

from dataclasses import dataclass

import msgspec
import pytest

from harness.conform.gateway.bench import longest_lived
from harness.conform.gateway.crossing import Crossing, JudgedCrossing, judge
from harness.conform.gateway.ledger import UpstreamRequest
from harness.experiments.outcome import CannotDecideError
from harness.records import Disconnect
from harness.store.conform_result import Contract, Failure

STEP_S, TOKENS = 0.1, 120
ANSWER_S = TOKENS * STEP_S
T0_NS = 1_000_000_000


def crossing(
    closed_s: float | None, *, first_s: float = -0.25, arrived: bool = True, tokens: int = TOKENS
) -> Crossing:
    """Tokens each 0.1 s from `first_s`, and a close so long after t0; None: none before the end."""
    if not arrived:
        return Crossing(T0_NS, None)
    times_s = [first_s + STEP_S * n for n in range(tokens)]
    made = [at_s for at_s in times_s if closed_s is None or at_s <= closed_s]
    closed_ns = None if closed_s is None else T0_NS + round(closed_s * 1e9)
    return Crossing(
        T0_NS,
        UpstreamRequest(
            id="x",
            is_stream=True,
            arrived_ns=0,
            tokens=len(made),
            token_times_ns=[T0_NS + round(at_s * 1e9) for at_s in made],
            has_left=closed_s is not None,
            why="length" if closed_s is None else "left",
            closed_ns=closed_ns,
        ),
    )


def judged(*crossings: Crossing, declared: Disconnect = "cancel") -> JudgedCrossing:
    return judge(crossings, step_s=STEP_S, declared=declared, answer_s=ANSWER_S)


@dataclass(frozen=True)
class Seen:
    contract: Contract
    failure: Failure | None
    cap_s: float | None = None


@pytest.mark.parametrize(
    ("crossings", "seen"),
    [
        ([crossing(0.001)] * 4, Seen("cancel", None)),
        ([crossing(0.09)] * 4, Seen("cancel", None)),
        ([crossing(0.16)] * 4, Seen("at next write", None)),
        ([crossing(0.38)] * 4, Seen("at next write", None)),  # at the fourth write
        ([crossing(2.1, first_s=2.1)] * 4, Seen("at next write", Failure.LATE)),
        ([crossing(2.25, first_s=2.1)] * 4, Seen("at next write", Failure.LATE)),
        ([crossing(0.6)] * 4, Seen("drain", Failure.LATE, 0.6)),
        ([crossing(1.9, first_s=2.0)] * 4, Seen("drain", Failure.LATE, 1.9)),
        ([crossing(3.0), crossing(3.1), crossing(2.9)], Seen("drain", Failure.LATE, 3.0)),
        ([crossing(3.0), crossing(6.0), crossing(2.0)], Seen("drain", Failure.LATE)),
        ([crossing(0.001)] * 3 + [crossing(0.7)], Seen("drain", None)),
        ([crossing(0.001)] * 3 + [crossing(1.3)], Seen("drain", Failure.LATE)),
        ([crossing(None)] * 4, Seen("never", Failure.NEVER)),
        ([crossing(0.001)] * 19 + [crossing(None)], Seen("never", Failure.NEVER)),
    ],
)
def test_the_worst_try_is_the_contract(crossings: list[Crossing], seen: Seen) -> None:
    found = judged(*crossings)
    assert Seen(found.contract or "never", found.finding.failure, found.cap_s) == seen
    assert found.finding.stops is (seen.contract != "never")


def test_each_try_is_kept_with_what_was_made_for_nobody() -> None:
    tries = judged(crossing(0.001), crossing(None)).tries
    assert [one.upstream_stopped_s for one in tries] == [0.001, None]
    assert [one.tokens_after_leave for one in tries] == [0, TOKENS - 3]


@pytest.mark.parametrize(
    ("crossings", "said"),
    [
        ([crossing(None)] * 4, "left; a cap beyond 12 s is not seen"),
        ([crossing(3.0)] * 4, "left, and are ended after 3 s"),
        ([crossing(at_s) for at_s in (3, 4, 6, 9)], "are ended within 9 s, at different times"),
        ([crossing(2.1, first_s=2.1)] * 4, "left, and are ended within 2.1 s"),  # at next write
        ([crossing(3.0), crossing(None)], "left, in 1 of 2 tries to their end"),
        ([crossing(0.001)] * 4, "it declares `drain`, but it cancels"),
    ],
)
def test_a_gateway_is_held_to_the_drain_that_it_declares(
    crossings: list[Crossing], said: str
) -> None:
    found = judged(*crossings, declared="drain")
    assert found.finding.failure is None
    assert found.finding.reason.endswith(said)


@pytest.mark.parametrize(
    ("one", "why"),
    [
        (crossing(0.0, arrived=False), "1 of 2 requests"),
        (crossing(-0.2), "closed its connection to the upstream before the client left"),
    ],
)
def test_a_try_without_its_two_sides_decides_nothing(one: Crossing, why: str) -> None:
    with pytest.raises(CannotDecideError, match=why):
        judged(crossing(0.001), one)


def test_of_two_requests_for_one_client_the_longer_counts() -> None:
    """A gateway that asks twice before the leave, and one that asks again after it."""
    closed, open_one = crossing(0.01).request, crossing(None).request
    assert closed is not None
    assert open_one is not None
    later = msgspec.structs.replace(open_one, arrived_ns=2 * T0_NS)
    assert longest_lived([closed, open_one], T0_NS) is open_one
    assert longest_lived([closed, later], T0_NS) is closed
    assert longest_lived([later], T0_NS) is None
