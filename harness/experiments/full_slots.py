"""Full slots: they are filled, a probe queues, one stream leaves, and the probe is waited for.

The answers of the streams that fill the slots last more than twice the settle time, so that a
stream that runs on for nobody still holds its slot when that time is over. Where there are many
slots, many streams leave at once, and as many probes queue.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple

from harness.client.live_stream import LiveStream
from harness.experiments.filling import MANY, Filling, how_cut
from harness.experiments.holds import Leaver, wait_again_s
from harness.experiments.idle_server import ServerFacts
from harness.experiments.outcome import CannotDecideError
from harness.experiments.patience import QUEUED_STEPS, READY_S
from harness.experiments.streams import Streams, end_of, is_refused
from harness.records import Delivery, RequestRow, Role, WireClose

READ_TOKENS: Final = (1, 16, 64, 1, 16, 1, 16, 1)  # of the streams that leave, try by try
_FIRST_STEPS: Final = 4  # that the streams run before the first control
_LEAVING: Final = 8  # slots for each stream that leaves
_MOST_LEAVE: Final = 32
_ENDS_IN: Final = 4  # times its typical time
_STALL_STEPS: Final = 8
_CONTROLS: Final = 2  # times that a control is begun
_SURE_HAND_OVERS: Final = 6  # two pools, with a queue each, would miss one with 98 %
_MOST_LOST_ALONE: Final = 1  # hand-overs, while nothing that was left could hold a slot
_SERVED_PER_LOST: Final = 8  # hand-overs that were served, for each further one that was lost


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

    def __init__(self, streams: Streams, filling: Filling, rng: random.Random) -> None:
        self._streams = streams
        self._filling = filling
        self._rng = rng
        self._waves = 0
        self._leavers: Sequence[LiveStream] = ()  # of the latest try
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
        if self._lost_alone > max(_MOST_LOST_ALONE, self.handed_over // _SERVED_PER_LOST):
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
        """The streams that stayed leave, too, after a try whose slot did not come back. Returns
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
        if slots < MANY:
            return 1
        in_a_step = int(1 / turn_steps) if turn_steps > 1 / _MOST_LEAVE else _MOST_LEAVE
        may_wait = self._streams.facts.most_waiting
        return max(1, min(slots // _LEAVING, in_a_step, may_wait))

    def begin(self, fillers: int | None = None) -> None:
        """Fill `fillers` slots (default: all but the slots of the streams that are to leave), and
        note the client's lag from now on. No stream leaves for this: a server that did not notice
        would still run it."""
        self.before, self.controls, self.resets, self.natural_s = [], [], 0, None
        self._leavers = ()
        self._streams.lag.latest_ns.clear()
        self._streams.lets_wait(self._crowd)
        self._filling.fill(self._streams.slots - self._crowd if fillers is None else fillers)
        self._streams.pause(_FIRST_STEPS * self._streams.step_s)

    def note_steps(self) -> None:
        """Call it right before a leave; the first call after `begin` counts."""
        self.before = self.before or self._filling.steps_now()

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
        self._filling.fill(server.slots - count)
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
        self._filling.fill(self._streams.slots - count)
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
        """The probes are sent right after the leaves if `probes` is empty."""
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
        self._filling.lets_end = any((one.stall_s or 0.0) > least_s for one in tries)
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
        are_served = all(probe.tokens for probe in probes)
        if not are_served and self._filling.stands_still(server.patience.probe_s / 2):
            # Each leave may have stopped the server for as long.
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
                self._filling.longest_s = max(self._filling.longest_s, tried.recovery_s)
        for probe in probes:
            if probe.first_token_ns is not None:
                probe.join(READY_S)
        self._waiting = [probe for probe in probes if probe.first_token_ns is None]
        return tries

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
        if self._leavers and (cut := how_cut(probes, min(moments))) is not None:
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
        read = self._filling.metronomes
        others = sum(at_ns > since_ns for at_ns in read[0].token_times_ns) if read else None
        stall_s, cut = self._filling.stall_s(t0_ns, first_ns), self.how_cut(t0_ns)
        if first_ns is None:
            return SlotTry(None, patience_s, others, stall_s, cut, self._waves)
        waited_s = (first_ns - since_ns) / 1e9
        recovery_s = waited_s - idle_s - server.lag_s
        return SlotTry(recovery_s, waited_s, others, stall_s, cut, self._waves)

    def how_cut(self, since_ns: int = 0) -> str | None:
        """How a stream that stayed, or one that was to leave, ended since then, if it was cut."""
        return how_cut([*self._streams.fillers, *self._leavers], since_ns)


def _no_slot(what: str, stream: LiveStream) -> str:
    if stream.row is not None:
        return f"{what} did not begin: {end_of(stream)}"
    return f"{what} waits for a slot: another load uses this server, or a slot is lost"
