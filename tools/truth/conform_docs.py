"""docs/conform/cases.md and faults.md, made from declarations: `make conform-docs`."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Final

from harness.conform.case import Case
from harness.conform.config import all_cases
from harness.conform.gateway.cases import gateway_cases
from tools.truth.conform_cases import HABITS, ODD, ROWS
from tools.truth.conform_gateways import ROWS as GATEWAYS

_EACH: Final = "/DIALECT"  # of a gateway's cases: chat, completions, responses, messages
FOLDER: Final = Path(__file__).parents[2] / "docs" / "conform"
METHODS: Final = {
    "P": "probe behind full slots",
    "O": "occupancy",
    "K": "capacity",
    "B": "bystander",
    "R": "repeat",
    "W": "wire",
    "C": "counters",
    "U": "the upstream's log",
    "pid": "memory and handles of the server's process",
}
NEEDS: Final = {
    "pid": "`--pid N`, the server's process on this machine",
    "direct": "`--direct URL`, the server behind the hop",
    "drop_packets": "the right to drop packets",
    "upstream": "`--upstream PORT`, with the gateway before it at `--target`",
    "usage": "`--usage`",
    "gauges": "`--metrics-url`",
    "adapter": "`--adapter NAME`, a LoRA adapter that may be unloaded",
    "resume": '`disconnect = "resume"` and a section `[resume]` in the target\'s file',
    "deadline": "`deadline_key` in the target's file",
    "metrics": "a metrics page that the target's file describes",
    "cancel_path": "a cancel endpoint in the target's file",
    "http": "a server that speaks HTTP",
}
HEAD: Final = """\
# The cases of `walkaway conform`

Made from the cases' own declarations by `make conform-docs`. [conform.md](../conform.md) explains
levels, methods and verdicts. Each case is tried with faults of the bundled engine
([which turns which red](faults.md)).

"""


FAULTS: Final = """\
# Which fault turns which case red

Each fault of the bundled engine ([faults.md](../faults.md)) must turn these cases of
`walkaway conform` red, and leave these green: simulated runner, steps of 10 ms, 8 slots.
`python -m tools.truth.conform_cases` measures the table; with `--times 3` it demands equal verdicts
three times. `make conform-docs` writes this page.

| fault | red | stays green |
|---|---|---|
"""
SCRIPTED: Final = """
Scripted servers (tools/truth/dialects.py, tools/truth/services.py) speak what the engine does not,
and misbehave on demand (tests/e2e/test_conform_doors.py, tests/e2e/test_conform_services.py):

| setting | red | kind |
|---|---|---|
"""


def anchor(case_id: str) -> str:
    return case_id.replace("/", "-")


def pages() -> dict[str, str]:
    return {"cases.md": case_page(), "faults.md": fault_page()}


def case_page() -> str:
    cases = [*all_cases(), *of_gateways()]
    index = "".join(
        f"- {', '.join(f'[`{one.id}`](#{anchor(one.id)})' for one in group)}\n"
        for _, group in groupby(cases, lambda one: one.group)
    )
    return HEAD + index + "".join(map(section, cases))


def of_gateways() -> list[Case]:
    """Each once, for all dialects."""
    cases = [one.case for one in gateway_cases().values()]
    names = dict.fromkeys(case.id.rpartition("/")[0] for case in cases)
    first = {name: next(case for case in cases if case.id.startswith(f"{name}/")) for name in names}
    return [case._replace(id=f"{name}{_EACH}") for name, case in first.items()]


def fault_page() -> str:
    rows = (f"| `{row.fault}` | {linked(row.red)} | {linked(row.green)} |\n" for row in ROWS)
    odd = (f"| `{one}` | {linked([one.case])} | {one.kind} |\n" for one in (*ODD, *HABITS))
    return "".join([FAULTS, *rows, SCRIPTED, *odd])


def linked(ids: Sequence[str]) -> str:
    return ", ".join(f"[`{one}`](cases.md#{anchor(one)})" for one in ids) or "nothing"


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
    yield "judged by", ", ".join(f"{one} ({METHODS[one]})" for one in case.methods.split())
    if case.needs:
        yield "needs", "; ".join(NEEDS[need] for need in sorted(case.needs))
    if case.caught:
        yield "would have caught", " ".join(f"[{short(url)}]({url})" for url in case.caught)
    red = ", ".join(f"`{row.fault}`" for row in ROWS if case.id in row.red)
    odd = ", ".join(f"`{one}`" for one in (*ODD, *HABITS) if one.case == case.id)
    on_script = f"on the scripted server: {odd}" if odd else ""
    name = case.id.removesuffix(_EACH)
    gateways = ", ".join(f"`{row.name}`" for row in GATEWAYS if name in row.reds)
    on_gateway = f"of the scripted gateway: {gateways}" if gateways else ""
    reds = "; ".join(filter(None, (red, on_script, on_gateway)))
    yield "goes red under", reds or "no fault of the bundled engine"


def sentence(text: str) -> str:
    text = text.replace("|", "\\|")
    return text[:1].upper() + text[1:].rstrip(".") + "."


def short(url: str) -> str:
    return url.removeprefix("https://github.com/").replace("/issues/", "#").replace("/pull/", "#")


if __name__ == "__main__":
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
