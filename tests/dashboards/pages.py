"""One page of each kind, made of made-up runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.dashboards.reading import Page, page_by
from tests.golden.recorded import judged_today
from tests.made_up.arms import SIZES, STEADY, save_arms, save_rounds, with_savings
from tests.made_up.changed import change_metric, without_metrics
from tests.made_up.conform import save_conform, save_engines
from tests.made_up.gated import GOOD, latency, save_night
from tests.made_up.played import save_played
from tests.made_up.run import save_judged


def plain(folder: Path) -> Page:
    said = [{"level": level, "text": f"{level} text"} for level in ("warning", "info")]
    return page_by("report", save_played(folder / "run", validity=said, steady=STEADY))


def ghosts(folder: Path) -> Page:
    return page_by("report", save_played(folder / "run", ghosts=6, gpu=True))


def many(folder: Path) -> Page:
    return page_by("report", save_played(folder / "run", abandons=750, ghosts=40))


def black_box(folder: Path) -> Page:
    hidden = {"detect_s": "this server reports no stages", "ghost_rate": "nor ghosts"}
    return page_by("report", save_played(folder / "run", lifecycle=False, not_measurable=hidden))


def recovery(folder: Path) -> Page:
    """A recorded run: none that is made up has probes."""
    return page_by("report", judged_today("slot_recovery", folder).path)


def nothing(folder: Path) -> Page:
    return page_by("report", save_played(folder / "run", abandons=0))


def invalid(folder: Path) -> Page:
    levels = {"warning": "it is starved", "invalid": "it was too late", "info": "there is no GPU"}
    said = [{"level": level, "text": text} for level, text in levels.items()]
    runs = [save_played(folder / "run", validity=said, abandons=3)]
    runs.append(save_played(folder / "broken", status="target_failed", abandons=3))
    return page_by("report", *runs)


def arms(folder: Path) -> Page:
    """Each arm's worst round says how far to trust it."""
    run = save_arms(folder, kind="abandon")
    save_rounds(run, {"1-32": 0.001, "1-128": 0.002, "2-32": 0.004, "2-128": 0.3})
    return page_by("report", run)


def frontier(folder: Path) -> Page:
    return page_by("report", save_arms(folder, kind="chunk_frontier"))


def comparison(folder: Path) -> Page:
    """The second is surely worse at cancelling; its longer steps alone explain its `ttft_s`, and
    make `detect_s`, a host's time that is as long in both, no better. For the third, fewer parts of
    the waste are known."""
    before = save_judged(folder / "before")
    after = save_judged(folder / "after", step_ms=20, freed_ms=131)
    third = without_metrics(save_judged(folder / "third"), "wasted_in_flight_tokens")
    for run, cancel, ttft in ((before, 0.011, 0.05), (after, 0.031, 0.10)):
        change_metric(run, "cancel_latency_s", p50_ci95=(cancel - 0.001, cancel + 0.001))
        change_metric(run, "ttft_s", p50=ttft, p50_ci95=(0.98 * ttft, 1.02 * ttft))
        change_metric(run, "detect_s", p50=0.001, p50_ci95=(0.00099, 0.00101))
    change_metric(third, "wasted_tokens", bound="lower")
    return page_by("compare", before, after, third)


def trend(folder: Path) -> Page:
    """With runs that are not joined, one that is known only to be more, a change, and runs of
    another question and on another server."""
    runs = folder / "runs"
    said = [{"level": "invalid", "text": "the client was starved"}]
    save_night(runs, 3, 0.020, versions={"walkaway": "2"})
    save_night(runs, 0, 0.020, others=GOOD)
    save_night(runs, 1, 0.021, of={"status": "interrupted"})
    save_night(runs, 2, latency(0.02, p99=None, n_censored=20, lower_bounds={"p99": 2.0}))
    save_night(runs, 4, 0.090, of={"validity": said})
    save_night(runs, 5, 0.5, of={"engine": "vllm"})
    save_night(runs, 6, 0.6, of={"workload": "soak"})
    (runs / "notes").mkdir()
    return page_by("trend", runs)


def early_stopping(folder: Path) -> Page:
    names = [str(size) for size in SIZES]
    return page_by("report", save_arms(folder, kind="abandon", **with_savings(names)))


def conform(folder: Path) -> Page:
    return page_by("conform", save_conform(folder / "conform"))


def matrix(folder: Path) -> Page:
    files = save_engines(folder)
    page_by("conform", files[0].parent, output=files[0].with_name("index.html"))
    return page_by("matrix", *files, output=folder / "matrix.html")


_REPORTS: Final = (
    *(plain, ghosts, many, black_box, recovery, nothing, invalid),
    *(arms, frontier, early_stopping),
)
PAGES: Final[dict[str, Callable[[Path], Page]]] = {
    one.__name__: one for one in (*_REPORTS, comparison, trend, conform, matrix)
}
