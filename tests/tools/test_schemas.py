"""docs/schemas has the JSON schemas of today's records, and the files that walkaway writes obey
them."""

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from harness.store.conform_result import CONFORM_FILE
from tests.golden.recorded import judged_today
from tools.schemas import FILES, FOLDER, schema_text

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", FILES)
def test_a_schema_is_the_records(name: str) -> None:
    assert (FOLDER / name).read_text() == schema_text(name), "run: python -m tools.schemas"


def errors(name: str, content: Any) -> list[str]:
    schema = json.loads((FOLDER / name).read_text())
    Draft202012Validator.check_schema(schema)
    return [one.message for one in Draft202012Validator(schema).iter_errors(content)]


@pytest.mark.parametrize(
    ("run", "name"), [("clean", "summary.schema.json"), ("build", "arms-summary.schema.json")]
)
def test_a_summary_is_valid(run: str, name: str, tmp_path: Path) -> None:
    summary = judged_today(run, tmp_path).path / "summary.json"
    assert errors(name, json.loads(summary.read_bytes())) == []


def test_a_conformance_result_is_valid() -> None:
    found = list((ROOT / "results").glob(f"engines/*/{CONFORM_FILE}"))
    wrong = {str(one): errors("conform.schema.json", json.loads(one.read_bytes())) for one in found}
    assert wrong == {str(one): [] for one in found}
    assert len(found) > 5


def test_a_file_of_another_shape_is_not() -> None:
    assert errors("conform.schema.json", {"cases": "none"})
