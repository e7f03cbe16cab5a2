"""A judgement as Markdown, for a step summary or a comment, and as JUnit, for a CI's tests."""

import re
from collections.abc import Sequence
from typing import Final
from xml.etree import ElementTree as ET

from harness.formatting import DASH
from harness.gate.judge import Check, Judgement, Verdict

SIGNS: Final = {Verdict.PASS: "✅", Verdict.FAIL: "❌", Verdict.CANNOT_DECIDE: "❔"}
LEFT_OUT: Final = "not compared, being times of another machine than the baseline's"
MOST_BYTES: Final = 1_000_000  # GitHub takes no step summary of more than 1 MiB


def as_markdown(judgement: Judgement) -> str:
    where = f"{_cell(judgement.workload or 'unknown workload')}, run `{_code(judgement.run)}`"
    if judgement.baseline:
        where += f", baseline `{_code(judgement.baseline)}`"
    lines = [f"### {SIGNS[judgement.verdict]} walkaway gate: {judgement.verdict}", "", where]
    if judgement.left_out:
        lines += ["", f"{LEFT_OUT}: {_cell(', '.join(judgement.left_out))}"]
    lines += ["", "| | limit | measured | why |", "|---|---|---|---|"]
    size = sum(len(line.encode()) + 1 for line in lines)
    rows = [_row(one) for one in gravest_first(judgement.checks)]
    for place, row in enumerate(rows):
        size += len(row.encode()) + 1
        if size > MOST_BYTES:
            rows[place:] = [f"| | {len(rows) - place} more | | |"]
            break
    return "\n".join([*lines, *rows]) + "\n"


def gravest_first(checks: Sequence[Check]) -> list[Check]:
    order = [Verdict.FAIL, Verdict.CANNOT_DECIDE, Verdict.PASS]
    return sorted(checks, key=lambda one: order.index(one.verdict))


def _row(one: Check) -> str:
    why = one.reason if not one.to_decide else f"{one.reason}; would decide: {one.to_decide}"
    return (
        f"| {SIGNS[one.verdict]} {one.verdict} | `{_code(one.name)}` | "
        f"{_cell(one.measured) or DASH} | {_cell(why)} |"
    )


def _cell(text: str) -> str:
    for mark, shown in (("\\", "\\\\"), ("|", "\\|"), ("<", "&lt;"), (">", "&gt;"), ("`", "'")):
        text = text.replace(mark, shown)
    return " ".join(text.split())


def _code(text: str) -> str:
    return " ".join(text.replace("`", "'").replace("|", "\\|").split())


_TAGS: Final = {Verdict.PASS: "system-out", Verdict.FAIL: "failure", Verdict.CANNOT_DECIDE: "error"}
_NO_XML: Final = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def as_junit(judgement: Judgement) -> bytes:
    verdicts = [one.verdict for one in judgement.checks]
    counts = {
        "tests": str(len(verdicts)),
        "failures": str(verdicts.count(Verdict.FAIL)),
        "errors": str(verdicts.count(Verdict.CANNOT_DECIDE)),
    }
    name = _clean(f"walkaway gate {judgement.workload or ''}".strip())
    suites = ET.Element("testsuites", counts)
    suite = ET.SubElement(suites, "testsuite", {"name": name, **counts})
    for one in judgement.checks:
        about = {"classname": name, "name": _clean(one.name), "time": "0"}
        tag, said = _TAGS[one.verdict], [part for part in (one.measured, one.reason) if part]
        message = {"message": _clean(": ".join(said))} if tag != "system-out" else {}
        said += [f"would decide: {one.to_decide}"] if one.to_decide else []
        result = ET.SubElement(ET.SubElement(suite, "testcase", about), tag, message)
        result.text = _clean("\n".join(said))
    ET.indent(suites)
    content: bytes = ET.tostring(suites, encoding="utf-8", xml_declaration=True)
    return content + b"\n"


def _clean(text: str) -> str:
    return _NO_XML.sub("?", text)
