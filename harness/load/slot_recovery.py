"""Slot recovery, black box: how long until a freed batch slot works for another user?

One director runs trials of three arms, in an order drawn anew for each round:

    unloaded   the probe alone: the cost of its first token when no request is in the way
    abandon    all slots filled, the probe queued; then one filler leaves, and the probe's wait ends
    control    the same, but no filler leaves: the probe waits for a filler's natural end

Before a trial as many short requests as slots, running at once, show that all slots are free.
Tokens on each filler show that the slots are full and the probe queued. The probe's row carries t0
of the filler that left or, in the control, would have left.
"""

import logging
import random
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Final

import gevent
import msgspec
from gevent.event import Event
from gevent.pool import Group

from harness.load.rows import most_at_once
from harness.load.session import LoadSession
from harness.load.users import Director
from harness.records import Outcome, RequestRow, Role, TrialArm, VoidTrial
from harness.workload.abandon import LeaveRule, RequestSpec, after_tokens, never, think_ns
from harness.workload.load import SlotRecoveryLoad

_ARMS: Final = tuple(TrialArm)
# Tokens that each filler must read after the probe was sent: the second comes from a step that
# began after the probe had arrived.
_TOKENS_TO_QUEUE: Final = 2
# Tokens of a check request in the first round: enough to overlap where admitting takes few steps.
_CHECK_TOKENS: Final = 8

logger = logging.getLogger(__name__)


class TrialSpoiledError(Exception):
    """The trial is void; its rows stay, and the next trial begins."""


class SlotRecoveryDirector(Director):
    def run_load(self) -> None:
        session = self.session
        load = session.plan.load
        assert isinstance(load, SlotRecoveryLoad)
        for number in range(load.trials):
            rng = random.Random(f"{session.plan.run.seed}/{number}/arms")
            for arm in rng.sample(_ARMS, len(_ARMS)):
                try:
                    Trial(session, load, arm=arm, number=number).run()
                except TrialSpoiledError as error:
                    logger.warning("Trial %d, arm %s, is void: %s", number, arm, error)
                    session.void(VoidTrial(trial=number, arm=arm, why=str(error)))


