"""A judgement as Markdown, for a step summary or a comment, and as JUnit, for a CI's tests."""

from collections.abc import Sequence
from typing import Final

from harness.formatting import DASH
from harness.gate.judge import Check, GateVerdict, Judgement
from harness.text.ci import JunitTest, Tag, junit, markdown_cell, markdown_code

SIGNS: Final = {GateVerdict.PASS: "✅", GateVerdict.FAIL: "❌", GateVerdict.CANNOT_DECIDE: "❔"}
LEFT_OUT: Final = "not compared, being times of another machine than the baseline's"
MARKDOWN_MARK: Final = b" walkaway gate: "  # in the head of each such file
MOST_BYTES: Final = 1_000_000  # GitHub takes no step summary of more than 1 MiB


def as_markdown(judgement: Judgement) -> str:
    workload = markdown_cell(judgement.question if judgement.workload else "unknown workload")
    where = f"{workload}, run `{markdown_code(judgement.run)}`"
    if judgement.baseline:
        where += f", baseline `{markdown_code(judgement.baseline)}`"
    lines = [f"### {SIGNS[judgement.verdict]} walkaway gate: {judgement.verdict}", "", where]
    if judgement.left_out:
        lines += ["", f"{LEFT_OUT}: {markdown_cell(', '.join(judgement.left_out))}"]
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
    order = [GateVerdict.FAIL, GateVerdict.CANNOT_DECIDE, GateVerdict.PASS]
    return sorted(checks, key=lambda one: order.index(one.verdict))


def _row(check: Check) -> str:
    decides = f"; would decide: {check.to_decide}" if check.to_decide else ""
    why = f"{check.reason}{decides}"
    return (
        f"| {SIGNS[check.verdict]} {check.verdict} | `{markdown_code(check.name)}` | "
        f"{markdown_cell(check.measured) or DASH} | {markdown_cell(why)} |"
    )


_TAGS: Final[dict[GateVerdict, Tag]] = {
    GateVerdict.PASS: "system-out",
    GateVerdict.FAIL: "failure",
    GateVerdict.CANNOT_DECIDE: "error",
}


def as_junit(judgement: Judgement) -> bytes:
    tests = []
    for one in judgement.checks:
        said = [part for part in (one.measured, one.reason) if part]
        message = ": ".join(said)
        said += [f"would decide: {one.to_decide}"] if one.to_decide else []
        tests.append(JunitTest(one.name, _TAGS[one.verdict], message, "\n".join(said)))
    return junit(
        f"walkaway gate {judgement.question}" if judgement.workload else "walkaway gate", tests
    )
