"""What a terminal shows of a conformance run: a line a case, and at the end a sentence."""

from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.status import Status
from rich.text import Text

from harness.store.conform_result import Aftermath, Verdict, counts_in_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.conform.case import Case
    from harness.conform.pacing import SuiteStanding
    from harness.store.conform_result import CaseResult, ConformResult

SIGNS: Final = {
    Verdict.PASS: ("pass", "green"),
    Verdict.FAIL: ("FAIL", "bold red"),
    Verdict.NOT_SUPPORTED: ("not supported", "dim"),
    Verdict.CANNOT_DECIDE: ("cannot decide", "yellow"),
    Verdict.HARNESS: ("harness", "magenta"),
    Verdict.INFO: ("info", "cyan"),
}
_WIDTH: Final = 14
_CONTRACTS: Final = {
    "drain": "it declares `drain`: an answer whose client left may run on to its end",
    "resume": "it declares `resume`: an answer whose client left may run on, to be read later",
}


class Terminal:
    """A line a case as it is decided, with the reason for all that is not green. Cases that one
    reason leaves undecided get one line."""

    def __init__(self, console: Console, *, is_quiet: bool) -> None:
        self._console = console
        self._is_quiet = is_quiet
        self._status: Status | None = None
        self._total = self._width = 0
        self._decided: dict[str, tuple[Verdict, str]] = {}
        self._shown: str | None = None
        self._likewise = 0

    def begin(self, result: "ConformResult", cases: "Sequence[Case]") -> None:
        self._total = len(cases)
        self._width = max((len(one.id) for one in cases), default=0)
        target = result.target
        version = f" {target.version}" if target.version else ""
        self._print(Text(f"conform: {target.engine}{version} at {target.url}, {target.model}"))
        notes = [*result.notes, *filter(None, [_CONTRACTS.get(target.disconnect)])]
        for note in notes:
            self._print(Text(f"  {note}", style="dim"))
        self._show("measuring the idle server: its first token, its step, its slots")

    def started(self, case: "Case", place: "SuiteStanding") -> None:
        self._show(f"{place}: {case.id}: {case.requirement}")

    def decided(self, result: "CaseResult") -> None:
        self.close()
        if self._decided.get(result.id) == (result.verdict, result.reason):
            if result.aftermath not in (None, Aftermath.CLEAN):
                self._print(Text(f"  afterwards: {result.aftermath}", style="yellow"))
            return
        self._decided[result.id] = result.verdict, result.reason
        is_open = result.verdict is Verdict.CANNOT_DECIDE
        if is_open and result.reason == self._shown:
            self._likewise += 1
            return
        self._say_likewise()
        self._shown = result.reason if is_open else None
        self._print(self._line(result))

    def _line(self, result: "CaseResult") -> Text:
        sign, style = SIGNS[result.verdict]
        if result.expected == "listed" and result.verdict is Verdict.FAIL:
            sign, style = "expected fail", "yellow"
        digits = len(str(self._total))
        place = f"{[*self._decided].index(result.id) + 1:{digits}}/{self._total}  "
        line = Text.assemble(
            (place, "dim"),
            (f"{sign:{_WIDTH}}", style),
            f"{result.id:{self._width}}  ",
            result.reason,
        )
        if result.kind is not None:
            line.append(f" ({result.kind})")
        if result.expected == "stale":
            line.append("; it is listed as an expected failure: remove the line", style="bold red")
        return line

    def end(self, result: "ConformResult", where: Path) -> None:
        self._say_likewise()
        counts = list(filter(None, [counts_in_words(result.cases)]))
        reasons: dict[str, list[str]] = {}
        for name, why in result.not_run.items():
            reasons.setdefault(why, []).append(name)
        for why, names in reasons.items():
            self._print(Text(f"not run: {', '.join(names)}: {why}", style="dim"))
        counts += [f"{len(result.not_run)} not run"] if result.not_run else []
        self._print(Text(f"\n{', '.join(counts) or 'nothing was decided'}"))
        self._print(Text(f"result: {where}"))
        self._print(Text(result.sentence, style="bold"))

    def table(self, lines: list[str]) -> None:
        for line in lines:
            self._print(Text(line))

    def close(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _say_likewise(self) -> None:
        if self._likewise:
            cases = "case is" if self._likewise == 1 else "cases are"
            self._print(Text(f"  {self._likewise} more {cases} undecided for this reason"))
        self._likewise = 0

    def _show(self, text: str) -> None:
        self.close()
        if self._console.is_terminal and not self._is_quiet:
            self._status = self._console.status(text)
            self._status.start()

    def _print(self, text: Text) -> None:
        if not self._is_quiet:
            self._console.print(text, soft_wrap=True, highlight=False)
