"""Case after case: a load process gets the cases that are left, and its reports become results.

Where that process crashes or a case takes too long, no verdict is about the server, and a new
process takes the rest. Each result is on disk before the next case begins.
"""

import math
import shlex
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import msgspec

from harness.client.wire_log import masked
from harness.conform.case import Case, Selection
from harness.conform.config import ConformConfig
from harness.conform.messages import SuiteEvent, SuiteRequest
from harness.conform.pacing import SuiteStanding, time_left, typical_times
from harness.conform.sentence import sentence
from harness.conform.verdict import (
    Expectation,
    exit_code,
    hold_against,
    is_judged,
    is_unexpected_failure,
    settle_case,
)
from harness.errors import InterruptedRunError, TargetError
from harness.experiments.outcome import CannotDecideError, HarnessError, RefusedError
from harness.run.process import Child, Interruption, python_module
from harness.store.conform_result import CaseResult, ConformResult, Verdict
from harness.store.run_folder import RunFolder

_BEGIN_S: Final = 180.0  # until the load process knows the server
_MOST_RUNS: Final = 4  # of a case: in the slots that it has now, the control, and a second one
_REST_S: Final = 120.0  # after a run of a case, until all is at rest
_GATEWAY_S: Final = 0.6  # of a gateway's case
_POLL_S: Final = 0.05  # until an interruption is seen
_END_S: Final = 10.0  # of a load process that reports no more


class Show(Protocol):
    """Learns of each case while the run lasts. A case is decided a second time if the server dies
    of it later."""

    def begin(self, result: ConformResult, cases: Sequence[Case]) -> None: ...
    def started(self, case: Case, place: SuiteStanding) -> None: ...
    def decided(self, result: CaseResult) -> None: ...


