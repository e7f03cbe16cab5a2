"""No figure costs a run: what is not finite is named, and all else is written as it was."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.records import Summary
from harness.store.finite import finite
from harness.store.run_folder import RunFolder, as_summary
from tests.made_up.summaries import made_up_summary

EXPECTED = Path(__file__).parents[2] / "golden" / "expected"
CONTENTS = {
    name: json.loads((EXPECTED / name / "summary.json").read_text())
    for name in ("slot_recovery", "wedged", "value")  # the last one has arms
}
NOT_FINITE = [math.nan, math.inf, -math.inf]

Place = tuple[str | int, ...]


def floats_in(content: Any, at: Place = ()) -> Iterator[Place]:
    if isinstance(content, float):
        yield at
    elif isinstance(content, dict | list):
        items = content.items() if isinstance(content, dict) else enumerate(content)
        for key, one in items:
            yield from floats_in(one, (*at, key))


def put(content: Any, at: Place, value: float) -> Any:
    """A copy with this value in that place."""
    if not at:
        return value
    copy: Any = dict(content) if isinstance(content, dict) else list(content)
    copy[at[0]] = put(content[at[0]], at[1:], value)
    return copy


def value_at(content: Any, at: Place) -> Any:
    for key in at:
        content = content[key]
    return content


@pytest.mark.parametrize("name", CONTENTS)
@given(data=st.data())
def test_any_number_may_be_none_and_the_rest_is_written(name: str, data: st.DataObject) -> None:
    content = CONTENTS[name]
    everywhere = list(floats_in(content))
    chosen = data.draw(st.lists(st.sampled_from(everywhere), max_size=5, unique=True))
    damaged = content
    for at in chosen:
        damaged = put(damaged, at, data.draw(st.sampled_from(NOT_FINITE)))
    found = finite(as_summary(damaged))
    written = msgspec.to_builtins(found)
    json.dumps(written, allow_nan=False)
    assert msgspec.to_builtins(as_summary(written)) == written
    said = {*map(json.dumps, written["validity"])} - {*map(json.dumps, content["validity"])}
    assert bool(said) == bool(chosen)
    about = {at[: max(1, len(at) - 2)] for at in chosen}  # an entry of a list may be left out
    others = [at for at in everywhere if not any(at[: len(near)] == near for near in about)]
    assert all(value_at(written, at) == value_at(content, at) for at in others)


def metric(**figures: Any) -> dict[str, Any]:
    return {"unit": "s", "n": 3, "method": "probe", **figures}


def test_a_metric_without_a_finite_figure_is_not_measurable(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    others = {"gauge": metric(mean=math.nan, p50=0.5), "estimate": -math.inf, "met": 2.0}
    returned = folder.write_summary(
        made_up_summary(
            {
                "metrics": {
                    "ttft_s": metric(mean=math.nan, p50=math.inf),
                    "e2e_s": metric(mean=1.0, mean_ci95=(0.5, math.nan), others=others),
                },
                "validity": [
                    {"level": "invalid", "text": "first"},
                    {"level": "info", "text": "last"},
                ],
            }
        )
    )
    kept = folder.read_summary()
    assert isinstance(kept, Summary)
    assert msgspec.to_builtins(kept) == msgspec.to_builtins(returned)
    assert set(kept.metrics) == {"e2e_s"}
    assert kept.metrics["e2e_s"].mean == 1.0
    assert kept.metrics["e2e_s"].mean_ci95 is None
    gauge = {**metric(), "p50": 0.5}
    assert kept.metrics["e2e_s"].others["gauge"].items() >= gauge.items()
    assert set(kept.metrics["e2e_s"].others) == {"gauge", "met"}
    why = "mean came out as nan, p50 came out as inf: the rows give no finite figure"
    assert kept.not_measurable == {"ttft_s": why}
    texts = [(one.level, one.text) for one in kept.validity]
    assert texts[0] == ("invalid", "first")
    assert texts[-1] == ("info", "last")
    assert ("warning", f"ttft_s: not measurable: {why}") in texts
    assert len(texts) == 6


def test_what_is_finite_is_left_alone() -> None:
    for content in CONTENTS.values():
        summary = as_summary(content)
        assert finite(summary) is summary
