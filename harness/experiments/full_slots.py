"""Full slots: they are filled, a probe queues, one stream leaves, and the probe is waited for.

Streams that fill the slots are kept from try to try; only the streams that left are replaced. Their
answers last more than twice the settle time, so that a stream that runs on for nobody still holds
its slot when that time is over. Where there are many slots, a few of the streams are read, and show
the steps; what the others get is thrown away. Many streams then leave at once, and as many probes
queue.
"""

import random
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Final, NamedTuple

from harness.client.live_stream import LiveStream
from harness.experiments.flushes import latest_gaps
from harness.experiments.holds import Leaver, wait_again_s
from harness.experiments.idle_server import ServerFacts
from harness.experiments.outcome import CannotDecideError
from harness.experiments.patience import FIRST_TOKENS, QUEUED_STEPS, READY_S
from harness.experiments.streams import Streams, end_of, is_refused, refill
from harness.records import Delivery, Outcome, RequestRow, Role, WireClose

READ_TOKENS: Final = (1, 16, 64, 1, 16, 1, 16, 1)  # of the streams that leave, try by try
_SPARE_TOKENS: Final = 32
_FIRST_STEPS: Final = 4  # that the streams run before the first control
_SHOWN_STEPS: Final = 24  # by which a step is judged
_SHOWN_FLUSHES: Final = 4
_METRONOMES: Final = 4  # fillers that are read, where there are many
_MANY: Final = 16  # slots
_LEAVING: Final = 8  # slots for each stream that leaves
_MOST_LEAVE: Final = 32
_CONTROL_TOKENS: Final = 48  # that the other streams get while a slot changes hands by itself
_MANY_TOKENS: Final = 112  # the same where many fill their slots one after the other
_ENDS_IN: Final = 4  # times its typical time
_CUT: Final = (Outcome.FAILED, Outcome.TIMED_OUT)
_STALL_STEPS: Final = 8
_CONTROLS: Final = 2  # times that a control is begun
_SURE_HAND_OVERS: Final = 6  # two pools, with a queue each, would miss one with 98 %
_MOST_LOST_ALONE: Final = 1  # while nothing that was left could hold a slot


class SlotTry(NamedTuple):
    """One slot that changed hands. `recovery_s`: from t0 to the probe's first token, less the
    probe's time on an idle server and the client's lag; None: not within `waited_s`. `others`: the
    tokens that another stream got in that time, a measure in steps; None: there was no other.
    `stall_s`: the longest gap of a stream that stayed; None: not known. `cut`: how a stream that
    stayed ended meanwhile. `wave`: of the slots that changed hands together; `rank`: in which
    order."""

    recovery_s: float | None
    waited_s: float
    others: int | None
    stall_s: float | None = None
    cut: str | None = None
    wave: int | None = None
    rank: int = 0


class _WaitedTooLittleError(Exception):
    """A slot was free before it should change hands."""


