"""Conformance results side by side: a row for each case, a column for each configured server.

The file explanations.toml next to the results may explain red cells, each by a sentence and a link.
"""

import os
import tomllib
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
from harness.store.conform_result import NOT_MEANT, CaseResult, ConformResult, read_conform

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
    cases = _rows(results)
    html = document(
        "matrix.html.j2",
        {},
        scripts=("matrix.js",),
        columns=columns,
        groups=[
            (group, [one for one in cases.values() if group_of(one.id) == group])
            for group in dict.fromkeys(map(group_of, cases))
        ],
        not_red=[
            one
            for one in explanations
            if not any(cell["of"] is one for column in columns for cell in column["red"])
        ],
        marks=MARKS,
        meanings=MEANINGS,
        not_meant=NOT_MEANT,
    )
    save(html, output)


def _read_explanations(files: Sequence[Path], explained: Path | None) -> list[Explanation]:
    if explained is None:
        beside = (folder / EXPLANATIONS for file in files for folder in file.resolve().parents[:2])
        explained = next((file for file in beside if file.is_file()), None)
    if explained is None:
        return []
    try:
        found = tomllib.loads(explained.read_text(encoding="utf-8"))
        return msgspec.convert(found, _Explanations).explanation
    except OSError as error:
        raise ConfigError(f"{explained}: cannot be read: {in_words(error)}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{explained}: {error}") from error


def _rows(results: Sequence[ConformResult]) -> dict[str, CaseResult]:
    """Each case once, as the result with the most cases orders them."""
    found: dict[str, CaseResult] = {}
    for result in sorted(results, key=lambda one: len(one.cases), reverse=True):
        for case in result.cases:
            found.setdefault(case.id, case)
    return found


def _column(
    file: Path,
    result: ConformResult,
    number: int,
    output: Path,
    explanations: Sequence[Explanation],
) -> dict[str, Any]:
    page = file.with_name(PAGE) if file.with_name(PAGE).is_file() else file
    where = Path(os.path.relpath(page.resolve(), output.resolve().parent)).as_posix()
    cells = {
        one.id: {
            **row(one),
            "anchor": f"column{number}-{anchor(one.id)}",
            "where": where if page is file else f"{where}#{anchor(one.id)}",
            "figures": "; ".join(evidence(one.evidence)),
            **_explained(one, result, explanations),
        }
        for one in result.cases
    }
    server, configuration = server_name(result), result.target.configuration
    return {
        "server": server,
        "configuration": "" if configuration == server else configuration,
        "about": list(_about(result)),
        "counts": [(word, count) for word, count in counts(result) if count],
        "page": where,
        "command": result.command,
        "cells": cells | {name: {"word": "not run"} for name in result.not_run},
        "red": [cell for cell in cells.values() if cell["word"] == "fail"],
    }


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
