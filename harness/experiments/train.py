"""Slot recovery, black box: how long until a freed batch slot works for another user?

    slots      metronome ──────────────────────────────────────────────  never leaves: its tokens
               filler    ──────────────────────────────────────────────  show the steps
               leaver    ──────────┤t0 · · ┊probe ──┤filler ───────────  and so on
    queue      [probe, next filler]────────┘        ┊
                                    recovery        hand-over

A train of probes: all slots stay full, and a short probe waits with a filler behind it. One stream
leaves at a random moment of a step (t0): the probe's first token is the sample. The probe ends by
itself, and the filler gets its slot: the control, the same hand-over without a cancel. Only what
left is replaced, so a sample takes a few steps.

A leaver that shows no tokens, waits in the queue or is in its prefill cannot be one of the fillers.
It goes through one slot that the train keeps for this, between a short request and the probe:

    slot       short ──────────┤leaver ──┤probe ──┤short ───────────────┤leaver ──

Its control is the hand-over from the probe to the next short request.
"""

import logging
import math
import random
import statistics
import time
from collections.abc import Callable
from itertools import count
from typing import Any, Final, NoReturn

import gevent

from harness.client.live_stream import LiveStream
from harness.client.session import LoadSession
from harness.experiments.beat import LeavePlan, TrainBeat
from harness.experiments.outcome import CannotDecideError
from harness.experiments.patience import Patience
from harness.experiments.streams import refill
from harness.records import RequestRow, Role, TrialArm, Way
from harness.workload.abandon import RequestSpec

Edit = Callable[[RequestRow], None]

_nap = gevent.monkey.get_original("time", "sleep")
logger = logging.getLogger(__name__)

_LOOKS: Final = 5  # probes on the idle server
_GOLDEN: Final = (5**0.5 - 1) / 2  # its multiples spread evenly over the phases of a step
_DRAWN_STEPS: Final = 2
_COARSE_NS: Final = 2_000_000  # timers are set in whole milliseconds
_NAP_S: Final = 5e-5
_TOKENS_TO_QUEUE: Final = 2  # of the metronome: the second is from a step begun after the sending
_TOKENS_OF_SHORT: Final = 10  # of the request that holds the slot while leaver and probe queue
_PREFILLS_TO_LEARN: Final = 3
_PREFILL_SHARE: Final = (0.1, 0.9)  # a leaver leaves between these parts of its prefill
_MARGIN_TOKENS: Final = 24  # a filler with fewer to come, for each slot, is the next to leave
_CYCLES_TO_END: Final = 2  # a filler with no more to come is replaced without a sample
_MOST_VOID: Final = 12  # cycles in a row


class _VoidError(Exception):
    """This cycle gives no sample."""


