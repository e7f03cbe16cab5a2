"""What a server tells of itself before the load, and what is to be said of watching it."""

import json
from collections.abc import Sequence
from typing import Final

import httpx

from harness.collect.prometheus import find_unseen
from harness.records import MetricSample
from harness.server import Server
from harness.target_spec import Target

FITS_NOTHING: Final = "--engine "  # how the text begins that says so


def told_slots(client: httpx.Client, server: Server, target: Target) -> int | None:
    """The number of batch slots on the server's own page; None where it has no such page."""
    if target.slots_from != "props":
        return None
    try:
        response = client.get(f"{server.url}/props")
        slots = response.json()["total_slots"]
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return None
    return slots if isinstance(slots, int) and slots > 0 else None


def told_version(client: httpx.Client, server: Server, target: Target) -> str | None:
    """The server's version on its own page; None where it has no such page."""
    source = target.version_from
    if source is None:
        return None
    try:
        version = client.get(f"{server.url}{source.path}").json()[source.key]
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return None
    return version if isinstance(version, str) else None


def told_blocks(samples: Sequence[MetricSample], target: Target) -> int | None:
    """The number of KV cache blocks, from the label of a metric that describes the cache."""
    source = target.blocks_from
    if source is None:
        return None
    for sample in samples:
        text = json.loads(sample.labels).get(source.label) if sample.name == source.name else None
        if text is not None and text.isdigit():
            return int(text)
    return None


def metrics_pages(typed: Sequence[str], server: Server, target: Target) -> list[str]:
    """The URLs to read; none where nothing is known of what would stand there."""
    if typed or not target.metrics:
        return list(typed)
    return [f"{server.url}/metrics"]


def scrape_note(interval_s: float | None, metrics_urls: Sequence[str]) -> str | None:
    """Said of a run that does not scrape while the load runs."""
    if interval_s is not None:
        return None
    if not metrics_urls:
        return "nothing was scraped: figures that need /metrics are not measurable"
    return (
        "nothing was scraped while the load ran: figures that need gauges and counters over time "
        "are not measurable; /metrics was read before the load and after it"
    )


def scrape_warning(interval_s: float | None, target: Target) -> str | None:
    """Said where the server is watched more closely than it bears."""
    least_s = target.min_scrape_interval_s
    if interval_s is None or least_s is None or interval_s >= least_s:
        return None
    return (
        f"/metrics is read every {interval_s:g} s, but a server of kind {target.name} bears that "
        f"only every {least_s:g} s: read more often it cancels otherwise (see the target's file)"
    )


def unseen_metrics(
    samples: Sequence[MetricSample], metrics_urls: Sequence[str], target: Target
) -> str | None:
    """Which of the target's metrics are not there, by name; None where all are."""
    unseen = find_unseen({sample.name for sample in samples}, target.metrics)
    if not unseen:
        return None
    names = ", ".join(f"{target.metrics[role].name} ({role})" for role in unseen)
    text = f"not among the metrics at {' '.join(metrics_urls)}: {names}"
    if len(unseen) == len(target.metrics):
        return f"{FITS_NOTHING}{target.name} fits nothing here: {text}"
    return text
