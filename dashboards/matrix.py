"""Conformance results side by side: a line a case, a narrow column a server as it was configured.

The dialects of a gateway share a line. The file explanations.toml next to the results may explain
red cells, each by a sentence and a link.
"""

import os
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from dashboards.conform_page import (
    MARKS,
    MEANINGS,
    anchor,
    counts,
    evidence,
    group_of,
    link,
    row,
    server_name,
)
from dashboards.page import document, save
from harness.errors import ConfigError, in_words
from harness.formatting import quantity
from harness.store.conform_result import (
    NOT_MEANT,
    CaseResult,
    ConformResult,
    Failure,
    read_conform,
)

# The gravest verdict of several dialects stands for all.
GRAVEST: Final = ("fail", "harness", "cannot decide", "pass", "info", "not supported")
KINDS: Final = (Failure.HARM, Failure.NEVER, Failure.LATE, None)
OPEN: Final = ("harness", "cannot decide")
EXPLANATIONS: Final = "explanations.toml"
PAGE: Final = "index.html"


class Explanation(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`case`: a gateway's case without a dialect stands for all dialects. `configuration`,
    `version`: None stands for any. `link`: the engine's own issue, if there is one."""

    engine: str
    case: str
    sentence: str
    link: str = ""
    version: str | None = None
    configuration: str | None = None

    def is_about(self, result: ConformResult, case_id: str) -> bool:
        target = result.target
        return (
            self.engine == target.engine
            and self.case in (case_id, case_id.rpartition("/")[0])
            and self.version in (None, target.version)
            and self.configuration in (None, target.configuration)
        )


class _Explanations(msgspec.Struct, forbid_unknown_fields=True):
    explanation: list[Explanation] = []


def write_matrix(files: Sequence[Path], output: Path, explained: Path | None) -> None:
    results = [read_conform(file) for file in files]
    explanations = _read_explanations(files, explained)
    columns = [
        _column(file, result, number, output, explanations)
        for number, (file, result) in enumerate(zip(files, results, strict=True))
    ]
    groups = _groups(results, columns)
    html = document(
        "matrix.html.j2",
        {},
        scripts=("matrix.js",),
        columns=columns,
        groups=groups,
        sentence=_sentence(columns, groups),
        not_red=[
            one
            for one in explanations
            if not any(red["of"] is one for column in columns for red in column["red"])
        ],
        marks=MARKS,
        meanings=MEANINGS,
        not_meant=NOT_MEANT,
    )
    save(html, output)


def _read_explanations(files: Sequence[Path], explained: Path | None) -> list[Explanation]:
    if explained is None:
        near = (folder / EXPLANATIONS for file in files for folder in file.resolve().parents[:2])
        explained = next((file for file in near if file.is_file()), None)
    if explained is None:
        return []
    try:
        found = tomllib.loads(explained.read_text(encoding="utf-8"))
        return msgspec.convert(found, _Explanations).explanation
    except OSError as error:
        raise ConfigError(
            f"--explanations {explained}: cannot be read: {in_words(error)}; it is a TOML file "
            "with an [[explanation]] for each red cell"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{explained}: {error}") from error


def _groups(
    results: Sequence[ConformResult], columns: Sequence[dict[str, Any]]
) -> list[tuple[str, list[CaseResult]]]:
    """Each case once, as the result with the most cases orders them, but what fails on most servers
    first: groups, and cases in each."""
    found: dict[str, CaseResult] = {}
    for result in sorted(results, key=lambda one: len(one.cases), reverse=True):
        for case in result.cases:
            found.setdefault(_name(case), case)

    def fails(name: str) -> int:
        return sum(column["cells"].get(name, {}).get("word") == "fail" for column in columns)

    groups: dict[str, list[str]] = {}
    for name in found:
        groups.setdefault(group_of(name), []).append(name)
    worst_first = sorted(groups.items(), key=lambda one: -sum(map(fails, one[1])))
    return [
        (group, [found[name] for name in sorted(names, key=lambda one: -fails(one))])
        for group, names in worst_first
    ]


def _sentence(
    columns: Sequence[dict[str, Any]], groups: Sequence[tuple[str, Sequence[CaseResult]]]
) -> str:
    good = sum(not column["red"] for column in columns)
    fails = Counter(red["name"] for column in columns for red in column["red"])
    order = [case for _, cases in groups for case in cases if _name(case) in fails]
    most = max(order, key=lambda case: fails[_name(case)], default=None)
    sentence = f"{quantity(len(columns), 'servers')}, {good or 'none'} of them without a red case."
    if most is None:
        return sentence
    name = _name(most)
    return (
        f"{sentence} What fails most often is {name}, on {fails[name]}. It demands: "
        f"{most.requirement}"
    )


def _name(one: CaseResult) -> str:
    """A gateway's case without its dialect: the dialects share a line."""
    return one.id.rpartition("/")[0] if one.dialect else one.id


def _column(
    file: Path,
    result: ConformResult,
    number: int,
    output: Path,
    explanations: Sequence[Explanation],
) -> dict[str, Any]:
    page = file.with_name(PAGE) if file.with_name(PAGE).is_file() else file
    where = Path(os.path.relpath(page.resolve(), output.resolve().parent)).as_posix()
    described: dict[str, list[dict[str, Any]]] = {}
    for one in result.cases:
        described.setdefault(_name(one), []).append(
            {
                **row(one),
                "dialect": one.dialect,
                "where": where if page is file else f"{where}#{anchor(one.id)}",
                "figures": "; ".join(evidence(one.evidence)),
                **_explained(one, result, explanations),
            }
        )
    cells = {
        name: _cell(name, f"column{number}-{anchor(name)}", own) for name, own in described.items()
    }
    is_gateway = any(one.dialect for one in result.cases)
    not_run = {
        id_.rpartition("/")[0] if is_gateway else id_: {"word": "not run"} for id_ in result.not_run
    }
    server, configuration = server_name(result), result.target.configuration or ""
    is_whole = configuration.startswith((result.target.engine, server))
    return {
        "heading": configuration if is_whole else f"{server} {configuration}".rstrip(),
        "server": server,
        "configuration": "" if configuration == server else configuration,
        "about": list(_about(result)),
        "counts": [(word, count) for word, count in counts(result) if count],
        "page": where,
        "command": result.command,
        "cells": not_run | cells,
        "red": [red for cell in cells.values() for red in _reds(cell)],
        "open": [cell for cell in cells.values() if cell["word"] in OPEN],
    }


def _cell(name: str, place: str, described: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One case on one server: the gravest of its dialects, and how many of them that is."""
    gravest = min(described, key=_gravity)
    words, word = [one["word"] for one in described], gravest["word"]
    applicable = [one for one in words if one not in ("not supported", "info")]
    is_part = word in ("fail", *OPEN) and words.count(word) < len(applicable)
    lines: dict[tuple[str, str], dict[str, Any]] = {}
    for one in described:
        line = lines.setdefault((one["word"], one["sentence"]), {**one, "dialects": []})
        line["dialects"] += [one["dialect"]] if len(described) > 1 else []
    return {
        **gravest,
        "name": name,
        "anchor": place,
        "part": f"{words.count(word)} of {len(applicable)}" if is_part else "",
        "lines": [*lines.values()],
        "described": described,
    }


def _gravity(one: dict[str, Any]) -> tuple[int, int]:
    """0: the gravest verdict, and the gravest kind of failure."""
    return GRAVEST.index(one["word"]), KINDS.index(one["kind"])


def _reds(cell: dict[str, Any]) -> list[dict[str, Any]]:
    """A line a cause: the dialects in which a case failed alike share it."""
    found: dict[object, dict[str, Any]] = {}
    for one in cell["described"]:
        if one["word"] != "fail":
            continue
        cause = one["kind"] if one["of"] is None else id(one["of"])
        line = found.setdefault(
            (one["kind"], cause, one["expected"]),
            {
                **one,
                "name": cell["name"],
                "anchor": None if found else cell["anchor"],
                "proofs": [],
            },
        )
        line["proofs"].append((one["dialect"] or "Evidence", one["where"]))
    return [*found.values()]


def _about(result: ConformResult) -> Iterator[str]:
    target = result.target
    step = quantity(result.step_s, "s")
    is_gateway = any(one.dialect for one in result.cases)
    slots = "unknown" if result.slots is None else str(result.slots)
    yield f"{target.model}, {'' if is_gateway else f'{slots} slots, '}step {step}"
    yield f"{'quick, ' if result.quick else ''}{result.started_at[:10]}, {result.machine.cpu}"


def _explained(
    one: CaseResult, result: ConformResult, explanations: Sequence[Explanation]
) -> dict[str, Any]:
    of = next((found for found in explanations if found.is_about(result, one.id)), None)
    return {
        "of": of,
        "sentence": one.reason if of is None else of.sentence,
        "issue": link(of.link) if of is not None and of.link else None,
    }