class ProbeTrain:
    """`recoveries_s`: each sample's wait; infinite: longer than a probe is waited for. `_ttft_ns`:
    a probe's time to first token on the idle server, which the train measures first. `_seats`: how
    many fillers fit in addition to what the cycle needs; a slot that does not come back makes them
    fewer, a slot that is found free makes them more. Fillers and probes have prompts of one range:
    their hand-overs are compared."""

    def __init__(
        self,
        session: LoadSession,
        slots: int,
        leaves: LeavePlan,
        rng: random.Random,
        *,
        prompt_tokens: tuple[int, int],
        answer_tokens: int,
        probe_tokens: int,
    ) -> None:
        self.recoveries_s: list[float] = []
        self._ttft_ns = 0
        self._patience: Patience
        self._session = session
        self._leaves = leaves
        self._rng = rng
        self._prompt_tokens = prompt_tokens
        self._answer_tokens, self._probe_tokens = answer_tokens, probe_tokens
        self._slots = slots
        self._seats = slots if leaves.is_filler else slots - 1
        self._fillers: list[LiveStream] = []
        self._metronome: LiveStream | None = None
        self._short: LiveStream | None = None
        self._live: list[LiveStream] = []
        self._trials = count()
        self._users = count()
        self._phases = (phase % 1 for phase in count(rng.random(), _GOLDEN))
        self._prefills_ns: list[int] = []
        self._void_in_a_row = 0

    @property
    def step_ns(self) -> int:
        return self._session.client.step.median_ns()

    def run(self, until: Callable[["ProbeTrain"], bool]) -> None:
        """Raises CannotDecideError; the streams have ended then, too."""
        try:
            self._look()
            while not until(self):
                self._cycle()
        finally:
            self.stop()

    def stop(self) -> None:
        for stream in self._live:
            stream.cut()
        self._live.clear()

    # A cycle

    def _cycle(self) -> None:
        trial = next(self._trials)
        try:
            self._fill()
            if self._leaves.is_filler:
                self._rotate(trial)
            else:
                self._pass_through(trial)
        except _VoidError as why:
            logger.info("cycle %d gives no sample: %s", trial, why)
            self._void_in_a_row += 1
            if self._void_in_a_row >= _MOST_VOID:
                raise CannotDecideError(str(why)) from None
        else:
            self._void_in_a_row = 0

    def _rotate(self, trial: int) -> None:
        leaver = self._next_to_leave()
        beat = TrainBeat()
        probe = self._start(Role.PROBE, arm=TrialArm.ABANDON, trial=trial, edit=beat.edit)
        self._pace(1)
        next_filler = self._start_filler(arm=TrialArm.CONTROL, trial=trial, edit=beat.edit_control)
        self._wait_until_queued(probe)
        self._wait_for_any_moment()
        if probe.tokens or next_filler.tokens or any(one.has_ended for one in self._fillers):
            self._take_in(probe, next_filler)
        leaver.leave(Way.FIN)
        self._fillers.remove(leaver)
        beat.leaver = leaver
        if self._observe(beat, probe, next_filler):
            self._fillers.append(next_filler)

    def _pass_through(self, trial: int) -> None:
        short = self._short
        if short is None or short.has_ended:
            short = self._start(Role.FILLER, max_tokens=self._short_tokens())
            if not short.wait_tokens(1, self._patience.filler_s):
                short.leave()
                raise _VoidError("no slot was free")
        beat = TrainBeat()
        leaver = self._start(
            Role.FILLER, trial=trial, max_tokens=self._answer_tokens, **self._planned()
        )
        self._pace(1)
        probe = self._start(Role.PROBE, arm=TrialArm.ABANDON, trial=trial, edit=beat.edit)
        self._pace(1)
        self._short = self._start(
            Role.FILLER,
            arm=TrialArm.CONTROL,
            trial=trial,
            max_tokens=self._short_tokens(),
            edit=beat.edit_control,
        )
        try:
            self._leave_in_time(short, leaver, beat)
        except _VoidError:
            leaver.leave()
            probe.join(self._patience.filler_s)
            self._short.wait_tokens(1, self._patience.filler_s)
            raise
        self._observe(beat, probe, self._short)

    def _leave_in_time(self, short: LiveStream, leaver: LiveStream, beat: TrainBeat) -> None:
        self._wait_until_queued(leaver)
        _check_is_running(short)
        if self._leaves.where == "queued":
            left = short.spec.max_tokens - short.tokens
            gevent.sleep(next(self._phases) * left * self.step_ns / 1e9)
            _check_is_running(short)
            beat.slot_from = short
        else:
            self._wait_for_its_turn(short, leaver)
        leaver.leave(Way.FIN)
        if leaver.tokens:
            raise _VoidError("the leaver had its first token before it left")
        beat.leaver = leaver

    def _wait_for_its_turn(self, short: LiveStream, leaver: LiveStream) -> None:
        """The leaver has the slot, and has come to the point where it leaves."""
        ended = short.join(self._patience.filler_s)
        if ended is None or ended.last_token_ns is None:
            raise _VoidError("the short request did not end")
        began_ns = ended.last_token_ns
        if self._leaves.where == "prefill":
            if len(self._prefills_ns) < _PREFILLS_TO_LEARN:
                if leaver.wait_tokens(1, self._session.plan.run.timeout_s):
                    self._prefills_ns.append((leaver.first_token_ns or 0) - began_ns)
                raise _VoidError("this prefill was only watched, to learn how long it takes")
            low, high = _PREFILL_SHARE
            share = low + next(self._phases) * (high - low)
            wait_ns = int(share * statistics.median(self._prefills_ns))
        else:  # a unary answer, which shows no tokens
            wait_ns = int(self._ttft_ns + (self._leaves.tokens + next(self._phases)) * self.step_ns)
        gevent.sleep(max(0, began_ns + wait_ns - time.perf_counter_ns()) / 1e9)

    def _observe(self, beat: TrainBeat, probe: LiveStream, follower: LiveStream) -> bool:
        """Wait for the probe's first token, and for its follower's: False if its slot is lost."""
        has_begun = self._has_begun(beat, probe, follower)
        since_ns = beat.since_ns
        if since_ns is None:
            follower.wait_tokens(1, self._patience.filler_s)
            raise _VoidError("the leaver had ended by itself")
        if probe.has_ended and probe.first_token_ns is None:
            follower.leave()
            raise _VoidError(f"the probe failed: {probe.row.error if probe.row else None}")
        if not has_begun:
            self.recoveries_s.append(math.inf)
            for stream in (probe, follower):
                stream.leave()
            self._give_up_slot()
            return False
        probe.join(self._patience.filler_s)
        beat.probe_ended_ns = probe.last_token_ns
        self.recoveries_s.append(((probe.first_token_ns or 0) - since_ns) / 1e9)
        is_kept = follower.wait_tokens(1, self._patience.filler_s)
        if not is_kept:
            follower.leave()
            self._give_up_slot()
        return is_kept

    def _has_begun(self, beat: TrainBeat, probe: LiveStream, follower: LiveStream) -> bool:
        until_ns = time.perf_counter_ns() + self._ttft_ns + int(self._patience.probe_s * 1e9)
        while not probe.wait_tokens(1, 2 * self.step_ns / 1e9) and not probe.has_ended:
            if follower.tokens:  # it holds the slot for as long as it likes
                beat.is_void = True
                probe.leave()
                if self._leaves.is_filler:
                    self._fillers.append(follower)
                raise _VoidError("the request behind the probe was served before it")
            if time.perf_counter_ns() > until_ns:
                return False
        return True

    def _give_up_slot(self) -> None:
        self._short = None
        self._seats -= 1
        if not self._leaves.is_filler and len(self._fillers) > max(0, self._seats):
            self._fillers.pop().leave()  # the leavers go through its slot now
        if self._seats < 1 and self._slots > 1:
            self._seats = self._slots if self._leaves.is_filler else self._slots - 1

    def _take_in(self, probe: LiveStream, next_filler: LiveStream) -> NoReturn:
        """The slots were not full. The next filler fills one that was free."""
        probe.join(self._patience.filler_s)
        if next_filler.wait_tokens(1, self._patience.filler_s):
            self._fillers.append(next_filler)
            self._seats = max(self._seats, sum(not one.has_ended for one in self._fillers))
        raise _VoidError("a slot was free before the stream left")

    # The streams

    def _look(self) -> None:
        """The cost of a first token when no request is in the way."""
        ttfts_ns = []
        for _ in range(_LOOKS):
            row = self._start(Role.PROBE, arm=TrialArm.UNLOADED).join()
            if row is None or row.first_token_ns is None:
                why = None if row is None else row.error
                raise CannotDecideError(f"a probe on the idle server got no token: {why}")
            ttfts_ns.append(row.first_token_ns - row.sent_ns)
        self._ttft_ns = int(statistics.median(ttfts_ns))
        target = self._session.plan.target
        self._patience = Patience.of(
            target.settle_s,
            target.settle_steps,
            step_s=self.step_ns / 1e9,
            begin_s=self._slots * self._ttft_ns / 1e9,
            most_tokens=self._answer_tokens,
        )

    def _fill(self) -> None:
        self._live = [one for one in self._live if not one.has_ended]
        self._fillers, waiting = refill(
            self._fillers,
            self._seats,
            start=self._start_filler,
            lasts=lambda filler: not self._is_near_end(filler, _CYCLES_TO_END),
            longest_s=self._patience.filler_s,
        )
        self._seats -= len(waiting)
        if not self._fillers and self._seats < 1 and self._leaves.is_filler:
            self._seats = self._slots
            raise _VoidError("no slot was free")

    def _next_to_leave(self) -> LiveStream:
        """The newest of the fillers that have enough tokens, but first a filler near its end."""
        fillers = [one for one in self._fillers if one is not self._metronome] or self._fillers
        for filler in fillers:  # the oldest first
            if self._is_near_end(filler, self._slots):
                return filler
        if not any(one.tokens >= self._leaves.tokens for one in fillers):
            fillers[0].wait_tokens(self._leaves.tokens, self._session.plan.run.timeout_s)
        ready = [one for one in fillers if one.tokens >= self._leaves.tokens and not one.has_ended]
        if not ready:
            raise _VoidError(f"a stream ended before it had {self._leaves.tokens} tokens")
        return ready[-1]

    def _is_near_end(self, stream: LiveStream, cycles: int) -> bool:
        """It may end by itself within this number of cycles."""
        longest_s = max(filter(math.isfinite, self.recoveries_s), default=0.0)
        cycle_tokens = _MARGIN_TOKENS + int(1e9 * longest_s / self.step_ns)
        margin = min(cycle_tokens * cycles, stream.spec.max_tokens // 2)
        return stream.tokens >= stream.spec.max_tokens - margin

    def _start_filler(self, **more: Any) -> LiveStream:
        metronome = self._metronome
        is_needed = (
            metronome is None or metronome.has_ended or self._is_near_end(metronome, self._slots)
        )
        more["max_tokens"] = self._answer_tokens
        if self._slots > 1 and is_needed:
            self._metronome = filler = self._start(Role.METRONOME, **more)
            return filler
        return self._start(Role.FILLER, **more, **self._planned() if self._leaves.is_filler else {})

    def _planned(self) -> dict[str, Any]:
        return {"plan": self._leaves.plan, "way": Way.FIN, **self._leaves.changes}

    def _start(
        self,
        role: Role,
        *,
        arm: str = "",
        max_tokens: int | None = None,
        edit: Edit = lambda _row: None,
        **more: Any,
    ) -> LiveStream:
        fields: dict[str, Any] = {
            "user": next(self._users),
            "max_tokens": max_tokens or self._probe_tokens,
            "prompt_tokens": self._rng.randint(*self._prompt_tokens),
            **more,
        }
        stream = LiveStream(self._session, RequestSpec(role=role, arm=arm, **fields), edit=edit)
        self._live.append(stream)
        return stream

    # Time

    def _short_tokens(self) -> int:
        return _TOKENS_OF_SHORT + 2 * math.ceil(self._ttft_ns / self.step_ns)

    @property
    def _pacer(self) -> LiveStream | None:
        """Each of its tokens comes from a step."""
        running = (one for one in self._fillers if one.tokens and not one.has_ended)
        return self._metronome if self._metronome in self._fillers else next(running, self._short)

    def _wait_for_any_moment(self) -> None:
        """One as likely as any other: drawn over two steps from a token on, and anew if the next
        token comes first. So a step gets as many leaves as it is long."""
        pacer, is_next = self._pacer, True
        while is_next and pacer is not None and not pacer.has_ended:
            next_token = pacer.tokens + 1
            wait_ns = next(self._phases) * _DRAWN_STEPS * self.step_ns
            due_ns = time.perf_counter_ns() + wait_ns
            is_next = pacer.wait_tokens(next_token, max(0, wait_ns - _COARSE_NS) / 1e9)
            while not is_next and time.perf_counter_ns() < due_ns:
                _nap(_NAP_S)  # a busy loop would take the core from a server on this machine
                gevent.sleep(0)
                is_next = pacer.tokens >= next_token

    def _pace(self, tokens: int) -> None:
        pacer = self._pacer
        if pacer is None or not pacer.wait_tokens(pacer.tokens + tokens, self._patience.filler_s):
            raise _VoidError("the slots' streams stood still, or ended")

    def _wait_until_queued(self, stream: LiveStream) -> None:
        self._pace(_TOKENS_TO_QUEUE)
        queued_ns = time.perf_counter_ns() - stream.spec.intended_start_ns
        if queued_ns < self._ttft_ns:
            gevent.sleep((self._ttft_ns - queued_ns) / 1e9)
            self._pace(1)


def _check_is_running(short: LiveStream) -> None:
    if short.has_ended:
        raise _VoidError("the short request ended before the leaver's turn to be tried")
