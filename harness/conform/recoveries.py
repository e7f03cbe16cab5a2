"""Method P: a stream leaves behind full slots, several times; how late the slots work is judged."""

from collections.abc import Callable, Sequence

from harness.conform.finding import Finding
from harness.conform.judgement import AT_ONCE, Bound, Conditions, judge_recovery
from harness.experiments.facts import ANOTHER_LOAD, MOST_SLOTS
from harness.experiments.full_slots import READ_TOKENS, FullSlots, Try
from harness.experiments.holds import Leaver
from harness.experiments.outcome import CannotDecideError
from harness.experiments.patience import READY_S
from harness.experiments.streams import Streams
from harness.load.live import LiveStream
from harness.load.wire_log import WireLog
from harness.store.conform_result import Failure
from harness.workload.abandon import RequestSpec


class Recoveries:
    """`tries`: of a case."""

    def __init__(
        self, full_slots: FullSlots, streams: Streams, *, tries: int, wire: WireLog
    ) -> None:
        self._full_slots = full_slots
        self._streams = streams
        self._tries = tries
        self._wire = wire

    def find(
        self,
        spec: RequestSpec | None = None,
        *,
        leave: Callable[[LiveStream], object] = LiveStream.leave,
        ready: Callable[[LiveStream, int], object] | None = None,
        begin: Callable[[RequestSpec], LiveStream] | None = None,
        tokens: Sequence[int] = READ_TOKENS,
        queues_first: bool = True,
        bound: Bound = AT_ONCE,
    ) -> Finding:
        """A stream of this `spec` (default: a long one) leaves, and a probe gets its slot. `begin`,
        `ready` (default: it has read one of `tokens`) and `leave`: see `Leaver`. Not
        `queues_first`: the probe is sent at t0, since the stream leaves too early for one to queue
        behind it."""

        def until_read(leaver: LiveStream, number: int) -> None:
            leaver.wait_tokens(tokens[number % len(tokens)], READY_S)

        streams, slots = self._streams, self._full_slots
        way = Leaver(spec or streams.long(), begin or streams.start, ready or until_read, leave)
        tries: list[Try] = []
        slots.begin()
        if not queues_first:  # the control, since no probe of these tries queues before the leave
            slots.hand_over()
            slots.before = slots.steps_at_rest()
        one_try = slots.leave_behind_probe if queues_first else slots.leave_before_probe
        for number in range(self._tries):
            self._wire.begin_try(number)
            tries.append(one_try(way, number))
            if tries[-1].recovery_s is None:
                break
        finding = self.judged(tries, bound)
        finding.evidence["left_by_reset"] = slots.resets
        return finding

    def judged(self, tries: Sequence[Try], bound: Bound = AT_ONCE) -> Finding:
        """After `FullSlots.begin` and the tries. Raises CannotDecideError."""
        streams, slots = self._streams, self._full_slots
        after = slots.steps_at_rest()
        now = Conditions.of(slots.before or after, after, streams.lag_s)
        finding = judge_recovery(tries, now, bound)
        finding.evidence["ttft_ms"] = round(1e3 * streams.ttft_s, 3)
        return finding

    def check_alone(self, running: int | None) -> Finding:
        """The control of a red, when all is at rest and `running` requests run at once: slots whose
        answers end by themselves serve another request in time. Raises CannotDecideError if they do
        not: then another load takes them. Slots that stay lost after every stream has ended are
        left out from here on."""
        streams = self._streams
        if streams.facts.slots is None or streams.facts.slots > MOST_SLOTS:
            return Finding(None, "no slots are known that another load could take", {})
        if running == 0:
            if streams.serves():
                raise CannotDecideError(f"{ANOTHER_LOAD}: a short request waits long for a slot")
            return Finding(Failure.NEVER, "the server serves no request any more", {})
        more = [0] * self._tries
        if running is not None and running < streams.slots:
            # Are they lost, or taken? Another load's come free while a probe waits so long.
            more = [int(streams.patience.probe_s / streams.step_s)]
            streams.facts = streams.facts._replace(slots=running)
        self._full_slots.begin()
        try:
            tries = [self._full_slots.hand_over(tokens) for tokens in more]
        except CannotDecideError as error:
            raise CannotDecideError(f"{ANOTHER_LOAD}: {error}") from error
        control = self.judged(tries)
        if control.failure is not None:
            raise CannotDecideError(
                f"{ANOTHER_LOAD}: a slot whose answer ended by itself was {control.failure}, too "
                f"({control.reason})"
            )
        return control
