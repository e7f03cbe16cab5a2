"""Streams keep the slots full, from try to try; those that are read show the steps.

Only the streams that left are replaced. Where there are many slots, a few of the streams are read,
and what the others get is thrown away.
"""

import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Final

from harness.client.live_stream import LiveStream
from harness.experiments.flushes import latest_gaps
from harness.experiments.outcome import CannotDecideError
from harness.experiments.patience import FIRST_TOKENS
from harness.experiments.streams import Streams, end_of, is_refused, refill
from harness.records import Outcome, Role

MANY: Final = 16  # slots
_SPARE_TOKENS: Final = 32
_SHOWN_STEPS: Final = 24  # by which a step is judged
_SHOWN_FLUSHES: Final = 4
_METRONOMES: Final = 4  # fillers that are read, where there are many
_CONTROL_TOKENS: Final = 48  # that the other streams get while a slot changes hands by itself
_MANY_TOKENS: Final = 112  # the same where many fill their slots one after the other
_CUT: Final = (Outcome.FAILED, Outcome.TIMED_OUT)


class Filling:
    """`longest_s`: the longest wait for a slot that came; the next may take as long. `lets_end`:
    streams that have served end by themselves, because a stream that stayed stood still as others
    left, or to send no leave at all."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.longest_s = 0.0
        self.lets_end = False

    def begin_case(self) -> None:
        """Forget how late slots were, and whether streams stood still, in the case before."""
        self.longest_s, self.lets_end = 0.0, False

    @contextmanager
    def without_leaves(self) -> Iterator[None]:
        """Slots that change hands meanwhile do so on a server that never stops, too."""
        before, self.lets_end = self.lets_end, True
        try:
            yield
        finally:
            self.lets_end = before

    def fill(self, streams: int | None = None) -> list[LiveStream]:
        """Keep `streams` long streams running (default: one per slot). Streams of the previous try
        are reused if they will outlast a probe. Raises CannotDecideError if fewer run at once."""
        server = self._streams
        wanted = server.slots if streams is None else streams
        waits_s = FIRST_TOKENS * server.ttft_s + 2 * self.longest_s
        waits = int(waits_s / server.step_s + 2 * (server.facts.flush_tokens - 1))
        until_s = time.monotonic() + server.patience.filler_s
        while True:
            waiting = self._refill(wanted, waits)
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

    def _refill(self, wanted: int, waits: int) -> list[LiveStream]:
        """Returns the new streams that got no slot. `waits`: tokens that a stream may get while
        slots are waited for."""
        server, patience = self._streams, self._streams.patience
        reserve = patience.probe_s / server.step_s + patience.longest_read + _SPARE_TOKENS + waits
        longer = _CONTROL_TOKENS
        if wanted >= MANY:
            longer = max(_MANY_TOKENS, int(patience.spare_s / server.step_s))
        asked = server.long(role=Role.FILLER, max_tokens=server.brief_tokens + longer + waits)
        running, waiting = refill(
            server.fillers,
            wanted,
            start=lambda: server.start(asked),
            lasts=lambda filler: server.tokens_left(filler) > reserve,
            longest_s=patience.filler_s,
            retire=self.retire,
        )
        for extra in running[wanted:]:
            self.retire(extra)
        server.fillers = running[:wanted]
        return waiting

    def retire(self, filler: LiveStream) -> None:
        """The filler leaves, or its answer ends by itself: where leaves stall the server, an extra
        one would stall it for longer than the next streams are waited for."""
        server = self._streams
        if not self.lets_end:
            filler.leave()
        elif not filler.has_ended:
            filler.join(server.patience.filler_s + server.tokens_left(filler) * server.step_s)
            filler.leave()

    def _drain_most(self) -> None:
        server = self._streams
        if len(server.fillers) < MANY:
            return
        for filler in self.metronomes[_METRONOMES:]:
            server.drain.add(filler)

    @property
    def metronomes(self) -> list[LiveStream]:
        """The fillers that are read, the oldest first."""
        drained = self._streams.drain.taken
        return [one for one in self._streams.fillers if one not in drained]

    def stands_still(self, for_s: float) -> bool:
        """None of the streams that are read has had a token for as long, and none has ended."""
        since_ns = time.perf_counter_ns() - int(1e9 * for_s)
        read = self.metronomes
        return bool(read) and all(
            not one.has_ended and (one.last_token_ns or 0) < since_ns for one in read
        )

    def stall_s(self, from_ns: int, until_ns: int | None) -> float | None:
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
        """The next steps, in seconds: no prompt is computed in them. Fillers may have ended while
        slots were waited for: others take their places."""
        fillers = self._streams.fillers
        if any(one.has_ended for one in fillers):
            self.fill(len(fillers))
        self._streams.pause(self._shown(steps) * self._streams.step_s)
        return self.steps_now(steps)

    def _shown(self, steps: int) -> int:
        """How many tokens show `steps` steps, or a few flushes."""
        flush = self._streams.facts.flush_tokens
        return steps if flush <= 1 else max(_SHOWN_STEPS, int(_SHOWN_FLUSHES * flush))


def how_cut(streams: Sequence[LiveStream], since_ns: int = 0) -> str | None:
    """How one of the streams ended since then, if it was cut."""
    cut = (one for one in streams if one.row is not None and one.row.outcome in _CUT)
    return next((end_of(one) for one in cut if one.row and one.row.ended_ns >= since_ns), None)
