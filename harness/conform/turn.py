"""One case on the server: its check, what confirms a red, and what the case left behind."""

import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeGuard

import gevent
from gevent.event import Event

from harness.client.session import LoadSession
from harness.client.wire_log import masked
from harness.conform.bench import Bench
from harness.conform.case import Case, Check
from harness.conform.finding import Finding
from harness.conform.known import hurried
from harness.conform.routes import Routes
from harness.conform.verdict import ENDED_REMEDY, accuse, by_contract, settle_case
from harness.experiments.idle_server import ServerFacts, recount
from harness.experiments.outcome import CannotDecideError, RefusedError
from harness.experiments.patience import Patience
from harness.records import Disconnect
from harness.store.conform_result import (
    Aftermath,
    CaseResult,
    Failure,
    Verdict,
    wire_log_name,
)

_FILLS: Final = {*"POK"}  # methods that are about all slots
_TAKES_SLOTS: Final = {*"POKBR"}  # methods whose requests another load keeps waiting
_TIMES: Final = (Failure.LATE, Failure.NEVER)  # harm is no matter of chance, and cannot be undone
_PLAIN: Final = ("stream/fin-decode", "stream/rst-decode")  # a leave that each server could see
_MANY_PROMPTS: Final = ("dose", "retry")  # groups of cases that send many long prompts
_LONG_PROMPTS: Final = ("prefill", *_MANY_PROMPTS)
_UNANSWERED: Final = (Aftermath.WEDGED, Aftermath.REFUSING)
_HEALTH: Final = "wedge/health"
_EVER_NS: Final = 1 << 62
_MOST_RECOUNTS: Final = 3  # of slots, in a run
_LOOK_S: Final = 0.25  # between two looks at whether the server stands still
_SPARE_S: Final = 5.0  # by which streams last longer, where many slots are filled


