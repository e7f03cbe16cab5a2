"""Full slots: they are filled, a probe queues, one stream leaves, and the probe is waited for.

Streams that fill the slots are kept from try to try; only the one that left is replaced. They ask
for twice the settle time and more, so that a slot that is still held cannot be one that ended.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from harness.experiments.holds import Leaver
from harness.experiments.outcome import CannotDecideError
from harness.experiments.patience import QUEUED_STEPS, READY_S
from harness.experiments.streams import Streams, end_of, refill
from harness.load.live import LiveStream
from harness.records import Delivery, Role, WireClose

READ_TOKENS: Final = (1, 16, 64)  # of the streams that leave, try by try
_SPARE_TOKENS: Final = 32
_FIRST_STEPS: Final = 12  # that the streams run before the first try
_SHOWN_STEPS: Final = 24  # by which a step is judged,
_GAP_TOKENS: Final = 4  # each gap over so many


class Try(NamedTuple):
    """One leave behind full slots. `recovery_s`: from t0 to the probe's first token, less the
    probe's time on an idle server and the client's lag; None: not within `waited_s`. `others`: the
    tokens that another stream got in that time, a measure in steps; None: there was no other."""

    recovery_s: float | None
    waited_s: float
    others: int | None


class FullSlots:
    """`resets`: how many of the leaves were resets on the wire. `before`: the steps right before
    the first leave, in seconds; empty until then."""

    def __init__(self, streams: Streams, rng: random.Random) -> None:
        self._streams = streams
        self._rng = rng
        self.resets = 0
        self.before: list[float] = []

    def fill(self, streams: int | None = None) -> list[LiveStream]:
        """Keep `streams` long streams running (default: one per slot). Streams of the previous try
        are reused if they will outlast a probe."""
        server, patience = self._streams, self._streams.patience
        wanted = server.slots if streams is None else streams
        reserve = patience.probe_s / server.step_s + max(READ_TOKENS) + _SPARE_TOKENS
        running, waiting = refill(
            server.fillers,
            wanted,
            start=lambda: server.start(server.long(role=Role.FILLER)),
            lasts=lambda filler: filler.spec.max_tokens - filler.tokens > reserve,
            longest_s=patience.filler_s,
        )
        for extra in running[wanted:]:
            extra.leave()
        server.fillers = running[:wanted]
        if waiting:
            row = waiting[0].row
            raise CannotDecideError(
                f"only {len(server.fillers)} of {wanted} long streams ran at once"
                + (f": {row.error}" if row is not None and row.error else "")
            )
        return list(server.fillers)

    def queue_probe(self) -> LiveStream:
        """A short request behind full slots; returns when it has surely waited.

        Raises CannotDecideError if it is served: then the slots were not full.
        """
        server = self._streams
        probe = server.start(server.probe())
        if probe.wait_tokens(1, server.ttft_s + QUEUED_STEPS * server.step_s):
            raise CannotDecideError(
                f"the control's probe did not wait: {server.slots} streams do not fill the "
                "server's slots (--slots N names their number)"
            )
        if probe.row is not None:
            raise CannotDecideError(
                f"a request that should queue was refused: {probe.row.error or probe.row.outcome}"
            )
        return probe

    def begin(self) -> None:
        """Fill all slots but one, and note the client's lag from now on. No stream is left for
        this: a server that did not notice would still run it."""
        self.before, self.resets = [], 0
        self._streams.lag.latest_ns.clear()
        self.fill(self._streams.slots - 1)
        self._streams.pause(_FIRST_STEPS * self._streams.step_s)

    def note_steps(self) -> None:
        """Right before a leave; the first one after `begin` counts."""
        self.before = self.before or self.steps_now()

    def leave_behind_probe(self, way: Leaver, number: int) -> Try:
        """A probe queues, and then the stream leaves."""
        server = self._streams
        self.fill(server.slots - 1)
        leaver = way.begin(replace(way.spec, role=Role.USER))
        self._wait_admitted(leaver)
        probe = self.queue_probe()
        way.ready(leaver, number)
        server.pause(self._rng.random() * server.step_s)
        return self._leave_and_time(way, leaver, probe)

    def leave_before_probe(self, way: Leaver, number: int) -> Try:
        """The probe is sent at t0: the stream leaves too early for one to queue behind it."""
        server = self._streams
        self.fill(server.slots - 1)
        leaver = way.begin(replace(way.spec, role=Role.USER))
        way.ready(leaver, number)
        return self._leave_and_time(way, leaver, server.start(server.probe()))

    def hand_over(self, more_tokens: int = 0) -> Try:
        """A slot changes hands because its answer has ended: the control of a leave."""
        server = self._streams
        self.fill(server.slots - 1)
        tokens = int(server.ttft_s / server.step_s) + 4 * QUEUED_STEPS + more_tokens
        ender = server.start(server.short(tokens, role=Role.FILLER))
        if not ender.wait_tokens(1, server.patience.filler_s):
            raise CannotDecideError(f"a short request did not begin: {end_of(ender)}")
        probe = self.queue_probe()
        self.note_steps()
        if ender.join(READY_S) is None:
            raise CannotDecideError(f"a short request had no end in {READY_S:g} s")
        return self.time_probe(probe, lambda: ender.last_token_ns)

    def _wait_admitted(self, leaver: LiveStream) -> None:
        server = self._streams
        if leaver.spec.delivery is Delivery.UNARY:
            server.pause(server.ttft_s + 4 * server.step_s)
        elif not leaver.wait_tokens(1, server.patience.filler_s):
            raise CannotDecideError(f"the stream that was to leave did not begin: {end_of(leaver)}")

    def _leave_and_time(self, way: Leaver, leaver: LiveStream, probe: LiveStream) -> Try:
        if leaver.has_ended:
            raise CannotDecideError(
                f"the stream that was to leave ended by itself: {end_of(leaver)}"
            )
        if probe.tokens:
            raise CannotDecideError("the control's probe did not wait: it began before the leave")
        self.note_steps()
        way.leave(leaver)
        tried = self.time_probe(probe, lambda: leaver.abandoned_ns)
        self.resets += leaver.row is not None and leaver.row.wire_close is WireClose.RST
        return tried

    def time_probe(
        self,
        probe: LiveStream,
        since: Callable[[], int | None] = lambda: 0,
        *,
        idle_s: float | None = None,
    ) -> Try:
        """Wait for its first token. `since`: the moment (ns) from which a slot could work for it,
        if not from its sending; asked for when the wait is over. `idle_s`: its first-token time
        where nothing is in its way, if it is no short request."""
        server = self._streams
        idle_s = server.ttft_s if idle_s is None else idle_s
        patience_s = idle_s + server.patience.probe_s
        probe.wait_tokens(1, patience_s)
        if (t0_ns := since()) is None:
            raise CannotDecideError("the stream that was to leave could not")
        since_ns = max(t0_ns, probe.spec.intended_start_ns)
        others = None
        if server.fillers:
            others = sum(at_ns > since_ns for at_ns in server.fillers[0].token_times_ns)
        if probe.first_token_ns is None:
            if probe.row is not None:
                raise CannotDecideError(f"the probe was not answered: {end_of(probe)}")
            return Try(None, patience_s, others)
        # A busy client may read a last token after the first one of the stream in its place.
        if probe.first_token_ns < t0_ns - 2e9 * server.step_s:
            raise CannotDecideError("the control's probe did not wait: it began before the leave")
        waited_s = (probe.first_token_ns - since_ns) / 1e9
        probe.join(READY_S)
        return Try(waited_s - idle_s - server.lag_s, waited_s, others)

    def steps_now(self) -> list[float]:
        """The gaps between the latest tokens of the streams that fill the slots, in seconds."""
        times = [filler.token_times_ns for filler in self._streams.fillers]
        gaps = [gap for of_one in times for gap in latest_gaps(of_one)]
        if self._streams.slots == 1:  # no stream runs beside the one that leaves
            return [self._streams.step_s, self._streams.step_s]
        if len(gaps) < 2:
            raise CannotDecideError("the streams show no step: their tokens come in one piece")
        return gaps

    def steps_at_rest(self) -> list[float]:
        """The next steps, in seconds: no prompt is computed beside them."""
        self._streams.pause(_SHOWN_STEPS * self._streams.step_s)
        return self.steps_now()


def latest_gaps(times_ns: Sequence[int]) -> list[float]:
    """Each over some tokens: a busy client may read a few at once."""
    latest = times_ns[-_SHOWN_STEPS:]
    pairs = zip(latest, latest[_GAP_TOKENS:], strict=False)
    return [(late - early) / 1e9 / _GAP_TOKENS for early, late in pairs]
