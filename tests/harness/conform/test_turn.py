"""One case on the server, without a server."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import gevent  # noqa: TID251  as the code under test waits
import pytest
from gevent.event import Event  # noqa: TID251

from harness.conform.bench import Bench
from harness.conform.case import CASES, Case
from harness.conform.cases import load_cases
from harness.conform.finding import Finding
from harness.conform.known import Known
from harness.conform.turn import CaseTurns
from harness.experiments.idle_server import ServerFacts
from harness.experiments.outcome import CannotDecideError
from harness.experiments.patience import Patience
from harness.store.conform_result import Aftermath, CaseResult, Failure, Verdict

FIN, RST = "stream/fin-decode", "stream/rst-decode"
PATIENCE = Patience(2.0, 200, 2.0, 3.0)
SAME = ServerFacts(4, 0.02, 0.02, None, "it has 4")
load_cases()


def bench(**more: Any) -> Any:
    """At rest, it serves; streams on it never stand still."""
    cleaning = SimpleNamespace(
        stand_still=lambda: False,
        longest_still_s=5.0,
        running=4,
        rest=lambda: None,
        outlast=lambda: None,
        check_free=lambda **_: None,
        aftermath=lambda: (Aftermath.CLEAN, ""),
    )
    nothing = lambda *_, **__: None  # noqa: E731
    made: dict[str, Any] = {
        "known": Known(),
        "cleaning": cleaning,
        "wire": SimpleNamespace(begin=nothing, end=nothing),
        "rng": SimpleNamespace(seed=nothing),
        "asked": SimpleNamespace(seed=1, settle_s=2.0),
        "session": SimpleNamespace(
            plan=SimpleNamespace(target=SimpleNamespace(disconnect="cancel"))
        ),
        "facts": SAME,
        "filling": SimpleNamespace(begin_case=nothing),
        "full_slots": SimpleNamespace(are_one_pool=False),
        "patience": PATIENCE,
        "is_quick": False,
        "step_s": 0.02,
        "ttft_s": 0.02,
        "limit_tries": nothing,
        "end": nothing,
        "forget": nothing,
        "ghosts": lambda: 0,
        "usual_patience": lambda _: PATIENCE,
    }
    return SimpleNamespace(**made | more)


def turns(one: Any) -> CaseTurns:
    return CaseTurns(cast(Bench, one), Path(), [], PATIENCE, lambda _: None)


def a_case(name: str, check: Callable[[Any], Finding]) -> Case:
    return CASES[name]._replace(check=check)


def run(ran: CaseTurns, name: str, found: Finding) -> CaseResult:
    (result,) = ran.run(a_case(name, lambda _: found), [])
    return result


NEVER = Finding(Failure.NEVER, "held", {}, stops=False)
GOOD = Finding(None, "free", {}, stops=True)


@pytest.mark.parametrize("names", [(FIN, RST), (RST, FIN)])
def test_a_server_that_overlooks_one_plain_way_alone_does_stop(names: tuple[str, str]) -> None:
    for first, second in [(GOOD, NEVER), (NEVER, GOOD)]:
        ran = turns(bench())
        run(ran, names[0], first)
        run(ran, names[1], second)
        assert ran.bench.known.never_stops is None
    ran = turns(bench())
    run(ran, names[0], NEVER)
    assert ran.bench.known.never_stops == names[0]


def test_a_red_by_a_count_of_slots_has_a_control_and_one_by_tries_had_it() -> None:
    def check_alone(_: object) -> Finding:
        raise CannotDecideError("another load uses this server")

    one = bench(recoveries=SimpleNamespace(check_alone=check_alone))
    counted = run(turns(one), "leak/slots", NEVER)
    assert counted.verdict is Verdict.CANNOT_DECIDE
    assert "another load" in counted.reason
    assert run(turns(one), FIN, NEVER).verdict is Verdict.FAIL


@pytest.mark.parametrize(
    ("back", "second", "verdict"),
    [
        (4, GOOD, Verdict.CANNOT_DECIDE),
        (4, NEVER, Verdict.FAIL),
        (3, GOOD, Verdict.FAIL),  # a slot is lost for good
    ],
)
def test_slots_that_were_slow_to_be_counted_are_counted_again(
    back: int, second: Finding, verdict: Verdict
) -> None:
    looks = [NEVER, second]

    def check_alone(running: int) -> Finding:
        one.facts = one.facts._replace(slots=running)  # as it does on a server
        return GOOD

    one = bench(recoveries=SimpleNamespace(check_alone=check_alone))
    one.cleaning.running = back
    (result,) = turns(one).run(a_case("leak/slots", lambda _: looks.pop(0)), [])
    assert result.verdict is verdict


def test_a_check_that_has_returned_is_not_ended() -> None:
    """The server stands still in the moment in which the check returns."""
    stands_still = Event()

    def stand_still() -> bool:
        stands_still.set()
        return True

    one = bench()
    one.cleaning.stand_still = stand_still

    def check(_: object) -> Finding:
        stands_still.wait()
        return GOOD

    assert turns(one)._attempt(a_case(FIN, check), check) == GOOD
    gevent.sleep(0)


@pytest.mark.parametrize("ends", [True, False])
def test_ghosts_that_nobody_can_count_are_no_wedged_server(*, ends: bool) -> None:
    """They slow each other: nobody knows how long they run on."""
    one = bench(facts=SAME._replace(slots=None), ghosts=lambda: 97)
    wedged, clean = (Aftermath.WEDGED, "no answer"), (Aftermath.CLEAN, "")
    one.cleaning.running = None
    one.cleaning.aftermath = lambda: wedged
    one.cleaning.aftermath_of_left = lambda: clean if ends else wedged
    one.session.plan.target.http = False
    ran = turns(one)
    result = run(ran, FIN, GOOD)
    assert result.aftermath is (Aftermath.GHOSTS if ends else Aftermath.WEDGED)
    assert (ran.end is None) is ends


def test_a_server_that_refuses_what_it_let_wait_before_ends_the_run_and_is_not_accused() -> None:
    one = bench()
    one.cleaning.running = None
    one.cleaning.aftermath = lambda: (Aftermath.REFUSING, "it refuses: HTTP 429")
    ran = turns(one)
    result = run(ran, FIN, GOOD)
    assert (result.verdict, result.aftermath) == (Verdict.PASS, Aftermath.REFUSING)
    assert ran.end == "it refuses: HTTP 429"


def test_a_server_that_has_restarted_decides_nothing_and_the_run_goes_on() -> None:
    one = bench()
    one.cleaning.aftermath = lambda: (Aftermath.RESTARTED, "it has restarted")
    ran = turns(one)
    for found in (GOOD, NEVER):
        result = run(ran, FIN, found)
        assert (result.verdict, result.stops) == (Verdict.CANNOT_DECIDE, None)
        assert result.aftermath is Aftermath.RESTARTED
        assert "it has restarted" in result.reason
    assert ran.end is None


@pytest.mark.parametrize("slots", [64, None])
def test_after_a_recount_the_server_is_waited_for_as_it_is_now(slots: int | None) -> None:
    now, patient = SAME._replace(slots=slots), PATIENCE._replace(filler_s=30.0)
    one = bench(usual_patience=lambda _: patient)
    waits_s: list[float] = []

    def check(_: object) -> Finding:
        waits_s.append(one.patience.filler_s)
        if len(waits_s) == 1:
            raise CannotDecideError("only 4 of 8 streams ran at once")
        return GOOD

    ran = turns(one)
    ran.recount = lambda *_: now
    (result,) = ran.run(a_case(FIN, check), [])
    assert result.verdict is Verdict.PASS
    assert one.facts.slots == slots
    assert waits_s == [PATIENCE.filler_s, patient.filler_s]


@pytest.mark.parametrize(
    ("is_one_pool", "second", "verdict"),
    [
        (True, GOOD, Verdict.FAIL),  # the controls suffice
        (False, NEVER, Verdict.FAIL),
        (False, GOOD, Verdict.CANNOT_DECIDE),
    ],
)
def test_a_red_by_one_try_is_looked_at_again(
    second: Finding, verdict: Verdict, *, is_one_pool: bool
) -> None:
    one = bench(recoveries=SimpleNamespace(check_alone=lambda _: GOOD))
    one.full_slots.are_one_pool = is_one_pool
    found = iter([NEVER._replace(is_one_try=True), second])
    (result,) = turns(one).run(a_case(FIN, lambda _: next(found)), [])
    assert result.verdict is verdict


def test_a_server_that_restarts_after_leaves_twice_is_accused() -> None:
    one = bench()
    one.cleaning.aftermath = lambda: (Aftermath.RESTARTED, "it has restarted")
    ran = turns(one)

    def check(bench: Any) -> Finding:
        bench.known.note_leave()
        return GOOD

    run(ran, RST, GOOD)  # nobody leaves
    (first,) = ran.run(a_case(FIN, check), [])
    assert first.verdict is Verdict.CANNOT_DECIDE
    (second,) = ran.run(a_case(RST, check), [])
    assert (second.verdict, second.kind) == (Verdict.FAIL, Failure.HARM)
    assert f"as after the leaves of {FIN}" in second.reason


def test_harm_stays_harm_when_the_server_restarts() -> None:
    one = bench()
    one.cleaning.aftermath = lambda: (Aftermath.RESTARTED, "it has restarted")
    harm = Finding(Failure.HARM, "a stream that stayed was cut", {}, stops=True)
    result = run(turns(one), FIN, harm)
    assert (result.verdict, result.kind) == (Verdict.FAIL, Failure.HARM)
    assert "it has restarted" in result.reason