@dataclass(slots=True, kw_only=True)
class Suite:
    """`until_s`: when the time is up, by `clock_s`. `_rest`: the cases that are still to be
    decided, in order. `_lost`: why no more cases can be decided; `_cut`: why no more are to be.
    `_so_far`: what is known of the case that now runs."""

    config: ConformConfig
    secrets: Sequence[str]
    order: SuiteRequest
    selection: Selection
    result: ConformResult
    folder: RunFolder
    expected: list[Expectation]
    show: Show
    interruption: Interruption
    command: Callable[[], list[str]] = lambda: python_module("harness.conform")
    clock_s: Callable[[], float] = time.monotonic
    until_s: float = math.inf
    _rest: deque[Case] = field(default_factory=deque)
    _lost: str | None = None
    _cut: str | None = None
    _so_far: CaseResult | None = None
    _has_begun: bool = False

    def run(self) -> TargetError | InterruptedRunError | None:
        self._rest.extend(self.selection.cases)
        self.show.begin(self.result, self.selection.cases)
        self._decide_without_load()
        while self._rest and not self._is_over():
            self._run_child()
        if self.interruption.requested and self._so_far is not None:
            self._add(self._so_far)
        if self._lost is not None and not self._has_begun:
            return TargetError(self._lost)
        for case in list(self._rest):
            if self._lost is not None:
                self._add(settle_case(case, CannotDecideError(self._lost)))
            else:
                self.result.not_run[case.id] = str(self._cut)
        return self._interrupted() if self.interruption.requested else None

    def _interrupted(self) -> InterruptedRunError:
        if not self.result.cases:
            return InterruptedRunError("interrupted before a case was decided")
        return InterruptedRunError(f"interrupted; what was decided is in {self.folder.path}")

    def finish(self) -> ConformResult:
        result = self.result
        places = {case.id: place for place, case in enumerate(self.selection.cases)}
        result.cases.sort(key=lambda one: places.get(one.id, len(places)))
        result.sentence = sentence(result.cases, result.not_run, strict=result.strict)
        self._write()
        return result

    def _is_over(self) -> bool:
        if self._cut is None and self.interruption.requested:
            self._cut = "the run was interrupted"
        if self._cut is None and self.clock_s() > self.until_s:
            self._cut = f"the time was up (--max-seconds {self.config.max_seconds:g})"
        return self._lost is not None or self._cut is not None

    def _decide_without_load(self) -> None:
        for case in list(self._rest):
            if (why := self.selection.refused.get(case.id)) is not None:
                self._add(settle_case(case, RefusedError(why)))
            elif (why := self.selection.missing.get(case.id)) is not None:
                self._add(settle_case(case, CannotDecideError(why)))

    def _run_child(self) -> None:
        log = self.folder.log("conform")
        order = msgspec.structs.replace(self.order, cases=[case.id for case in self._rest])
        with Child("load process", self.command(), log, quit_s=1.0, reports=True) as child:
            child.say(msgspec.json.encode(order))
            self._follow(child)
        said = log.read_text(errors="replace")
        log.write_text(masked(said, self.secrets))

    def _follow(self, child: Child) -> None:
        current: Case | None = None
        until_s = self.clock_s() + _BEGIN_S
        while self._rest or current is not None:
            reports = child.read_reports(_POLL_S)
            for line in reports or ():
                current = self._take(msgspec.json.decode(line, type=SuiteEvent))
                until_s = self.clock_s() + (_REST_S if current is None else self._limit_s(current))
            if self._is_over():
                return
            has_ended = reports is None
            if has_ended or self.clock_s() > until_s:
                self._give_up(current, child, child.wait(_END_S) if has_ended else None)
                return

    def _limit_s(self, case: Case) -> float:
        """The load process ends a longer run itself."""
        longest_s = case.longest_s(self.order.settle_s, self.result.ttft_s or 0.0)
        return _MOST_RUNS * (longest_s + _REST_S)

    def _take(self, event: SuiteEvent) -> Case | None:
        """Returns the case that now runs, if one does."""
        match event.event:
            case "facts":
                for name, value in event.facts.items():
                    if hasattr(self.result, name):
                        setattr(self.result, name, value)
                self.order.slots = self.result.slots or self.order.slots
                self.order.settle_s = event.facts.get("settle_s", self.order.settle_s)
            case "started":
                self._has_begun, self._so_far = True, None
                case = self._case(event.id)
                self.show.started(case, self._place())
                return case
            case "case":
                assert event.case is not None
                self._so_far = None if event.case.aftermath or event.case.dialect else event.case
                self.order.left = max(self.order.left, event.case.left_in_all)
                self._add(event.case)
                is_over = event.case.aftermath is not None or event.case.dialect is not None
                return None if is_over else self._case(event.id)
            case "so_far":
                self._so_far = event.case
                return self._case(event.id)
            case "unusable":
                self._has_begun, self._lost = True, event.why
            case "gone":
                self._lost = event.why
        return None

    def _case(self, name: str) -> Case:
        return next(case for case in self.selection.cases if case.id == name)

    def _place(self) -> SuiteStanding:
        total = len(self.selection.cases)
        took = {one.id: one.took_s for one in self.result.cases if one.took_s}
        typical = typical_times(quick=self.order.quick)
        if self.config.upstream is not None:  # they run side by side
            typical = dict.fromkeys((case.id for case in self.selection.cases), _GATEWAY_S)
        elif self.config.gentle:
            typical = {case.id: case.limit_s for case in self._rest}
        left_s = time_left([case.id for case in self._rest], took, typical)
        return SuiteStanding(total - len(self._rest) + 1, total, left_s)

    def _give_up(self, current: Case | None, child: Child, code: int | None) -> None:
        if self._lost is not None or (code == 0 and not self._rest):
            return
        last = (
            masked(child.lines()[-1].strip(), self.secrets) if child.lines() else "without a word"
        )
        how = "took too long" if code is None else f"ended with code {code}: {last}"
        if current is not None and self._so_far is not None:
            self._so_far.reason += f"; it ended early: the check's own process {how}"
            self._add(self._so_far)
        elif current is not None:
            self._add(settle_case(current, HarnessError(f"the check's own process {how}")))
        elif self._rest:
            self._lost = f"the load process {how}"

    def _add(self, result: CaseResult) -> None:
        """A result of the same case is replaced: what it left behind is known, or the server died
        of it later."""
        self._rest = deque(case for case in self._rest if case.id != result.id)
        before = [one for one in self.result.cases if one.id != result.id]
        result.repeat = self._repeat(result, [one.id for one in before])
        hold_against([result], self.expected, self.result.target)
        self.result.cases = [*before, result]
        if self.config.fail_fast and is_unexpected_failure(result, strict=self.result.strict):
            self._cut = f"{result.id} had failed (--fail-fast)"
        self._write()
        self.show.decided(result)

    def _write(self) -> None:
        result = self.result
        is_cut = self._cut is not None and self._lost is None
        missing = any(is_judged(case, strict=result.strict) for case in self._rest)
        result.exit_code = exit_code(result.cases, strict=result.strict, is_cut=is_cut and missing)
        result.write(self.folder.path)

    def _repeat(self, result: CaseResult, before: Sequence[str]) -> str:
        """The command that shows the result again, with the flags of `ConformConfig.flags`. If the
        server died, the sum of all leaves may be the cause: then the command has the cases before
        this one, too. "" where no command would show it."""
        if result.verdict is Verdict.HARNESS or self._lost is not None:
            return ""
        ids = [*before, result.id] if result.ended_server else [result.id]
        flags = self.config.flags(model=self.result.target.model, slots=self.order.slots)
        return shlex.join(["walkaway", "conform", *ids, *flags])
