"""Admission: the slots of a server that refuses a request instead of queueing it.

The slots are full, one more request is refused, one stream leaves, and requests are sent one after
the other until one is admitted. In a control an answer ends by itself. A server may refuse for
another reason, too, such as a limit per minute: refusals in other words than for full slots decide
nothing.
"""

import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from harness.client.live_stream import LiveStream
from harness.experiments.filling import Filling
from harness.experiments.full_slots import FullSlots
from harness.experiments.holds import Holds, Leaver, wait_again_s
from harness.experiments.idle_server import ServerFacts
from harness.experiments.outcome import CannotDecideError
from harness.experiments.patience import QUEUED_STEPS, READY_S
from harness.experiments.streams import Streams, end_of, is_refused
from harness.records import Role
from harness.store.conform_result import JudgingWay

_LEAST_PAUSE_S: Final = 0.005  # between two requests that may be refused
_MOST_PAUSE_S: Final = 0.05
_NAMED: Final = re.compile(r"\S*\d\S*|\b[0-9a-f]{8,}\b", re.IGNORECASE)  # a number, an id


class Admission:
    """`refusals`: in a row, of the latest leave."""

    way: JudgingWay = "admission"

    def __init__(
        self, streams: Streams, filling: Filling, full_slots: FullSlots, rng: random.Random
    ) -> None:
        self._streams = streams
        self._filling = filling
        self._full_slots = full_slots
        self._rng = rng
        self._full = ""  # how a request is refused where the slots are full
        self.refusals = 0

    def can_judge(self, facts: ServerFacts) -> str | None:
        if facts.slots is None:
            return facts.why
        return None if facts.refuses else "the server queues requests: it refuses none"

    def holds(self, leaver: Leaver, tries: int) -> Holds:
        """A stream that never comes back ends the tries."""
        server, slots = self._streams, self._full_slots
        tries_s: list[float | None] = []
        controls_s: list[float] = []
        is_one_try = False
        slots.begin()
        for number in range(tries):
            controls_s.append(self._hand_over())
            tries_s.append(self._leave(leaver, number))
            if tries_s[-1] is None:
                is_one_try = self._others_are_admitted(controls_s)
                break
        cut = slots.how_cut()
        return Holds(
            way=self.way,
            tries_s=tries_s,
            controls_s=controls_s,
            floor_s=server.lag_s + self._pause_s,
            waited_s=server.patience.probe_s,
            natural_s=slots.natural_s,
            cuts=[] if cut is None else [cut],
            is_one_try=is_one_try,
        )

    def control_s(self) -> float:
        """The time of a control by itself, after a red. Raises CannotDecideError if no request is
        admitted."""
        self._full_slots.begin()
        return self._hand_over()

    def _hand_over(self) -> float:
        server = self._streams
        self._filling.fill(server.slots - 1)
        tokens = int(server.ttft_s / server.step_s) + 2 * QUEUED_STEPS
        ender = self._admit(lambda: server.start(server.short(tokens, role=Role.FILLER)))
        self._check_full()
        if ender.join(READY_S) is None or ender.last_token_ns is None:
            raise CannotDecideError(f"a short request had no end in {READY_S:g} s")
        taken_s = self._knock(ender.last_token_ns, server.patience.probe_s)
        if taken_s is None:
            raise CannotDecideError(
                f"after an answer that ended by itself no request was admitted within "
                f"{server.patience.probe_s:.1f} s: {self.refusals} refusals in a row"
            )
        return taken_s

    def _leave(self, way: Leaver, number: int) -> float | None:
        server = self._streams
        self._filling.fill(server.slots - 1)
        leaver = self._admit(lambda: way.begin(replace(way.spec, role=Role.USER)), way)
        if not way.is_early:
            self._check_full()
        way.ready(leaver, number)
        if not way.is_early:
            server.pause(self._rng.random() * server.step_s)
        if leaver.has_ended:
            raise CannotDecideError(f"a stream that was to leave ended by itself: {end_of(leaver)}")
        self._full_slots.note_natural([leaver])
        way.leave(leaver)
        server.pause(0)
        if leaver.abandoned_ns is None and leaver.join(server.settle_s) is None:
            raise CannotDecideError("a stream that was to leave could not")
        return self._knock(leaver.abandoned_ns or 0, server.patience.probe_s)

    def _others_are_admitted(self, controls_s: Sequence[float]) -> bool:
        """The streams that stayed leave, too: whether a request gets one of their slots."""
        server = self._streams
        left = [one for one in server.fillers if not one.has_ended]
        for one in left:
            one.leave()
        server.fillers = []
        longest_s = wait_again_s(controls_s, server.patience.probe_s)
        return bool(left) and self._knock(time.perf_counter_ns(), longest_s) is not None

    def _admit(self, begin: Callable[[], LiveStream], way: Leaver | None = None) -> LiveStream:
        """Begin a stream that holds a slot; while it is refused, begin another."""
        server = self._streams
        if way is not None and way.is_early:
            self._wait_free()
            return begin()
        until_s = time.monotonic() + server.patience.filler_s
        while True:
            stream = begin()
            begun = stream.wait_tokens(1, server.ttft_s + QUEUED_STEPS * server.step_s)
            if begun or not is_refused(stream):
                return stream
            if time.monotonic() > until_s:
                raise CannotDecideError(f"a stream that should run was refused: {end_of(stream)}")
            server.pause(self._pause_s)

    def _wait_free(self) -> None:
        """A slot is free for a stream that leaves too early to be asked whether it was admitted."""
        server = self._streams
        if self._knock(time.perf_counter_ns(), server.patience.probe_s) is None:
            raise CannotDecideError("no slot was free for the stream that was to leave")
        server.pause(QUEUED_STEPS * server.step_s)

    def _check_full(self) -> None:
        """Raises CannotDecideError unless one more request is refused."""
        server = self._streams
        one_more = server.start(server.probe())
        one_more.join(server.ttft_s + QUEUED_STEPS * server.step_s)
        self._full = _words_of(one_more)
        if not is_refused(one_more):
            one_more.join(READY_S)
            raise CannotDecideError(
                f"{server.slots} streams do not fill the server's slots: one more request was "
                "admitted (--slots N names their number)"
            )

    def _knock(self, t0_ns: int, longest_s: float) -> float | None:
        """The time from t0 until a request is admitted, by its sending; None: not within
        `longest_s`. Raises CannotDecideError if the latest request was refused for another reason
        than full slots."""
        server = self._streams
        self.refusals = 0
        until_ns = t0_ns + int(longest_s * 1e9)
        while True:
            probe = server.start(server.probe())
            if probe.wait_tokens(1, READY_S):
                probe.join(READY_S)
                return max(0.0, (probe.spec.intended_start_ns - t0_ns) / 1e9)
            if not is_refused(probe):
                raise CannotDecideError(f"the probe was not answered: {end_of(probe)}")
            self.refusals += 1
            if time.perf_counter_ns() > until_ns:
                break
            server.pause(self._pause_s)
        if self._full and _words_of(probe) != self._full:
            raise CannotDecideError(
                f"the server refuses for another reason than full slots: {end_of(probe)}"
            )
        return None

    @property
    def _pause_s(self) -> float:
        return min(_MOST_PAUSE_S, max(_LEAST_PAUSE_S, self._streams.step_s / 2))


def _words_of(refused: LiveStream) -> str:
    """The words of a refusal without numbers and ids, which differ from one to the next."""
    return _NAMED.sub("", end_of(refused))