@dataclass(slots=True)
class CaseTurns:
    """`decided` gets a result before it is known what the case left behind. `end`: why no further
    case can be decided; None while it can."""

    bench: Bench
    folder: Path
    secrets: list[str]
    patience: Patience
    decided: Callable[[CaseResult], object]
    recount: Callable[[LoadSession, ServerFacts], ServerFacts] = recount
    end: str | None = None
    _recounts: int = 0
    _restarted_after: str | None = None  # the latest case in which clients left before a restart
    _last: CaseResult | None = None  # the latest in which a client left
    _has_stopped: bool = False  # the server, when a client left a plain stream

    def run(self, case: Case, coming: Sequence[Case]) -> list[CaseResult]:
        """The case's result and, if the server has ended, the results of other cases that change
        with it. `coming`: the cases after this one."""
        started_s = time.monotonic()
        bench, known = self.bench, self.bench.known
        known.begin_case()
        bench.filling.begin_case()
        self._be_patient(case)
        bench.wire.begin(self.folder / wire_log_name(case.id))
        bench.rng.seed(f"{bench.asked.seed}/{case.id}")
        outcome = self._attempt(case, partial(_check_free, case))
        changed_slots = ""
        if isinstance(outcome, CannotDecideError) and _TAKES_SLOTS & {*case.methods}:
            changed_slots = self._changed_slots(case)
        if changed_slots:
            outcome = self._attempt(case, case.check)
        again = None
        if _is_red_by_time(outcome, case):
            outcome, again = self._confirmed(case, outcome)
        result = settle_case(case, outcome, again)
        result.reason += changed_slots
        contract = bench.session.plan.target.disconnect
        if contract != "cancel" and result.stops and result.verdict is Verdict.PASS:
            result.reason += f"; the target declares `{contract}`, but the server cancels"
        result.wire_log = wire_log_name(case.id)
        if case.id in _PLAIN:
            self._learn_of_plain(result)
        self.decided(result)
        is_still = _prompts_are_short(case) and bench.cleaning.stand_still()
        if known.never_stops is not None and not is_still:
            bench.cleaning.outlast()
        bench.end()
        bench.wire.end()
        changed = self._look_after(result, coming, is_still=is_still)
        result.took_s = round(time.monotonic() - started_s, 2)
        return changed

    def _learn_of_plain(self, result: CaseResult) -> None:
        """A server that stops after one of the plain ways to leave is blind to the other alone."""
        known = self.bench.known
        self._has_stopped = self._has_stopped or bool(result.stops)
        if self._has_stopped:
            known.never_stops = None
        elif result.kind is Failure.NEVER:
            known.never_stops = known.never_stops or result.id

    def _changed_slots(self, case: Case) -> str:
        """What to say of a server that has another number of slots than before; "" if it has not,
        or does not show it."""
        bench, old = self.bench, self.bench.facts.slots
        if (
            not bench.facts.can_fill
            or self._recounts == _MOST_RECOUNTS
            or bench.cleaning.stand_still()
        ):
            return ""
        self._recounts += 1
        bench.end()
        bench.cleaning.rest()
        if bench.ghosts() or not bench.cleaning.running:
            return ""
        facts = self.recount(bench.session, bench.facts)
        if facts.slots == old:
            return ""
        bench.facts, bench.cleaning.running = facts, None
        self.patience = bench.usual_patience(bench.asked.settle_s)
        self._be_patient(case)
        return f" (the server had {old} slots before this case; now {facts.why})"

    def _be_patient(self, case: Case) -> None:
        """A server that never stops is waited for less, except in cases that fill memory or send
        many long prompts. Streams that run with a long prompt must last as long as it takes."""
        bench, usual = self.bench, self.patience
        bench.limit_tries()
        patience = usual._replace(spare_s=_SPARE_S if self._has_stopped else 0.0)
        is_short = case.methods != "K" and case.group not in _MANY_PROMPTS
        if bench.known.never_stops is not None and is_short:
            begin_s = usual.filler_s - usual.settle_s
            patience = hurried(usual, step_s=bench.step_s, begin_s=begin_s, ttft_s=bench.ttft_s)
            if not _prompts_are_short(case):
                tokens = (patience.answer_tokens + usual.answer_tokens) // 2
                patience = patience._replace(
                    answer_tokens=tokens,
                    outlives=usual.outlives,
                    longest_read=usual.longest_read,
                )
        if bench.known.never_stops is not None and not {*case.methods} & {*"OK"}:
            # A stream waits until the one that it replaces has ended.
            ends_s = patience.answer_tokens * bench.step_s
            patience = patience._replace(filler_s=patience.filler_s + ends_s)
        bench.patience, bench.settle_s = patience, patience.settle_s

    def _confirmed(
        self, case: Case, outcome: Finding
    ) -> tuple[Finding | Exception, Finding | Exception | None]:
        """The outcome after a red, and that of a second look; None: the red stands. The second
        look is the control and, if the server was late, or held slots that have all come back, the
        case once more in the slots that are left. A server that declares that answers run on is
        held to that instead. There is no second look after a `never` that was judged against
        controls, or on a server that is known never to stop a plain stream; nor after a lateness on
        such a server, if many prompts were left."""
        bench = self.bench
        contract = bench.session.plan.target.disconnect
        if contract != "cancel" and "resume" not in case.needs:
            bench.end()
            bench.cleaning.rest()  # may take longer than a case
            return self._attempt(case, partial(_held_to, contract, outcome, case)), None
        never_stops = bench.known.never_stops is not None
        is_known = _had_controls(outcome, case) or never_stops
        is_late_for_it = never_stops and case.group in _MANY_PROMPTS
        if (outcome.failure is Failure.NEVER and is_known) or is_late_for_it:
            return outcome, None
        facts = bench.facts
        again = self._once_more(case, outcome)
        bench.facts = facts
        # With the slots that are left the case may not be possible: the red stands.
        return outcome, None if isinstance(again, RefusedError) else again

    def _once_more(self, case: Case, outcome: Finding) -> Finding | Exception | None:
        bench = self.bench
        slots = bench.facts.slots  # before the control takes off those that are lost
        bench.end()
        bench.cleaning.rest()  # may take longer than a case
        if not _had_controls(outcome, case):
            control = self._attempt(case, _check_alone)
            bench.end()
            if isinstance(control, Exception) or control.failure is not None:
                return control
            if outcome.is_one_try and bench.full_slots.are_one_pool:
                return None
            is_never = outcome.failure is Failure.NEVER and not outcome.is_one_try
            if not self._is_doubtful_count(case, slots) and ("P" not in case.methods or is_never):
                return None
            bench.cleaning.rest()
        if bench.cleaning.running:
            bench.facts = bench.facts._replace(slots=bench.cleaning.running)
        return self._attempt(case, case.check)

    def _is_doubtful_count(self, case: Case, slots: int | None) -> bool:
        """Whether all of the `slots` before the case are back now: on a busy machine requests that
        are slow to begin look like slots that are held."""
        return "O" in case.methods and self.bench.cleaning.running == slots is not None

    def _look_after(
        self, result: CaseResult, coming: Sequence[Case], *, is_still: bool
    ) -> list[CaseResult]:
        """What the case left behind, and the results that change. `is_still`: streams of the case
        stood still at its end."""
        bench, known = self.bench, self.bench.known
        aftermath, reason = bench.cleaning.aftermath()
        is_healthy = None
        if aftermath in (Aftermath.DEAD, Aftermath.WEDGED):
            is_healthy = self._health()
        if aftermath is Aftermath.DEAD and is_healthy:
            aftermath = Aftermath.WEDGED
        is_over = aftermath is Aftermath.DEAD or (is_still and aftermath is Aftermath.WEDGED)
        may_be_ghosts = aftermath in _UNANSWERED and bench.ghosts() > 0
        if not is_over:
            self._rest(result, aftermath)
        if aftermath in _UNANSWERED and not is_over and not bench.cleaning.running:
            is_unseen = may_be_ghosts and not bench.facts.can_fill
            # What was left has ended, or will.
            later = self._later(is_unseen=is_unseen)
            is_over = later[0] in (Aftermath.WEDGED, Aftermath.DEAD)
            if later[0] in (Aftermath.RESTARTED, Aftermath.REFUSING):
                aftermath, reason = later
                may_be_ghosts = False
        is_limited = aftermath is Aftermath.REFUSING and bench.facts.refuses
        if aftermath is Aftermath.RESTARTED:
            self._note_restart(result, reason)
        elif is_limited and result.kind in _TIMES:
            _leave_open(result, reason)
        elif may_be_ghosts and not is_over:
            aftermath = Aftermath.GHOSTS
        result.aftermath = aftermath
        result.left = known.left_here(int(1e9 * self.patience.settle_s / 2))
        result.left_in_all = known.left + result.left
        if not is_over:
            # Nobody is accused of refusals: the leaves need not be why.
            self.end = reason if aftermath is Aftermath.REFUSING else self.end
            self._last = result if result.left else self._last
            return [result]
        return self._end_run(result, reason, coming, is_healthy=bool(is_healthy))

    def _note_restart(self, result: CaseResult, reason: str) -> None:
        """A single restart may have another reason than the leaves just before it."""
        if not self.bench.known.left_here(_EVER_NS):
            _leave_open(result, reason)
            return
        earlier, self._restarted_after = self._restarted_after, result.id
        if earlier is None:
            _leave_open(result, reason)
        elif result.verdict is not Verdict.FAIL:
            result.verdict, result.kind, result.stops = Verdict.FAIL, Failure.HARM, None
            result.remedy = ENDED_REMEDY
            result.reason = f"{reason}, as after the leaves of {earlier}; before: {result.reason}"

    def _later(self, *, is_unseen: bool) -> tuple[Aftermath, str]:
        """The aftermath once what was left must have ended."""
        cleaning = self.bench.cleaning
        if is_unseen:
            return cleaning.aftermath_of_left()
        return (
            cleaning.aftermath_of_refusals() if self.bench.facts.refuses else cleaning.aftermath()
        )

    def _end_run(
        self, result: CaseResult, reason: str, coming: Sequence[Case], *, is_healthy: bool
    ) -> list[CaseResult]:
        bench, aftermath = self.bench, result.aftermath
        assert aftermath is not None
        if aftermath is Aftermath.WEDGED and not bench.facts.refuses:
            reason = "the server answers no request any more"
            reason += ", and /health says 200" if is_healthy else ""
        changed = accuse(result, aftermath, reason, before=self._last)
        guilty = next((one.id for one in changed if one.verdict is Verdict.FAIL), result.id)
        self.end = f"{reason}, since {guilty} ({result.left_in_all} clients had left in all)"
        if is_healthy and result.id != _HEALTH:
            changed += [self._unhealthy(one) for one in coming if one.id == _HEALTH]
        return changed

    def _rest(self, result: CaseResult, aftermath: Aftermath) -> None:
        """The slots need not be counted after a case in which no client left, nor after a quick one
        that passed, unless the server keeps what was left."""
        bench, known = self.bench, self.bench.known
        is_well = bench.is_quick and result.verdict is Verdict.PASS
        is_well = (is_well and known.never_stops is None) or not known.left_here(_EVER_NS)
        if aftermath is Aftermath.CLEAN and is_well:
            bench.forget()
        else:
            bench.cleaning.rest()

    def _health(self) -> bool | None:
        if not self.bench.session.plan.target.http:
            return None
        routes = Routes(self.bench.session.plan)
        try:
            return routes.health()
        finally:
            routes.close()

    def _unhealthy(self, case: Case) -> CaseResult:
        """The result of the case of /health, when the server says that it is healthy and answers
        nobody."""
        found = Finding(Failure.NEVER, str(self.end), {"left": self.bench.known.left})
        result = settle_case(case, found)
        result.aftermath = Aftermath.WEDGED
        return result

    def _attempt(self, case: Case, check: Check) -> Finding | Exception:
        limit_s = case.longest_s(self.patience.settle_s, self.bench.ttft_s)
        # No Exceptions, so that no check takes them for its own.
        limit, still = gevent.Timeout(limit_s), gevent.Timeout()
        has_returned = Event()
        watch = gevent.spawn(self._end_when_still, gevent.getcurrent(), still, has_returned)
        try:
            with limit:
                return check(self.bench)
        except gevent.Timeout as ended:
            if ended is still:
                still_s = self.bench.cleaning.longest_still_s
                return CannotDecideError(f"no stream had a token for {still_s:.0f} s")
            if ended is not limit:
                raise
            return CannotDecideError(f"the check was not finished within {limit_s:.0f} s")
        except Exception as error:  # noqa: BLE001  jepsen's check-safe: a crash decides nothing
            if not isinstance(error, CannotDecideError | RefusedError):
                sys.stderr.write(masked(traceback.format_exc(), self.secrets))
            return error
        finally:
            has_returned.set()
            watch.kill()

    def _end_when_still(
        self, check: gevent.Greenlet, still: gevent.Timeout, has_returned: Event
    ) -> None:
        """A check need not wait for a server that has stopped working."""

        def end() -> None:
            if not has_returned.is_set():
                check.throw(still)

        while not self.bench.cleaning.stand_still():
            gevent.sleep(_LOOK_S)
        gevent.get_hub().loop.run_callback(end)


