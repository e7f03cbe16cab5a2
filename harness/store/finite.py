"""A figure that is not finite (nan, inf) is no figure: the summary says so in its place.

One such value, wherever it comes from, would make `summary.json` unreadable as JSON and cost the
run all its other figures. It becomes null where null may stand, else its entry is left out; a
metric without any figure moves to `not_measurable`. A remark names each.
"""

import math
from collections.abc import Iterator
from functools import cache
from types import NoneType
from typing import Any, Final, TypeVar, get_args, get_type_hints

import msgspec

from harness.records import FIGURES, ArmsSummary, ArmSummary, Metric, Remark, Summary

AnySummary = TypeVar("AnySummary", bound=Summary | ArmsSummary)
Lost = dict[str, dict[str, float]]  # the values that are not finite, by owner and name

_NO: Final = object()  # in the place of what cannot be kept


def finite(summary: AnySummary) -> AnySummary:
    lost: Lost = {}
    kept: AnySummary = _kept(summary, "", lost)
    if not lost:
        return summary
    for at, side in _sides(kept).items():
        _move_lost(side, f"{at}metrics.", lost)
    graver = [one for one in kept.validity if one.level != "info"]
    said = [Remark(level="warning", text=text) for text in _remarks(lost)]
    kept.validity = [*graver, *said, *kept.validity[len(graver) :]]
    return kept


def _sides(summary: Summary | ArmsSummary) -> dict[str, Summary | ArmSummary]:
    if isinstance(summary, Summary):
        return {"": summary}
    return {f"arms.{name}.": arm for name, arm in summary.arms.items()}


def _move_lost(side: Summary | ArmSummary, at: str, lost: Lost) -> None:
    empty = [name for name in side.metrics if f"{at}{name}" in lost]
    for name in empty:
        if not _has_figure(side.metrics[name]):
            del side.metrics[name]
            side.not_measurable[name] = _came_out(lost[f"{at}{name}"])


def _has_figure(metric: Metric) -> bool:
    return bool(metric.lower_bounds) or any(getattr(metric, one) is not None for one in FIGURES)


def _remarks(lost: Lost) -> Iterator[str]:
    for owner, values in lost.items():
        yield f"{owner.replace('metrics.', '')}: not measurable: {_came_out(values)}"


def _came_out(values: dict[str, float]) -> str:
    parts = [f"{name} came out as {value}" for name, value in values.items()]
    return f"{', '.join(parts)}: the rows give no finite figure"


def _kept(value: Any, at: str, lost: Lost) -> Any:
    match value:
        case float() if not math.isfinite(value):
            owner, _, name = at.rpartition(".")
            lost.setdefault(owner, {})[name] = float(value)
            return _NO
        case msgspec.Struct():
            return _kept_struct(value, at, lost)
        case dict():
            found = {key: _kept(one, f"{at}.{key}".lstrip("."), lost) for key, one in value.items()}
            return {key: one for key, one in found.items() if one is not _NO}
        case list():  # the place of a number in a list may count: it is that of its round
            items = [(one, _kept(one, f"{at}.{place}", lost)) for place, one in enumerate(value)]
            of_list = [None if one is _NO and isinstance(was, float) else one for was, one in items]
            return [one for one in of_list if one is not _NO]
        case tuple():
            ends = tuple(_kept(one, at, lost) for one in value)
            return _NO if _NO in ends else ends
        case _:
            return value


def _kept_struct(value: msgspec.Struct, at: str, lost: Lost) -> Any:
    fields = {}
    for name, allows_null in _fields(type(value)).items():
        was = getattr(value, name)
        one = _kept(was, f"{at}.{name}".lstrip("."), lost)
        if one is _NO and not allows_null:
            return _NO
        fields[name] = None if one is _NO else one
    if at in lost and "note" in fields:
        fields["note"] = fields["note"] or _came_out(lost[at])
    return type(value)(**fields)


@cache
def _fields(kind: type[msgspec.Struct]) -> dict[str, bool]:
    """The name of each field, and whether it may be null."""
    hints = get_type_hints(kind)
    return {name: NoneType in get_args(hints[name]) for name in kind.__struct_fields__}
