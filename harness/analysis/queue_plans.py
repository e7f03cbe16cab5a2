"""Who was to leave the queue must have waited in one: else the run tells of something else."""

from collections.abc import Iterator

from harness.analysis.facts import Facts
from harness.analysis.frames import RunFrames
from harness.analysis.scraped import readings_of

QUEUED = "queued"  # the plan of those who leave while they wait


def queue_warnings(frames: RunFrames, facts: Facts) -> Iterator[str]:
    """Said of a server without a lifecycle log, where the gauge of waiting requests never showed
    any, or where nobody read it: with free slots a request is in the batch at once."""
    planned = int((frames.requests["plan"] == QUEUED).sum())
    if not planned or facts.has_lifecycle or "waiting" not in facts.metric_names:
        return
    who, name = f"{planned} were to leave while queued", facts.metric_names["waiting"]
    readings = readings_of(frames, facts, "waiting")
    if readings is None:
        yield f"{who}, but {name} was not scraped: whether they had waited is not known"
        return
    is_in_load = (readings.t_ns >= facts.load_started_ns) & (readings.t_ns <= facts.load_ended_ns)
    shown = readings.level[is_in_load] - facts.idle_before.get("waiting", 0.0)
    if not (shown > 0).any():
        yield (
            f"{who}, but {name} showed nobody waiting at any of {len(shown)} scrapes: the server "
            "seems to have had room for all, so they left during their prefill or later; take more "
            "users than it has batch slots"
        )