def _is_red_by_time(outcome: Finding | Exception, case: Case) -> TypeGuard[Finding]:
    takes_slots = bool(_TAKES_SLOTS & {*case.methods})
    return takes_slots and isinstance(outcome, Finding) and outcome.failure in _TIMES


def _had_controls(red: Finding, case: Case) -> bool:
    """Its tries had controls between them; a count of slots has none, and one try too few."""
    return red.stops is False and "P" in case.methods and not red.is_one_try


def _leave_open(result: CaseResult, reason: str) -> None:
    """A server may restart, and refuse, for another reason than leaves. Harm stays harm."""
    if result.verdict in (Verdict.PASS, Verdict.FAIL) and result.kind is not Failure.HARM:
        result.verdict, result.kind, result.stops = Verdict.CANNOT_DECIDE, None, None
    result.reason = f"{reason}; before: {result.reason}"


def _prompts_are_short(case: Case) -> bool:
    """Short prompts that were left cannot be what makes the other streams wait."""
    return case.group not in _LONG_PROMPTS and "K" not in case.methods


def _check_free(case: Case, bench: Bench) -> Finding:
    bench.cleaning.check_free(wholly=bool(_FILLS & {*case.methods}))
    return case.check(bench)


def _held_to(contract: Disconnect, red: Finding, case: Case, bench: Bench) -> Finding:
    """What is still held when the answers that were left must have ended; in memory, too, where it
    was measured."""
    count, memory = bench.held.now(), bench.capacity
    good, wrong = count.good, count.said if count.held else None
    if wrong is None and "K" in case.methods and memory.prompt_tokens:
        good += f", and {memory.tokens} tokens of prompts fit as before"
        fits = memory.fits() or memory.fits()
        wrong = None if fits else f"{memory.tokens} tokens of prompts fitted no longer"
    return by_contract(red, contract, good=good, wrong=wrong)


def _check_alone(bench: Bench) -> Finding:
    return bench.recoveries.check_alone(bench.cleaning.running)
