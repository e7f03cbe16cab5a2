"""Scrape a Prometheus text page into samples, and read a target's quantities by role from them."""

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Final

import httpx
import prometheus_client
from prometheus_client.parser import text_string_to_metric_families

from harness.collect.source import SourceError
from harness.http_client import why_unread
from harness.records import PAGE, SHARES, MetricSample, has_labels, page_of
from harness.workload.target import MetricRole, MetricSource

_MODEL_LABELS: Final = ("model_name", "model", "served_model_name")
# Of processes that compute the same requests together. Each `dp_rank` has requests of its own.
_RANKS: Final = ("tp_rank", "pp_rank", "moe_ep_rank")
_RANK_DIGITS: Final = 6


def read_samples(
    client: httpx.Client, urls: Sequence[str], *, clock_ns: Callable[[], int]
) -> list[MetricSample]:
    samples: list[MetricSample] = []
    for url in urls:
        started_ns = clock_ns()
        response = fetch_page(client, url)
        ended_ns = clock_ns()
        try:
            samples += parse_page(
                response.text,
                t_ns=(started_ns + ended_ns) // 2,
                duration_ns=ended_ns - started_ns,
                extra_labels={PAGE: url} if len(urls) > 1 else {},
            )
        except ValueError as error:
            kind = response.headers.get("content-type", "none")
            raise SourceError(
                f"the page at {url} is not in the Prometheus text format (its content-type: "
                f"{kind}): name the metrics page itself"
            ) from error
    return samples


def fetch_page(client: httpx.Client, url: str) -> httpx.Response:
    """Raises SourceError, whose text does not vary between turns."""
    try:
        response = client.get(url)
    except httpx.HTTPError as error:
        raise SourceError(f"metrics at {url} could not be read ({why_unread(error)})") from error
    if response.has_redirect_location:
        raise SourceError(
            f"metrics at {url} could not be read: it redirects to {response.headers['location']}: "
            "name that page"
        )
    if response.status_code != httpx.codes.OK:
        raise SourceError(f"metrics at {url} could not be read: status {response.status_code}")
    return response


def parse_page(
    text: str, *, t_ns: int, duration_ns: int, extra_labels: Mapping[str, str]
) -> list[MetricSample]:
    """The page's samples, by the names that they have there, without creation times, histogram
    buckets, values that are not finite (NaN: there is none), and copies by other ranks. Raises
    ValueError for another format. The parser gives each counter a `_total`, also those that have
    none, as TGI's."""
    samples = []
    for family in _families(text):
        is_renamed = family.type == "counter" and not _has_series(text, f"{family.name}_total")
        for sample in family.samples:
            if sample.name.endswith("_created") or not math.isfinite(sample.value):
                continue
            labels = json.dumps({**sample.labels, **extra_labels}, sort_keys=True)
            samples.append(
                MetricSample(
                    t_ns=t_ns,
                    duration_ns=duration_ns,
                    name=family.name if is_renamed else sample.name,
                    labels=labels,
                    value=float(sample.value),
                )
            )
    return _without_copies(samples)


def _without_copies(samples: list[MetricSample]) -> list[MetricSample]:
    """The series with the lowest ranks, of those that differ in their ranks alone: SGLang's
    processes with context or pipeline parallelism each show the same requests."""
    if not any(f'{one}"' in sample.labels for sample in samples for one in _RANKS):
        return samples
    placed = [(sample, *_split_ranks(sample)) for sample in samples]
    lowest: dict[tuple[str, str], tuple[str, ...]] = {}
    for _, series, ranks in placed:
        lowest[series] = min(ranks, lowest.get(series, ranks))
    return [sample for sample, series, ranks in placed if ranks == lowest[series]]


def _split_ranks(sample: MetricSample) -> tuple[tuple[str, str], tuple[str, ...]]:
    """Its name with its other labels, and its ranks."""
    labels = json.loads(sample.labels)
    ranks = tuple(labels.pop(one, "").zfill(_RANK_DIGITS) for one in _RANKS)
    return (sample.name, json.dumps(labels)), ranks


def _has_series(text: str, name: str) -> bool:
    return any(f"\n{name}{after}" in f"\n{text}" for after in ("{", " ", "\t"))


def parse_gauges(text: str) -> dict[str, float]:
    """The page's gauges, and what has no declared type, by name and labels. Raises ValueError for
    another format."""
    return {
        sample.name + json.dumps(sample.labels, sort_keys=True): float(sample.value)
        for family in _families(text)
        if family.type in ("gauge", "unknown")
        for sample in family.samples
        if math.isfinite(sample.value)
    }


def _families(text: str) -> list[prometheus_client.Metric]:
    """A few lines that cannot be read, such as native histograms, cost no others. Raises
    ValueError if they are more than half of the values, or all."""
    text = _without_buckets(text.removeprefix("\ufeff"))
    try:
        return list(text_string_to_metric_families(text))
    except ValueError as error:
        good = [line for line in text.split("\n") if line.strip() and _can_be_read(line)]
        if not _num_values(good) or 2 * _num_values(good) < _num_values(text.split("\n")):
            raise error
        return list(text_string_to_metric_families("\n".join(good)))


def _num_values(lines: Sequence[str]) -> int:
    return sum(bool(line.strip()) and not line.startswith("#") for line in lines)


def _can_be_read(line: str) -> bool:
    try:
        list(text_string_to_metric_families(line))
    except ValueError:
        return False
    return True


def _without_buckets(text: str) -> str:
    """Buckets are most of a page, and costly to parse many times a second."""
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not line.partition("{")[0].endswith("_bucket"))


def read_roles(
    samples: Iterable[MetricSample], metrics: Mapping[MetricRole, MetricSource]
) -> dict[str, float]:
    """Each role's value in one scrape: the sum of its series, of a share their mean. A missing role
    has no entry. If each page repeats it, the first page counts."""
    shown: dict[str, list[float]] = {}
    shown_by: dict[str, str] = {}
    for sample in samples:
        for role, source in metrics.items():
            if sample.name == source.name and has_labels(sample.labels, source.labels):
                url = page_of(sample.labels) if source.repeated else ""
                if shown_by.setdefault(role, url) == url:
                    shown.setdefault(role, []).append(sample.value)
    return {
        role: fmean(values) if role in SHARES else sum(values, 0.0)
        for role, values in shown.items()
    }


def of_model(
    samples: Iterable[MetricSample],
    metrics: Mapping[MetricRole, MetricSource],
    model: str,
) -> dict[MetricRole, MetricSource]:
    """The sources, each with the label of this model if its series on the page are of several."""
    shown: dict[tuple[str, str], set[str]] = {}
    for sample in samples:
        labels = json.loads(sample.labels)
        for label in labels.keys() & _MODEL_LABELS:
            shown.setdefault((sample.name, label), set()).add(labels[label])
    found = dict(metrics)
    for role, source in metrics.items():
        for label in _MODEL_LABELS:
            models = shown.get((source.name, label), set())
            if len(models) > 1 and model in models:
                labels = {label: model, **source.labels}
                found[role] = source.model_copy(update={"labels": labels})
                break
    return found


def find_unseen(
    names: Collection[str], metrics: Mapping[MetricRole, MetricSource]
) -> list[MetricRole]:
    """Roles whose metric is not among these names, whatever its labels, and should be."""
    return [
        role for role, source in metrics.items() if source.name not in names and not source.optional
    ]