class FullSlots:
    """`resets`: how many of the leaves were resets on the wire. `before`: the steps right before
    the first leave, in seconds; empty until then. `controls`: slots that changed hands by
    themselves since `begin`. `natural_s`: how long the streams that left would have run on.
    `handed_over`, `lost_hand_overs`: of all controls, in how many a request that queued got the
    slot, and in how many it got none. Behind one address there may be several servers with a queue
    each: what waits in one queue gets no slot of another."""

    def __init__(self, streams: Streams, rng: random.Random) -> None:
        self._streams = streams
        self._rng = rng
        self._waves = 0
        self._leavers: Sequence[LiveStream] = ()  # of the latest try
        self._longest_s = 0.0  # the longest wait for a slot that came: the next may take as long
        self._may_stall = False  # a stream that stayed stood still as others left the last time
        self._waiting: Sequence[LiveStream] = ()  # probes of the latest try that got no slot
        self.handed_over = self.lost_hand_overs = self._lost_alone = 0
        self.resets = 0
        self.before: list[float] = []
        self.controls: list[SlotTry] = []
        self.natural_s: float | None = None

    def can_judge(self, facts: ServerFacts) -> str | None:
        if not facts.can_fill:
            return facts.why
        if not facts.has_queue:
            return "the server refuses a request instead of queueing it"
        if self._lost_alone > _MOST_LOST_ALONE:
            return (
                "slots whose answers ended by themselves served no request that queued: several "
                "servers may answer here, with a queue each, or another load takes them"
            )
        return None

    @property
    def are_one_pool(self) -> bool:
        """Whether each slot surely serves each request that queues."""
        return self.handed_over >= _SURE_HAND_OVERS and not self.lost_hand_overs

    def others_leave(self) -> tuple[int, float] | None:
        """After a try whose slot did not come back: the streams that stayed leave, too. Returns
        their number, and for how long the probe got none of their slots either; None: it got one,
        or none waits."""
        server = self._streams
        controls_s = [one.recovery_s or 0.0 for one in self.controls]
        wait_s = server.ttft_s + wait_again_s(controls_s, server.patience.probe_s)
        left = [one for one in server.fillers if not one.has_ended]
        for one in left:
            one.leave()
        server.fillers = []
        server.together([partial(one.wait_tokens, 1, wait_s) for one in self._waiting])
        served = sum(one.tokens > 0 for one in self._waiting)
        return None if served or not self._waiting else (len(left), wait_s)

    def fill(self, streams: int | None = None) -> list[LiveStream]:
        """Keep `streams` long streams running (default: one per slot). Streams of the previous try
        are reused if they will outlast a probe."""
        server, patience = self._streams, self._streams.patience
        wanted = server.slots if streams is None else streams
        waits_s = FIRST_TOKENS * server.ttft_s + 2 * self._longest_s
        waits = int(waits_s / server.step_s + 2 * (server.facts.flush_tokens - 1))
        reserve = patience.probe_s / server.step_s + patience.longest_read + _SPARE_TOKENS + waits
        longer = _CONTROL_TOKENS
        if wanted >= _MANY:
            longer = max(_MANY_TOKENS, int(patience.spare_s / server.step_s))
        longer += waits
        asked = server.long(role=Role.FILLER, max_tokens=server.brief_tokens + longer)
        until_s = time.monotonic() + patience.filler_s
        while True:
            running, waiting = refill(
                server.fillers,
                wanted,
                start=lambda: server.start(asked),
                lasts=lambda filler: server.tokens_left(filler) > reserve,
                longest_s=patience.filler_s,
                retire=self._retire,
            )
            for extra in running[wanted:]:
                self._retire(extra)
            server.fillers = running[:wanted]
            # A server that refuses has its slots back only a moment after they were left.
            is_refused_yet = server.facts.may_refuse and any(map(is_refused, waiting))
            if not is_refused_yet or time.monotonic() > until_s:
                break
            server.pause(server.step_s)
        if waiting:
            row = waiting[0].row
            raise CannotDecideError(
                f"only {len(server.fillers)} of {wanted} long streams ran at once"
                + (f": {row.error}" if row is not None and row.error else "")
            )
        self._drain_most()
        return list(server.fillers)

    def _retire(self, filler: LiveStream) -> None:
        """The filler leaves. Where leaves may stall the server, its answer ends by itself instead:
        an extra leave would stall the server for longer than the next streams are waited for."""
        server = self._streams
        if not self._may_stall:
            filler.leave()
        elif not filler.has_ended:
            filler.join(server.patience.filler_s + server.tokens_left(filler) * server.step_s)
            filler.leave()

    def _drain_most(self) -> None:
        server = self._streams
        if len(server.fillers) < _MANY:
            return
        drained = set(server.drain.streams)
        for filler in [one for one in server.fillers if one not in drained][_METRONOMES:]:
            server.drain.add(filler)

    @property
    def metronomes(self) -> list[LiveStream]:
        """The fillers that are read, the oldest first."""
        drained = set(self._streams.drain.streams)
        return [one for one in self._streams.fillers if one not in drained]

    def queue_probe(self) -> LiveStream:
        """A short request behind full slots; returns when it has surely waited.

        Raises CannotDecideError if it is served: then the slots were not full.
        """
        try:
            return self._queue_probes(1)[0]
        except _WaitedTooLittleError:
            raise self._not_full() from None

    def _queue_probes(self, count: int) -> list[LiveStream]:
        server = self._streams
        probes = [server.start(server.probe()) for _ in range(count)]
        is_served = probes[0].wait_tokens(1, server.ttft_s + QUEUED_STEPS * server.step_s)
        if is_served or any(probe.tokens for probe in probes):
            for probe in probes:
                probe.join(READY_S)
            raise _WaitedTooLittleError
        if (ended := next((probe for probe in probes if probe.has_ended), None)) is not None:
            raise CannotDecideError(f"a request that should queue was refused: {end_of(ended)}")
        return probes

    def _not_full(self) -> CannotDecideError:
        server = self._streams
        if ghosts := server.ghosts():
            return CannotDecideError(
                f"a request that should have to wait was served: {ghosts} requests that left "
                "earlier may still have held slots, which came free meanwhile"
            )
        return CannotDecideError(
            f"a request that should have to wait was served: {server.slots} streams do not fill "
            "the server's slots (--slots N names their number)"
        )

    @property
    def _crowd(self) -> int:
        """How many streams leave at once: the prompts of their probes take about a step."""
        slots, turn_steps = self._streams.slots, self._streams.facts.turn_steps
        if slots < _MANY:
            return 1
        in_a_step = int(1 / turn_steps) if turn_steps > 1 / _MOST_LEAVE else _MOST_LEAVE
        may_wait = self._streams.facts.most_waiting
        return max(1, min(slots // _LEAVING, in_a_step, may_wait))

    def begin_case(self) -> None:
        """Forget how late slots were, and whether streams stood still, in the case before."""
        self._longest_s, self._may_stall = 0.0, False

    def begin(self, fillers: int | None = None) -> None:
        """Fill `fillers` slots (default: all but the slots of the streams that are to leave), and
        note the client's lag from now on. No stream leaves for this: a server that did not notice
        would still run it."""
        self.before, self.controls, self.resets, self.natural_s = [], [], 0, None
        self._leavers = ()
        self._streams.lag.latest_ns.clear()
        self._streams.lets_wait(self._crowd)
        self.fill(self._streams.slots - self._crowd if fillers is None else fillers)
        self._streams.pause(_FIRST_STEPS * self._streams.step_s)

    def note_steps(self) -> None:
        """Call it right before a leave; the first call after `begin` counts."""
        self.before = self.before or self.steps_now()

    def leave_behind_probe(self, way: Leaver, number: int) -> list[SlotTry]:
        """Probes queue, and then as many streams leave."""
        server = self._streams
        leavers = self._begin_leavers(way, 1 if way.is_alone else self._crowd)
        server.together([partial(self._wait_admitted, one) for one in leavers])
        try:
            probes = self._queue_probes(len(leavers))
        except _WaitedTooLittleError:
            raise self._not_full() from None
        self._wait_ready(way, leavers, number)
        server.pause(self._rng.random() * server.step_s)
        return self._leave_and_time(way, leavers, probes)

    def leave_before_probe(self, way: Leaver, number: int) -> list[SlotTry]:
        """The probes are sent at t0: the streams leave too early for one to queue behind them."""
        leavers = self._begin_leavers(way, 1 if way.is_alone else self._crowd)
        self._wait_ready(way, leavers, number)
        return self._leave_and_time(way, leavers, [])

    def serve_probe(self, probe: LiveStream, *, idle_s: float | None = None) -> None:
        """The control of a probe that needs no slot of a stream that left: nobody leaves."""
        self.controls.append(self.time_probe(probe, idle_s=idle_s))

    def hand_over(self, more_tokens: int = 0, *, alone: bool = False) -> SlotTry:
        """Slots change hands because their answers have ended: the control of leaves. Returns the
        last of them."""
        count = 1 if alone else self._crowd
        for attempt in range(1, _CONTROLS + 1):
            try:
                tries = self._hand_over(count, attempt * self.ender_tokens(count) + more_tokens)
            except _WaitedTooLittleError:
                continue
            self.controls += tries
            self._note_hand_over(is_lost=any(one.recovery_s is None for one in tries))
            return tries[-1]
        raise self._not_full()

    def _note_hand_over(self, *, is_lost: bool) -> None:
        self.handed_over += not is_lost
        self.lost_hand_overs += is_lost
        self._lost_alone += is_lost and not self._streams.ghosts()

    def ender_tokens(self, count: int) -> int:
        """The length of an answer that ends after `count` probes have queued behind it."""
        server = self._streams
        flush = int(server.facts.flush_tokens)
        return int(2 * server.ttft_s / server.step_s) + 2 * QUEUED_STEPS + count // 2 + 4 + flush

    def _hand_over(self, count: int, tokens: int) -> list[SlotTry]:
        server = self._streams
        self.fill(server.slots - count)
        enders = [server.start(server.short(tokens, role=Role.FILLER)) for _ in range(count)]
        for ender in enders:
            if not ender.wait_tokens(1, server.patience.filler_s):
                raise CannotDecideError(_no_slot("a short request", ender))
        try:
            probes = self._queue_probes(count)
        except _WaitedTooLittleError:
            for ender in enders:
                ender.join(READY_S)
            raise
        self.note_steps()
        for ender in enders:
            self.await_end(ender)
        return self.time_probes(probes, lambda: [ender.last_token_ns for ender in enders])

    def await_end(self, ender: LiveStream) -> RequestRow:
        """Raises CannotDecideError if a short answer that has begun does not end."""
        server = self._streams
        longest_s = server.patience.filler_s + _ENDS_IN * ender.spec.max_tokens * server.step_s
        if (row := ender.join(longest_s)) is None:
            raise CannotDecideError(
                f"a short answer that had begun did not end in {longest_s:.1f} s"
            )
        return row

    def _begin_leavers(self, way: Leaver, count: int) -> list[LiveStream]:
        self.fill(self._streams.slots - count)
        return [way.begin(replace(way.spec, role=Role.USER)) for _ in range(count)]

    def _wait_ready(self, way: Leaver, leavers: Sequence[LiveStream], number: int) -> None:
        self._streams.together([partial(way.ready, one, number) for one in leavers])

    def _wait_admitted(self, leaver: LiveStream) -> None:
        server = self._streams
        if leaver.spec.delivery is Delivery.UNARY:
            server.pause(server.ttft_s + 4 * server.step_s)
        elif not leaver.wait_tokens(1, server.patience.filler_s):
            raise CannotDecideError(_no_slot("the stream that was to leave", leaver))

    def _leave_and_time(
        self, way: Leaver, leavers: Sequence[LiveStream], probes: list[LiveStream]
    ) -> list[SlotTry]:
        """Without `probes`, they are sent right after the leaves."""
        server = self._streams
        if (ended := next((one for one in leavers if one.has_ended), None)) is not None:
            raise CannotDecideError(f"a stream that was to leave ended by itself: {end_of(ended)}")
        if any(probe.tokens for probe in probes):
            raise self._not_full()
        self.note_steps()
        self.note_natural(leavers)
        self._leavers = leavers
        for leaver in leavers:
            way.leave(leaver)
        probes = probes or [server.start(server.probe()) for _ in leavers]
        tries = self.time_probes(probes, lambda: [leaver.abandoned_ns for leaver in leavers])
        steps = max(_STALL_STEPS, 2 * server.facts.flush_tokens)
        least_s = max(steps * server.step_s, server.patience.filler_s / server.slots)
        self._may_stall = any((one.stall_s or 0.0) > least_s for one in tries)
        self.resets += sum(
            one.row is not None and one.row.wire_close is WireClose.RST for one in leavers
        )
        return tries

    def note_natural(self, leavers: Sequence[LiveStream]) -> None:
        """Call it right before they leave."""
        server = self._streams
        lefts = [server.tokens_left(leaver) * server.step_s for leaver in leavers]
        self.natural_s = min(lefts if self.natural_s is None else [*lefts, self.natural_s])

    def time_probe(
        self,
        probe: LiveStream,
        since: Callable[[], int | None] = lambda: 0,
        *,
        idle_s: float | None = None,
    ) -> SlotTry:
        """See `time_probes`."""
        (tried,) = self.time_probes([probe], lambda: [since()], idle_s=idle_s)
        return tried

    def time_probes(
        self,
        probes: Sequence[LiveStream],
        since: Callable[[], Sequence[int | None]],
        *,
        idle_s: float | None = None,
    ) -> list[SlotTry]:
        """Wait for their first tokens. `since`: the moments (ns) from which slots could work for
        them, if not from their sending; asked for when the wait is over. `idle_s`: the first-token
        time of such a probe where nothing is in its way, if it is no short request."""
        server = self._streams
        idle_s = server.ttft_s if idle_s is None else idle_s
        patience_s = idle_s + server.patience.probe_s
        if server.facts.refuses:
            probes = [self._until_admitted(probe, patience_s) for probe in probes]
        server.together([partial(one.wait_tokens, 1, patience_s) for one in probes])
        if self._stands_still(probes):  # each leave may have stopped it for as long
            longest_s = len(probes) * server.patience.probe_s
            server.together([partial(one.wait_tokens, 1, longest_s) for one in probes])
        moments = [t0_ns for t0_ns in since() if t0_ns is not None]
        self._waves += 1
        self._waiting = []
        if (cut := self._cut_instead(probes, moments)) is not None:
            return [SlotTry(None, 0.0, None, None, cut, self._waves)]
        firsts = sorted(one.first_token_ns for one in probes if one.first_token_ns is not None)
        # A busy client may read a last token after the first one of the stream in its place. Later
        # probes may have the slots of earlier ones.
        if firsts and firsts[0] < min(moments) - 2e9 * server.step_s:
            raise self._not_full()
        tries = []
        for number, t0_ns in enumerate(sorted(moments)):
            first_ns = firsts[number] if number < len(firsts) else None
            since_ns = max(t0_ns, min(one.spec.intended_start_ns for one in probes))
            tried = self._tried(t0_ns, since_ns, first_ns, idle_s, patience_s)
            tries.append(tried._replace(rank=number))
            if tried.recovery_s is not None:
                self._longest_s = max(self._longest_s, tried.recovery_s)
        for probe in probes:
            if probe.first_token_ns is not None:
                probe.join(READY_S)
        self._waiting = [probe for probe in probes if probe.first_token_ns is None]
        return tries

    def _stands_still(self, probes: Sequence[LiveStream]) -> bool:
        """Probes still wait, and no stream that stayed has had a token for half of their wait."""
        if all(probe.tokens for probe in probes) or not self.metronomes:
            return False
        if any(one.has_ended for one in self.metronomes):
            return False
        since_ns = time.perf_counter_ns() - int(1e9 * self._streams.patience.probe_s / 2)
        return all((one.last_token_ns or 0) < since_ns for one in self.metronomes)

    def _until_admitted(self, probe: LiveStream, longest_s: float) -> LiveStream:
        """The probe, or, while it is refused, one like it that is sent a moment later."""
        server = self._streams
        until_s, sent_ns = time.monotonic() + longest_s, probe.spec.intended_start_ns
        while not probe.wait_tokens(1, longest_s) and is_refused(probe):
            if time.monotonic() > until_s:
                break
            server.pause(server.step_s / 2)
            probe = server.start(replace(probe.spec, request_id=""))
        probe.spec = replace(probe.spec, intended_start_ns=sent_ns)
        return probe

    def _cut_instead(self, probes: Sequence[LiveStream], moments: Sequence[int]) -> str | None:
        """How a stream was cut as others left, so that there is no figure. Raises
        CannotDecideError."""
        if len(moments) < len(probes):
            if moments and (cut := self.how_cut(min(moments))) is not None:
                return cut
            raise CannotDecideError("a stream that was to leave could not")
        if self._leavers and (cut := _how_cut(probes, min(moments))) is not None:
            return cut
        refuses = self._streams.facts.refuses
        for probe in probes:
            if probe.first_token_ns is None and probe.row is not None:
                if refuses and is_refused(probe):
                    continue
                raise CannotDecideError(f"the probe was not answered: {end_of(probe)}")
        return None

    def _tried(
        self, t0_ns: int, since_ns: int, first_ns: int | None, idle_s: float, patience_s: float
    ) -> SlotTry:
        server = self._streams
        read = self.metronomes
        others = sum(at_ns > since_ns for at_ns in read[0].token_times_ns) if read else None
        stall_s, cut = self._stall_s(t0_ns, first_ns), self.how_cut(t0_ns)
        if first_ns is None:
            return SlotTry(None, patience_s, others, stall_s, cut, self._waves)
        waited_s = (first_ns - since_ns) / 1e9
        recovery_s = waited_s - idle_s - server.lag_s
        return SlotTry(recovery_s, waited_s, others, stall_s, cut, self._waves)

    def _stall_s(self, from_ns: int, until_ns: int | None) -> float | None:
        """The longest gap in which no stream that stayed had a token, until then or until now."""
        gaps = []
        ends_ns = time.perf_counter_ns() if until_ns is None else until_ns
        for filler in self.metronomes:
            times = [*filler.token_times_ns]
            if until_ns is not None:
                times = [*times[: bisect_right(times, until_ns) + 1]]
            around = [late - early for early, late in pairwise(times) if late > from_ns]
            if times and times[-1] < ends_ns and not filler.has_ended:
                around.append(ends_ns - times[-1])
            if around:
                gaps.append(max(around) / 1e9)
        return min(gaps, default=None)

    def how_cut(self, since_ns: int = 0) -> str | None:
        """How a stream that stayed, or one that was to leave, ended since then, if it was cut."""
        return _how_cut([*self._streams.fillers, *self._leavers], since_ns)

    def steps_now(self, steps: int = _SHOWN_STEPS) -> list[float]:
        """The gaps between the latest tokens of the streams that fill the slots, in seconds."""
        latest = self._shown(steps)
        gaps = [
            gap
            for one in self.metronomes
            for gap in latest_gaps(one.token_times_ns, one.event_tokens, latest=latest)
        ]
        if not self._streams.fillers:  # only the stream that leaves runs
            return [self._streams.step_s, self._streams.step_s]
        if len(gaps) < 2:
            raise CannotDecideError("the streams show no step: their tokens come in one piece")
        return gaps

    def steps_at_rest(self, steps: int = _SHOWN_STEPS) -> list[float]:
        """The next steps, in seconds: no prompt is computed in them."""
        self._streams.pause(self._shown(steps) * self._streams.step_s)
        return self.steps_now(steps)

    def _shown(self, steps: int) -> int:
        """How many tokens show `steps` steps, or a few flushes."""
        flush = self._streams.facts.flush_tokens
        return steps if flush <= 1 else max(_SHOWN_STEPS, int(_SHOWN_FLUSHES * flush))


def _how_cut(streams: Sequence[LiveStream], since_ns: int) -> str | None:
    cut = (one for one in streams if one.row is not None and one.row.outcome in _CUT)
    return next((end_of(one) for one in cut if one.row and one.row.ended_ns >= since_ns), None)


def _no_slot(what: str, stream: LiveStream) -> str:
    if stream.row is not None:
        return f"{what} did not begin: {end_of(stream)}"
    return f"{what} waits for a slot: another load uses this server, or a slot is lost"
