"""A conformance result as one page: what is wrong and how to see it, then every case."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from dashboards.figures.wire import SHOWN_TRIES, tries
from dashboards.page import document, save
from harness.formatting import DASH, number, quantity
from harness.store.conform_result import (
    CONFORM_FILE,
    NOT_MEANT,
    Aftermath,
    CaseResult,
    ConformResult,
    Verdict,
    counted,
    read_conform,
    read_wire_log,
)

WORDS: Final = {
    Verdict.PASS: "pass",
    Verdict.FAIL: "fail",
    Verdict.CANNOT_DECIDE: "cannot decide",
    Verdict.HARNESS: "harness",
    Verdict.NOT_SUPPORTED: "not supported",
    Verdict.INFO: "info",
}
MEANINGS: Final = {
    "pass": "the server did what the case demands",
    "fail": "late: it did so after too many steps; never: not within the settle time "
    "(a gateway: not before the answer's end); harm: something else broke",
    "cannot decide": "something got in the way: this is no pass",
    "harness": "walkaway's own client was late, broke the protocol or crashed: this is no pass",
    "not supported": "the server does not offer what the case is about",
    "info": "for information: not judged",
    "not run": "the case needs something that was not given",
}
MARKS: Final = dict(
    zip(MEANINGS, ("✓", "✗", "?", "!", DASH, "", "·"), strict=True)
)  # next to the word
ANSWERS: Final = {  # by exit code
    0: ("good", "no unexpected failure"),
    3: ("bad", "failed"),
    4: ("unknown", "could not decide"),
    5: ("bad", "the server failed before the first case"),
    130: ("unknown", "interrupted"),
}
CONTRACTS: Final = {  # what the target's file declares, to which the server is held
    "cancel": "cancel: the request is stopped",
    "drain": "drain: the answer may run on to its end, and the slot is then free",
    "resume": "resume: the answer may run on, to be read later, and the slot is then free",
}
GENERIC: Final = "openai"  # the kind of a server that gives no name
_UNITS: Final = {"steps": "steps", "s": "s", "ms": "ms", "tokens": "tokens", "ratio": "times"}
_BOUND: Final = re.compile(r"(.+)_(?:low|lower|high|upper)95")
SAYS_NOTHING: Final = ("left_by_reset", 0.0)
_GITHUB: Final = re.compile(r"https://github\.com/([\w.-]+/[\w.-]+)/(?:issues|pull)/(\d+)")


def write_conform(folder: Path, output: Path) -> None:
    result = read_conform(folder / CONFORM_FILE)
    mark, answer = ANSWERS.get(result.exit_code, ("unknown", f"exit code {result.exit_code}"))
    explained = [_described(folder, one) for one in result.cases if one.verdict is not Verdict.PASS]
    html = document(
        "conform.html.j2",
        {},
        scripts=("conform.js",),
        server=server_name(result),
        result=result,
        date=result.started_at[:16].replace("T", " "),
        mark=mark,
        answer=answer,
        counts=counts(result),
        facts=facts(result),
        fails=[one for one in explained if one["word"] == "fail"],
        headlines=headlines([one for one in result.cases if one.verdict is Verdict.FAIL]),
        others=[one for one in explained if one["word"] != "fail"],
        groups=[
            (group, [row(one) for one in result.cases if group_of(one.id) == group])
            for group in dict.fromkeys(group_of(one.id) for one in result.cases)
        ],
        marks=MARKS,
        meanings=MEANINGS,
        not_meant=NOT_MEANT,
        undecided=[one for one in explained if one["word"] in ("cannot decide", "harness")],
    )
    save(html, output)


def server_name(result: ConformResult) -> str:
    target = result.target
    if target.engine == GENERIC and not target.version:
        return target.configuration or f"the server at {urlsplit(target.url).netloc}"
    return " ".join(filter(None, (target.engine, target.version)))


def anchor(case_id: str) -> str:
    return f"case-{re.sub(r'[^a-z0-9]+', '-', case_id.lower())}"


def counts(result: ConformResult) -> list[tuple[str, int]]:
    found = counted(result.cases)
    every = [(word, found.get(verdict, 0)) for verdict, word in WORDS.items()]
    return [*every, ("not run", len(result.not_run))]


def facts(result: ConformResult) -> list[tuple[str, str]]:
    target, machine = result.target, result.machine
    suite = f"{result.suite}: " if result.suite else ""
    flags = (", quick" if result.quick else "") + (", strict" if result.strict else "")
    shown = {
        "server": server_name(result),
        "configuration": target.configuration,
        "model": target.model,
        "at": target.url,
        "slots": _slots(result),
        "step": quantity(result.step_s, "s"),
        "first token when idle": quantity(result.ttft_s, "s"),
        "client lag": quantity(result.lag_s, "s"),
        "machine": f"{machine.cpu}, {quantity(machine.cores, 'cores')}, Python {machine.python}",
        "a disconnect means": CONTRACTS[target.disconnect],
        "suite": f"{suite}{quantity(len(result.cases), 'cases')}{flags}, seed {result.seed}",
        "by": f"walkaway {result.walkaway}",
        "started": result.started_at,
    }
    return [(name, text) for name, text in shown.items() if text]


def _slots(result: ConformResult) -> str:
    if any(one.dialect for one in result.cases):
        return ""  # the upstream's slots, which a gateway's clients never fill
    return "not known" if result.slots is None else str(result.slots)


def evidence(figures: Mapping[str, float | str | None]) -> list[str]:
    """ "median 0.7 steps": the unit ends the name. 95 % bounds follow their figure, or stand in
    place of it. Figures that were not measured are left out."""
    bounds: dict[str, list[str]] = {}
    for name, value in figures.items():
        if (found := _BOUND.fullmatch(name)) and isinstance(value, int | float):
            bounds.setdefault(found[1], []).append(number(value))
    said = []
    for name, value in figures.items():
        if value is not None and (name, value) != SAYS_NOTHING and not _BOUND.fullmatch(name):
            of = f" ({' to '.join(bounds.pop(name))}, 95 %)" if name in bounds else ""
            said.append(_figure(name, value) + of)
    rest = (f"{_spoken(name)} {' to '.join(ends)} (95 %)" for name, ends in bounds.items())
    return [*said, *rest]


def _figure(name: str, value: float | str) -> str:
    stem, _, unit = name.rpartition("_")
    if isinstance(value, str) or unit not in _UNITS or not stem:
        return f"{_spoken(name)} {value if isinstance(value, str) else number(value)}"
    text = quantity(value, "s") if unit == "s" else f"{number(value)} {_UNITS[unit]}"
    return f"{_spoken(stem)} {text}"


def _spoken(name: str) -> str:
    return name if "{" in name else name.replace("_", " ")  # a counter with labels keeps its name


def link(text: str) -> dict[str, str | None]:
    """Only an address of the web becomes a link."""
    found = _GITHUB.match(text)
    words = f"{found[1]}#{found[2]}" if found else text.removeprefix("https://")
    return {"text": words, "to": text if text.startswith("https://") else None}


def group_of(case_id: str) -> str:
    return case_id.partition("/")[0]


def row(one: CaseResult) -> dict[str, Any]:
    return {
        "id": one.id,
        "anchor": None if one.verdict is Verdict.PASS else anchor(one.id),
        "level": one.level,
        "word": WORDS[one.verdict],
        "kind": one.kind,
        "contract": contract(one),
        "expected": one.expected,
        "aftermath": one.aftermath,
        "is_unclean": one.aftermath not in (None, Aftermath.CLEAN),
        "reason": one.reason,
        "evidence": evidence(one.evidence),
    }


def headlines(failed: Sequence[CaseResult]) -> list[dict[str, Any]]:
    """A line for each failure; for a gateway, one for all dialects in which a case failed alike."""
    found: dict[object, dict[str, Any]] = {}
    for one in failed:
        is_gateway = one.dialect is not None
        name = one.id.rpartition("/")[0] if is_gateway else one.id
        line = found.setdefault(
            (name, one.kind, one.expected), {**row(one), "id": name, "dialects": []}
        )
        if is_gateway:
            line["dialects"].append((one.dialect, anchor(one.id)))
    return [*found.values()]


def contract(one: CaseResult) -> str | None:
    """What a leave means to a gateway, with the cap of a drain."""
    if one.contract is None or one.cap_s is None:
        return one.contract
    return f"{one.contract}, {quantity(one.cap_s, 's')}"


def _described(folder: Path, one: CaseResult) -> dict[str, Any]:
    found = tries(_events(folder, one.wire_log))
    return {
        **row(one),
        "case": one,
        "caught": [link(text) for text in one.caught],
        "tries": found[:SHOWN_TRIES],
        "num_tries": len(found),
    }


def _events(folder: Path, wire_log: str | None) -> Sequence[Any]:
    """A result may come from elsewhere: only a file in its folder is read."""
    if wire_log is None or not (folder / wire_log).resolve().is_relative_to(folder.resolve()):
        return ()
    return read_wire_log(folder / wire_log)
