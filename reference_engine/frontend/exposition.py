"""Prometheus' text formats, written in a way that bears being asked for twenty times a second.

All that does not change is put together once: heads, names, labels, bounds. A scrape fills in the
numbers. (prometheus_client takes ten times as long, on the event loop that has to notice clients
leaving; its parsers read these pages in the tests.)
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Final, Literal, NamedTuple

from reference_engine.frontend.statistics import Histogram

TEXT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS_TYPE: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"

Samples = Iterable[tuple[str, float]]


class Family(NamedTuple):
    """One metric. `samples` gives, at every scrape, series (name and labels) with their values."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    text: str
    samples: Callable[[], Samples]


class Labels:
    """Those that every series has, written once; more can be added in front of a value."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._common = _written(labels)

    def series(self, name: str, **more: str) -> str:
        """A series as it stands in front of its value."""
        written = f"{self._common},{_written(more)}" if more else self._common
        return f"{name}{{{written}}}"


def gauge(labels: Labels, name: str, text: str, read: Callable[[], float]) -> Family:
    series = labels.series(name)
    return Family(name, "gauge", text, lambda: ((series, read()),))


def counter(labels: Labels, name: str, text: str, read: Callable[[], float]) -> Family:
    """`name` is without `_total`."""
    series = labels.series(f"{name}_total")
    return Family(name, "counter", text, lambda: ((series, read()),))


def counter_by(
    labels: Labels,
    name: str,
    text: str,
    reads: Mapping[str, Callable[[], float]],
    *,
    label: str,
) -> Family:
    """One series for each value of a label, there from the start."""
    series = [(labels.series(f"{name}_total", **{label: key}), reads[key]) for key in reads]
    return Family(name, "counter", text, lambda: ((head, read()) for head, read in series))


def tally(
    labels: Labels,
    name: str,
    text: str,
    counts: Mapping[tuple[str, ...], int],
    *,
    by: Sequence[str],
) -> Family:
    """A series for each combination of labels that has been counted so far."""

    def samples() -> Samples:
        for key, value in counts.items():
            more = dict(zip(by, key, strict=True))
            yield labels.series(f"{name}_total", **more), value

    return Family(name, "counter", text, samples)


def histogram(labels: Labels, name: str, text: str, values: Histogram) -> Family:
    bounds = [*(str(float(bound)) for bound in values.bounds), "+Inf"]
    heads = [labels.series(f"{name}_bucket", le=bound) for bound in bounds]
    count, total = labels.series(f"{name}_count"), labels.series(f"{name}_sum")

    def samples() -> Samples:
        upto = list(accumulate(values.counts))
        yield from zip(heads, upto, strict=True)
        yield count, upto[-1]
        yield total, values.total

    return Family(name, "histogram", text, samples)


class Page:
    """What `/metrics` answers, in one of the two formats."""

    def __init__(self, families: Sequence[Family], *, open_metrics: bool) -> None:
        self._families = [
            (_head(family, open_metrics=open_metrics), family.samples) for family in families
        ]
        self._end = "# EOF\n" if open_metrics else ""
        self.content_type = OPEN_METRICS_TYPE if open_metrics else TEXT_TYPE

    def write(self) -> bytes:
        parts = []
        for head, samples in self._families:
            parts.append(head)
            parts += [f"{series} {value}\n" for series, value in samples()]
        parts.append(self._end)
        return "".join(parts).encode()


def wants_open_metrics(accept: str) -> bool:
    """Whether an Accept header names OpenMetrics."""
    kinds = (part.partition(";")[0].strip() for part in accept.lower().split(","))
    return "application/openmetrics-text" in kinds


def _head(family: Family, *, open_metrics: bool) -> str:
    # OpenMetrics calls a counter by its name without `_total`, the older format with it.
    is_bare = open_metrics or family.kind != "counter"
    name = family.name if is_bare else f"{family.name}_total"
    return f"# HELP {name} {family.text}\n# TYPE {name} {family.kind}\n"


def _written(labels: Mapping[str, str]) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
