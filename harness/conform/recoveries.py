"""Method P: streams leave a server that is full, several times; how long it held them is judged.

Several ways, one after the other until one can judge this server: full slots, which alone count
steps; admission, where requests are refused; and the ways that need no full slots.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from harness.client.live_stream import LiveStream
from harness.client.wire_log import WireLog
from harness.conform.finding import Finding
from harness.conform.judgement import (
    AT_ONCE,
    Bound,
    CaseConditions,
    holds_of,
    judge_holds,
    judge_recovery,
)
from harness.conform.stopping import ANOTHER_LOAD, HARM_S, is_suspicious
from harness.experiments.admission import Admission
from harness.experiments.filling import Filling
from harness.experiments.full_slots import READ_TOKENS, FullSlots, SlotTry
from harness.experiments.holds import Leaver, Watcher
from harness.experiments.occupancy import Occupancy
from harness.experiments.outcome import CannotDecideError, HarnessError
from harness.experiments.patience import READY_S
from harness.experiments.streams import Streams
from harness.formatting import quantity
from harness.store.conform_result import Failure, JudgingWay
from harness.workload.abandon import RequestSpec

_AFTER_STEPS: Final = 12  # steps after the tries, whose median is taken


def by_first(
    ways: Sequence[tuple[JudgingWay, str | None, Callable[[], Finding]]],
    *,
    give_up: Callable[[], object],
) -> Finding:
    """The finding of the first way that can judge and decides. `give_up` is called after each way
    that does not. Raises CannotDecideError, and HarnessError if a way failed by our own side."""
    kind, open_ones = CannotDecideError, dict[str, list[str]]()
    for way, why_not, look in ways:
        if why_not is None:
            try:
                return look()
            except CannotDecideError as error:
                why_not = str(error)
                kind = HarnessError if isinstance(error, HarnessError) else kind
                give_up()
        open_ones.setdefault(why_not, []).append(way.replace("_", " "))
    reasons = [f"by {' or '.join(names)}: {why}" for why, names in open_ones.items()]
    raise kind("; ".join(reasons))


class Recoveries:
    """`tries`: of a case. `watchers`: the ways other than full slots, in the order in which they
    are asked."""

    def __init__(
        self,
        full_slots: FullSlots,
        filling: Filling,
        streams: Streams,
        *,
        tries: int,
        wire: WireLog,
        occupancy: Occupancy,
        watchers: Sequence[Watcher] = (),
    ) -> None:
        self._full_slots = full_slots
        self._filling = filling
        self._streams = streams
        self.tries = tries
        self._wire = wire
        self._occupancy = occupancy
        self._watchers = watchers

    def find(  # noqa: PLR0913  the parts of a leave
        self,
        spec: RequestSpec | None = None,
        *,
        leave: Callable[[LiveStream], object] = LiveStream.leave,
        ready: Callable[[LiveStream, int], object] | None = None,
        begin: Callable[[RequestSpec], LiveStream] | None = None,
        tokens: Sequence[int] = READ_TOKENS,
        queues_first: bool = True,
        is_alone: bool = False,
        is_heavy: bool = False,
        bound: Bound = AT_ONCE,
    ) -> Finding:
        """A stream of this `spec` (default: a long one) leaves, and a probe gets its slot. `begin`,
        `ready` (default: it has read one of `tokens`), `leave`, `is_alone` and `is_heavy`: see
        `Leaver`. Not `queues_first`: the probe is sent at t0, since the stream leaves too early for
        one to queue behind it. Raises CannotDecideError with the reasons of all ways."""

        def until_read(leaver: LiveStream, number: int) -> None:
            leaver.wait_tokens(reads[number % len(reads)], READY_S)

        streams = self._streams
        reads = [one for one in tokens if one <= streams.patience.longest_read] or tokens
        asked = spec or streams.long()
        leaver = Leaver(
            replace(asked, max_tokens=min(asked.max_tokens, streams.brief_tokens)),
            begin or streams.start,
            ready or until_read,
            leave,
            is_early=not queues_first,
            is_alone=is_alone,
            is_heavy=is_heavy,
        )
        ways: list[tuple[JudgingWay, str | None, Callable[[], Finding]]] = [
            (
                "full_slots",
                self._full_slots.can_judge(streams.facts),
                lambda: self._by_full_slots(leaver, bound),
            )
        ]
        for one in self._watchers:
            look = partial(self._by_watcher, one, leaver, bound)
            why_not = one.can_judge(streams.facts)
            ways.append((one.way, why_not, look))
        return by_first(ways, give_up=streams.end)

    def _by_full_slots(self, leaver: Leaver, bound: Bound) -> Finding:
        slots = self._full_slots
        leave = slots.leave_before_probe if leaver.is_early else slots.leave_behind_probe

        def one_try(number: int) -> list[SlotTry]:
            tries = leave(leaver, number)
            return [one._replace(stall_s=None) for one in tries] if leaver.is_heavy else tries

        finding = self.by_turns(one_try, bound, is_alone=leaver.is_alone)
        finding.evidence["left_by_reset"] = slots.resets
        return finding

    def by_turns(
        self,
        one_try: Callable[[int], list[SlotTry]],
        bound: Bound = AT_ONCE,
        *,
        is_alone: bool = False,
    ) -> Finding:
        """The finding by full slots: a look, and the test if the look does not acquit (see
        harness/conform/stopping.py). Raises CannotDecideError."""
        tries = self._turns(one_try, bound, is_alone=is_alone, is_look=True)
        if tries[-1].recovery_s is not None:
            if not self._is_suspicious(tries, bound):
                try:
                    finding = self.judged(tries, bound)
                except CannotDecideError:
                    finding = None
                if finding is not None and finding.failure is None and finding.stops:
                    return finding
            tries = self._turns(one_try, bound, is_alone=is_alone)
        finding = self.judged(tries, bound)
        return self._after_others(finding) if finding.failure is Failure.NEVER else finding

    def _after_others(self, never: Finding) -> Finding:
        """One slot that never came back may be of another queue than the probe's, where several
        servers answer. It counts if the probe gets no slot of the streams that stayed either, or if
        each slot was seen to serve each request that queues."""
        slots = self._full_slots
        is_sure, after = slots.are_one_pool, slots.others_leave()
        if after is None:
            return never._replace(is_one_try=not is_sure)
        others, wait_s = after
        if not others:
            return never
        stayed = "the stream that stayed" if others == 1 else f"the {others} streams that stayed"
        within = quantity(wait_s, "s")
        reason = f"{never.reason}; then {stayed} left, too, and none of their slots worked for it"
        evidence = never.evidence | {"others_left": others}
        return never._replace(reason=f"{reason} within {within}", evidence=evidence)

    def _turns(
        self,
        one_try: Callable[[int], list[SlotTry]],
        bound: Bound,
        *,
        is_alone: bool,
        is_look: bool = False,
    ) -> list[SlotTry]:
        """Tries and controls by turns; in a look only one control, and no try after a long one."""
        slots, tries = self._full_slots, list[SlotTry]()
        slots.begin()
        for number in range(self.tries):
            if not is_look or not number:
                slots.hand_over(alone=is_alone)
            self._wire.begin_try(number)
            tries += one_try(number)
            if tries[-1].recovery_s is None or (is_look and self._is_suspicious(tries, bound)):
                break
        return tries

    def _is_suspicious(self, tries: Sequence[SlotTry], bound: Bound) -> bool:
        streams, slots = self._streams, self._full_slots
        step_s = streams.step_s
        now = CaseConditions(step_s, step_s, step_s, streams.lag_s, streams.facts.flush_tokens)
        holds = holds_of(tries, slots.controls, now, slots.natural_s)
        return is_suspicious(holds, bound.steps * step_s + HARM_S, step_s, now.flush_s)

    def _by_watcher(self, watcher: Watcher, leaver: Leaver, bound: Bound) -> Finding:
        self._wire.begin_try(0)
        if watcher.way != "admission":
            self._streams.end()  # what this case has begun would move what is watched
        holds = watcher.holds(leaver, self.tries)
        holds = holds._replace(stalls_s=()) if leaver.is_heavy else holds
        finding = judge_holds(holds, self._streams.step_s, bound)
        if finding.failure is None and watcher.way == "admission":
            return self._all_admitted(finding)
        return finding

    def _all_admitted(self, finding: Finding) -> Finding:
        """As many requests as slots must be admitted again after all have left."""
        self._streams.end()
        held = self._occupancy.held(lambda: 0)
        evidence = finding.evidence | {"held": held}
        if not held:
            return finding._replace(evidence=evidence)
        said = f"after all had left, {held} of {self._streams.slots} requests at once are refused"
        return finding._replace(failure=Failure.NEVER, reason=said, evidence=evidence, stops=False)

    def judged(
        self,
        tries: Sequence[SlotTry],
        bound: Bound = AT_ONCE,
        *,
        before: Sequence[float] = (),
    ) -> Finding:
        """Call it after the tries and their controls (`FullSlots.begin`, `hand_over`). `before`:
        the steps before the first leave, if `FullSlots` did not note them. Raises
        CannotDecideError."""
        streams, slots = self._streams, self._full_slots
        before = before or slots.before
        # A slot that did not come back has no steps to count.
        is_missing = any(one.recovery_s is None for one in tries)
        after = before if before and is_missing else self._filling.steps_at_rest(_AFTER_STEPS)
        now = CaseConditions.of(before or after, after, streams.lag_s, streams.facts.flush_tokens)
        finding = judge_recovery(
            tries, now, bound, controls=slots.controls, natural_s=slots.natural_s
        )
        finding.evidence["ttft_ms"] = round(1e3 * streams.ttft_s, 3)
        if len({one.wave for one in tries}) < len(tries):
            finding.evidence["left"] = len(tries)
        return finding

    def check_alone(self, running: int | None) -> Finding:
        """The control of a red, when all is at rest and `running` requests run at once: slots whose
        answers end by themselves serve another request. Raises CannotDecideError if they do not:
        then another load takes them. Slots that stay lost after every stream has ended are left out
        from here on."""
        streams = self._streams
        if not streams.facts.can_fill:
            return Finding(None, "no slots are known that another load could take", {})
        if running == 0:
            if streams.serves():
                raise CannotDecideError(f"{ANOTHER_LOAD}: a short request waits long for a slot")
            return Finding(Failure.NEVER, "the server serves no request any more", {})
        if running is not None and running < streams.slots:
            streams.facts = streams.facts._replace(slots=running)
        if (admission := self._admission) is not None:
            served_s = [admission.control_s() for _ in range(self.tries)]
            return _served_within(served_s)
        with self._filling.without_leaves():
            controls = [self._one_control() for _ in range(self.tries)]
        served_s = [one.recovery_s for one in controls if one.recovery_s is not None]
        if len(served_s) < len(controls):
            raise CannotDecideError(
                f"{ANOTHER_LOAD}: a slot whose answer ended by itself served no other request "
                f"within {controls[-1].waited_s:.1f} s"
            )
        return _served_within(served_s)

    @property
    def _admission(self) -> Admission | None:
        """The watcher of a server that refuses; None for any other server."""
        if not self._streams.facts.refuses:
            return None
        return next((one for one in self._watchers if isinstance(one, Admission)), None)

    def _one_control(self) -> SlotTry:
        """A slot that is free already, since a request that had left came to its end meanwhile,
        is served, too."""
        slots, streams = self._full_slots, self._streams
        try:
            return slots.hand_over(alone=True)
        except CannotDecideError:
            if not streams.ghosts():
                raise
            return slots.time_probe(streams.start(streams.probe()))


def _served_within(served_s: Sequence[float]) -> Finding:
    worst_ms = round(1e3 * max(0.0, *served_s), 1)
    said = f"slots whose answers ended by themselves served another within {worst_ms:g} ms"
    return Finding(None, said, {"control_worst_ms": worst_ms})
