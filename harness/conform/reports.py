"""A conformance run for others: JUnit for a CI's tests, Markdown for a step summary, a badge, the
page."""

import json
from pathlib import Path
from typing import Final

from harness.conform.verdict import UNDECIDED, is_judged, is_unexpected_failure
from harness.formatting import quantity
from harness.run.process import Child, python_module
from harness.store.conform_result import (
    NOT_MEANT,
    CaseResult,
    ConformResult,
    Verdict,
    counts_in_words,
)
from harness.text.ci import JunitTest, Tag, junit, markdown_cell, markdown_code

PAGE: Final = "index.html"
MARKDOWN_MARK: Final = b"### walkaway conform: "  # in the head of each such file
BADGE_MARK: Final = b'"label": "walkaway conform'  # likewise
_BADGE_COLORS: Final = {0: "brightgreen", 3: "red", 4: "yellow"}  # by exit code
_PAGE_S: Final = 60.0
_SIGNS: Final = {  # the gravest first
    Verdict.FAIL: "❌",
    Verdict.CANNOT_DECIDE: "❔",
    Verdict.HARNESS: "🔧",
    Verdict.NOT_SUPPORTED: "🚫",
    Verdict.INFO: "📋",
    Verdict.PASS: "✅",
}


def as_markdown(result: ConformResult) -> str:
    target = result.target
    lines = [
        f"### walkaway conform: {counts_in_words(result.cases) or 'nothing was decided'}",
        "",
        f"{markdown_cell(target.engine)} {markdown_cell(target.version or '')}, "
        f"`{markdown_code(target.model)}`, {result.slots or 'unknown'} slots, step "
        f"{quantity(result.step_s, 's')}",
        "",
        "| | case | level | why |",
        "|---|---|---|---|",
        *(_row(one) for one in sorted(result.cases, key=lambda one: [*_SIGNS].index(one.verdict))),
    ]
    if result.not_run:
        left_out = (f"`{name}` ({why})" for name, why in result.not_run.items())
        lines += ["", f"Not run: {', '.join(left_out)}."]
    if result.sentence:
        lines += ["", markdown_cell(result.sentence)]
    return "\n".join([*lines, "", NOT_MEANT]) + "\n"


def _row(one: CaseResult) -> str:
    verdict = one.verdict.words if one.kind is None else f"{one.verdict.words}: {one.kind}"
    expected = {"listed": " (listed)", "stale": " (stale: remove the line)", None: ""}
    return (
        f"| {_SIGNS[one.verdict]} {verdict}{expected[one.expected]} | `{markdown_code(one.id)}` | "
        f"{one.level} | {markdown_cell(one.reason)} |"
    )


def as_junit(result: ConformResult) -> bytes:
    target = result.target
    tests = [_test(one, strict=result.strict) for one in result.cases]
    tests += [
        JunitTest(name, "skipped", f"not run: {why}", "") for name, why in result.not_run.items()
    ]
    return junit(f"walkaway conform {target.engine} {target.version or ''}".strip(), tests)


def _test(one: CaseResult, *, strict: bool) -> JunitTest:
    evidence = [f"{name}: {value}" for name, value in one.evidence.items()]
    said = "\n".join([one.requirement, one.reason, *evidence, f"repeat: {one.repeat}"])
    return JunitTest(one.id, _tag(one, strict=strict), _message(one), said, one.took_s)


def _message(one: CaseResult) -> str:
    if one.expected == "stale":
        return f"{one.verdict.words}, but listed as an expected failure: remove the line"
    kind = "" if one.kind is None else f"{one.kind}: "
    return f"{one.verdict.words}: {kind}{one.reason}"


def _tag(one: CaseResult, *, strict: bool) -> Tag:
    if one.expected == "stale" or is_unexpected_failure(one, strict=strict):
        return "failure"
    if one.verdict in UNDECIDED and is_judged(one, strict=strict):
        return "error"
    return "system-out" if one.verdict in (Verdict.PASS, Verdict.INFO) else "skipped"


def as_badge(result: ConformResult) -> bytes:
    """A badge for shields.io, which reads such a file from an address (its "endpoint")."""
    suite = f" {result.suite}" if result.suite else ""
    verdicts = [one.verdict for one in result.cases]
    passed, undecided = verdicts.count(Verdict.PASS), sum(one in UNDECIDED for one in verdicts)
    said = f"{passed} of {passed + verdicts.count(Verdict.FAIL)} pass"
    badge = {
        "schemaVersion": 1,
        "label": f"walkaway conform{suite}",
        "message": f"{said}, {undecided} undecided" if undecided else said,
        "color": _BADGE_COLORS.get(result.exit_code, "lightgrey"),
    }
    return json.dumps(badge, indent=2).encode() + b"\n"


def draw_page(folder: Path, kind: str = "conform") -> Path | None:
    """The page of the run, or of a search; None if it could not be drawn (its log says why)."""
    log = folder / "page.log"
    with Child("page", python_module("dashboards", kind, str(folder)), log, quit_s=0) as child:
        is_drawn = child.wait(_PAGE_S) == 0 and (folder / PAGE).is_file()
    if is_drawn:
        log.unlink()
    return folder / PAGE if is_drawn else None
