"""docs/conform/cases.md, made from the declarations of the cases: `make conform-docs`."""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Final

from harness.conform.case import Case
from harness.conform.suite import all_cases
from tests.truth.conform_cases import ROWS

PAGE: Final = Path(__file__).parents[2] / "docs" / "conform" / "cases.md"
METHODS: Final = {
    "P": "probe behind full slots",
    "O": "occupancy",
    "K": "capacity",
    "B": "bystander",
    "R": "repeat",
    "W": "wire",
    "C": "counters",
}
NEEDS: Final = {
    "pid": "`--pid N`, the server's process on this machine",
    "direct": "`--direct URL`, the server behind the hop",
    "drop_packets": "the right to drop packets",
    "metrics": "a metrics page that the target's file describes",
    "cancel_path": "a cancel endpoint in the target's file",
    "http": "a server that speaks HTTP",
}
HEAD: Final = """\
# The cases of `walkaway conform`

Made from the cases' own declarations by `make conform-docs`. [conform.md](../conform.md) explains
levels, methods and verdicts. Each case is tried with faults of the bundled engine
([faults.md](../faults.md)).

"""


def anchor(case_id: str) -> str:
    return case_id.replace("/", "-")


def page() -> str:
    cases = all_cases()
    index = "".join(
        f"- {', '.join(f'[`{one.id}`](#{anchor(one.id)})' for one in those)}\n"
        for _, those in groupby(cases, lambda one: one.group)
    )
    return HEAD + index + "".join(map(section, cases))


def section(case: Case) -> str:
    quick = ", also with `--quick`" if case.quick else ""
    rows = "".join(f"| {name} | {text} |\n" for name, text in rows_of(case))
    title = f'\n<a id="{anchor(case.id)}"></a>\n\n## `{case.id}`\n\n'
    return f"{title}**{case.level}**{quick}: {case.requirement}\n\n| | |\n|---|---|\n{rows}"


def rows_of(case: Case) -> Iterator[tuple[str, str]]:
    yield "on the wire", sentence(case.wire)
    yield "passes", sentence(case.passes)
    if case.why:
        yield "why", sentence(case.why)
    letters = [letter for letter in case.methods if letter in METHODS]
    yield "judged by", ", ".join(f"{letter} ({METHODS[letter]})" for letter in letters)
    if case.needs:
        yield "needs", "; ".join(NEEDS[need] for need in sorted(case.needs))
    if case.caught:
        yield "would have caught", " ".join(f"[{short(url)}]({url})" for url in case.caught)
    red = [f"`{row.fault}`" for row in ROWS if case.id in row.red]
    yield "goes red under", ", ".join(red) or "no fault of the bundled engine"


def sentence(text: str) -> str:
    text = text.replace("|", "\\|")
    return text[:1].upper() + text[1:].rstrip(".") + "."


def short(url: str) -> str:
    return url.removeprefix("https://github.com/").replace("/issues/", "#").replace("/pull/", "#")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
