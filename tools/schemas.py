"""JSON schemas of the files that other programs read: `python -m tools.schemas` writes them to
docs/schemas/, from the records that walkaway writes."""

import json
from pathlib import Path
from typing import Any, Final

import msgspec

from harness.records import ArmsSummary, Summary
from harness.store.conform_result import ConformResult

FOLDER: Final = Path(__file__).parents[1] / "docs" / "schemas"
DRAFT: Final = "https://json-schema.org/draft/2020-12/schema"
FILES: Final[dict[str, tuple[str, Any]]] = {
    "conform.schema.json": ("conform.json of `walkaway conform`", ConformResult),
    "summary.schema.json": ("summary.json of `walkaway run`", Summary),
    "arms-summary.schema.json": ("summary.json of a run with arms", ArmsSummary),
}


def schema_text(name: str) -> str:
    title, record = FILES[name]
    schema = {"$schema": DRAFT, "title": title, **msgspec.json.schema(record)}
    return json.dumps(schema, indent=1) + "\n"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in FILES:
        (FOLDER / name).write_text(schema_text(name))


if __name__ == "__main__":
    main()