class Trial:
    """All its streams have ended when `run` returns: cut off, if need be. `_tokens`: how many each
    filler has read. `_reference_ns` is set once, by the filler that leaves or would have left."""

    def __init__(self, session: LoadSession, load: SlotRecoveryLoad, *, arm: TrialArm, number: int):
        self._session = session
        self._load = load
        self._arm = arm
        self._number = number
        self._rng = random.Random(f"{session.plan.run.seed}/{number}/{arm}")
        self._think_fraction = self._rng.random()
        assert load.slots is not None  # the server was asked before the load
        self._slots = load.slots
        self._check_users = count(load.slots + 1)
        self._streams = Group()
        self._progress = Event()
        self._tokens = [0] * load.slots
        self._may_leave = False
        self._has_lost_filler = False
        self._reference_ns: int | None = None

    def run(self) -> None:
        try:
            self._check_quiet()
            if self._arm is TrialArm.UNLOADED:
                self._start_probe().join()
            else:
                self._run_loaded()
        finally:
            self._streams.kill()

    def _run_loaded(self) -> None:
        leaver = self._rng.randrange(self._slots)
        for index in range(self._slots):
            self._start_filler(index, leaves=index == leaver)
        self._wait_until_read([1] * self._slots)
        probe = self._start_probe()
        self._wait_until_read([tokens + _TOKENS_TO_QUEUE for tokens in self._tokens])
        self._may_leave = True
        probe.join()
        if self._arm is TrialArm.CONTROL:
            self._streams.join()  # the comparison needs a natural end

    def _leave(self, tokens_read: int) -> int | None:
        is_due = self._may_leave and tokens_read >= self._load.abandon_after_tokens
        if not is_due or self._reference_ns is not None:
            return None
        step_ns = self._session.client.step.median_ns()
        pause_ns = think_ns("step", fraction=self._think_fraction, step_ns=step_ns)
        if self._arm is TrialArm.ABANDON:
            return pause_ns
        self._reference_ns = time.perf_counter_ns() + pause_ns
        return None

    # The streams of a trial

    def _start_filler(self, index: int, *, leaves: bool) -> None:
        def rule(tokens_read: int) -> int | None:
            self._tokens[index] = tokens_read
            self._progress.set()
            return self._leave(tokens_read) if leaves else None

        load = self._load
        is_control = self._arm is TrialArm.CONTROL
        max_tokens = load.control_answer_tokens if is_control else load.answer_tokens
        spec = self._spec(Role.FILLER, index, max_tokens)
        if leaves and not is_control:
            spec = after_tokens(spec, load.abandon_after_tokens)
        self._start(spec, rule, self._keep_filler)

    def _start_probe(self) -> gevent.Greenlet:
        spec = self._spec(Role.PROBE, self._slots, self._load.probe_tokens)
        return self._start(spec, never, self._keep_probe)

    def _spec(self, role: Role, user: int, max_tokens: int) -> RequestSpec:
        # A seed for each: the number of checks must not change the other requests.
        rng = random.Random(
            f"{self._session.plan.run.seed}/{self._number}/{self._arm}/{user}/length"
        )
        return RequestSpec(
            role=role,
            user=user,
            max_tokens=max_tokens,
            prompt_tokens=rng.randint(*self._load.prompt_tokens),
            arm=self._arm,
            trial=self._number,
        )

    def _start(
        self, spec: RequestSpec, leave_rule: LeaveRule, keep: Callable[[RequestRow], None]
    ) -> gevent.Greenlet:
        spec = self._session.issue(spec)
        n = self._number * len(_ARMS) + _ARMS.index(self._arm)
        text = self._session.prompt(spec, n=n)
        return self._streams.spawn(self._session.client.ask, spec, text, leave_rule, keep)

    def _keep_filler(self, row: RequestRow) -> None:
        if row.outcome is Outcome.ABANDONED:
            self._reference_ns = row.abandoned_ns
        else:
            self._has_lost_filler = True
        self._progress.set()
        self._session.keep(row)

    def _keep_probe(self, row: RequestRow) -> None:
        self._session.keep(msgspec.structs.replace(row, reference_ns=self._reference_ns))

    # Waiting for the streams

    def _wait_until_read(self, wanted: Sequence[int]) -> None:
        while any(read < least for read, least in zip(self._tokens, wanted, strict=True)):
            if self._has_lost_filler:
                raise TrialSpoiledError(
                    "a filler ended before the probe was queued (fewer slots than planned, "
                    "answers too short, or a failure: see its row)"
                )
            self._progress.clear()
            self._progress.wait()

    def _check_quiet(self) -> None:
        """Send rounds of requests until as many as there are slots run at once, read to their end:
        abandoned, they could themselves hold slots. Each round asks for longer answers, but not so
        long that a request waiting for a slot could time out."""
        patience_s = self._session.plan.run.timeout_s
        patience_ends_ns = time.perf_counter_ns() + int(patience_s * 1e9)
        tokens, asked_ns = _CHECK_TOKENS, time.perf_counter_ns()
        while most_at_once(self._check_slots(tokens)) < self._slots:
            now_ns = time.perf_counter_ns()
            if now_ns > patience_ends_ns:
                raise TrialSpoiledError(
                    f"for {patience_s:g} s no {self._slots} requests ran at once (fewer slots "
                    "than planned, or earlier requests still hold some)"
                )
            if (now_ns - asked_ns) / 1e9 < patience_s / 4:
                tokens *= 2
            asked_ns = now_ns

    def _check_slots(self, tokens: int) -> list[list[int]]:
        rows: list[RequestRow] = []

        def keep(row: RequestRow) -> None:
            rows.append(row)
            self._session.keep(row)

        for _ in range(self._slots):
            max_tokens = min(tokens, self._load.answer_tokens)
            self._start(self._spec(Role.CHECK, next(self._check_users), max_tokens), never, keep)
        self._streams.join()
        if any(row.outcome is not Outcome.COMPLETED for row in rows):
            raise TrialSpoiledError("a request that checks the slots failed: see its row")
        return [row.token_times_ns for row in rows]
