"""Progress of a run: a live panel on a terminal, plain lines elsewhere, or nothing.

Progress goes to standard error; standard output is for the result.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from harness.formatting import quantity
from harness.records import Outcome
from harness.run.load_plan import describe_open_loop
from harness.workload.load import (
    AbandonLoad,
    CancelStormLoad,
    ChunkFrontierLoad,
    OccupancyLoad,
    SlotRecoveryLoad,
)
from harness.workload.plan import LoadPlan

PLAIN_EVERY_S = 5.0
HOURS_FROM_S = 7200  # up to here a time is shown in seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of the load at one moment.

    `cancel_latency_s`: the median so far, if the server has an exact log. `client_lag_s`: the
    longest recent lag of the load.
    """

    elapsed_s: float
    limit_s: float
    outcomes: Mapping[str, int] = field(default_factory=dict)
    stop_after_abandons: int | None = None
    gauges: Mapping[str, float] = field(default_factory=dict)
    cancel_latency_s: float | None = None
    client_lag_s: float | None = None

    @property
    def left_s(self) -> float:
        """Seconds until the time is up, or until enough users have left at this pace."""
        left_s = max(0.0, self.limit_s - self.elapsed_s)
        gone = self.outcomes.get("abandoned", 0)
        if self.stop_after_abandons and gone:
            more = max(0, self.stop_after_abandons - gone)
            left_s = min(left_s, self.elapsed_s * more / gone)
        return left_s

    @property
    def share_done(self) -> float:
        share = self.elapsed_s / self.limit_s
        if self.stop_after_abandons:
            share = max(share, self.outcomes.get("abandoned", 0) / self.stop_after_abandons)
        return min(1.0, share)


class Progress:
    """Shows nothing. `pace` is of a phase: how far it has come, and what is left."""

    def phase(self, text: str) -> None:
        pass

    def pace(self, text: str) -> None:
        self.phase(text)

    def update(self, snapshot: Snapshot) -> None:
        pass

    def close(self) -> None:
        pass


class Pace:
    """How many parts of a whole have ended, and how long the others will take at their pace."""

    def __init__(self, noun: str, num: int = 0, *, clock_s: Callable[[], float]) -> None:
        self.noun, self.num, self.done = noun, num, 0
        self._clock_s = clock_s
        self._began_s = self._last_s = clock_s()

    def step(self) -> None:
        self.done += 1
        self._last_s = self._clock_s()

    def __str__(self) -> str:
        which = f"{self.noun} {self.done + 1} of {self.num}"
        if not self.done:
            return which
        each_s = (self._last_s - self._began_s) / self.done
        left = self.num - self.done
        begun = min((self._clock_s() - self._last_s) / max(each_s, 1e-9), 1.0)
        return f"{which}, about {quantity(round((left - begun) * each_s), 's')} left"


class PrefixedProgress(Progress):
    """Progress of one part of a run, with the part's name before each phase."""

    def __init__(self, progress: Progress, part: str) -> None:
        self._progress = progress
        self._part = part

    def phase(self, text: str) -> None:
        self._progress.phase(f"{self._part}: {text}")

    def pace(self, text: str) -> None:
        self._progress.pace(f"{self._part}: {text}")

    def update(self, snapshot: Snapshot) -> None:
        self._progress.update(snapshot)

    def close(self) -> None:
        self._progress.close()


class ProgressConsole(Console):
    """Standard error. A run does not end because nobody reads its progress any more."""

    def __init__(self) -> None:
        super().__init__(stderr=True)

    def on_broken_pipe(self) -> None:
        self.quiet = True


@contextmanager
def _quiet_after_an_error(console: Console) -> Iterator[None]:
    """Such as a full disk, where standard error is a file."""
    try:
        yield
    except OSError:
        console.quiet = True


class PlainProgress(Progress):
    """A line for each phase, and one every few seconds of load."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._next_s = PLAIN_EVERY_S

    def phase(self, text: str) -> None:
        with _quiet_after_an_error(self._console):
            self._console.print(f"walkaway: {text}", markup=False, highlight=False, soft_wrap=True)

    def update(self, snapshot: Snapshot) -> None:
        if snapshot.elapsed_s >= self._next_s:
            self._next_s = snapshot.elapsed_s + PLAIN_EVERY_S
            self.phase(describe(snapshot))


class LiveProgress(Progress):
    """Phases as lines, the load as a live panel."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None

    def phase(self, text: str) -> None:
        self.close()
        with _quiet_after_an_error(self._console):
            self._console.print(Text.assemble(("● ", "cyan"), text))

    def update(self, snapshot: Snapshot) -> None:
        with _quiet_after_an_error(self._console):
            if self._live is None:
                self._live = Live(console=self._console, refresh_per_second=8, transient=True)
                self._live.start()
            self._live.update(_panel(snapshot))

    def close(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            with _quiet_after_an_error(self._console):
                live.stop()


def choose_progress(console: Console, *, is_quiet: bool) -> Progress:
    if is_quiet:
        return Progress()
    return LiveProgress(console) if console.is_terminal else PlainProgress(console)


def describe(snapshot: Snapshot) -> str:
    time = f"{snapshot.elapsed_s:.0f} s of at most {snapshot.limit_s:.0f} s"
    shown = [text for texts in _shown(snapshot).values() for text in texts]
    return " · ".join([time, *shown, _time_left(snapshot)])


def _panel(snapshot: Snapshot) -> Table:
    grid = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=1.0, completed=snapshot.share_done, width=30)
    grid.add_row("  load", bar, _time_left(snapshot))
    for name, texts in _shown(snapshot).items():
        if texts:
            grid.add_row(f"  {name}", " · ".join(texts), "")
    return grid


def _shown(snapshot: Snapshot) -> dict[str, list[str]]:
    always = (Outcome.ABANDONED, Outcome.COMPLETED)
    others = [o for o in Outcome if o not in always and snapshot.outcomes.get(o.value)]
    gauges = [role for role in ("running", "waiting") if role in snapshot.gauges]
    times = {"cancel latency": snapshot.cancel_latency_s, "client lag": snapshot.client_lag_s}
    return {
        "users": [_outcome_text(outcome.value, snapshot) for outcome in (*always, *others)],
        "server": [f"{role} {snapshot.gauges[role]:.0f}" for role in gauges],
        "so far": [f"{name} {quantity(s, 's')}" for name, s in times.items() if s is not None],
    }


def _outcome_text(outcome: str, snapshot: Snapshot) -> str:
    count = snapshot.outcomes.get(outcome, 0)
    if outcome == "abandoned" and snapshot.stop_after_abandons:
        return f"abandoned {count} of {snapshot.stop_after_abandons}"
    return f"{outcome.replace('_', ' ')} {count}"


def _time_left(snapshot: Snapshot) -> str:
    return f"about {snapshot.left_s:.0f} s left" if snapshot.left_s else "ending"


def describe_load(plan: LoadPlan) -> str:
    processes = plan.run.processes
    return f"load: {_described(plan)}{f', in {processes} processes' if processes > 1 else ''}"


def _described(plan: LoadPlan) -> str:
    if plan.schedule is not None:
        return describe_open_loop(plan.schedule)
    users, most_s = quantity(plan.run.users, "users"), plan.run.max_seconds
    most = f"{most_s:.0f} s" if most_s < HOURS_FROM_S else f"{most_s / 3600:.3g} h"
    match plan.load:
        case AbandonLoad(stop_after_abandons=None):
            return f"{users} for {most}"
        case AbandonLoad(stop_after_abandons=enough):
            return f"{users} until {enough} have walked away, at most {most}"
        case SlotRecoveryLoad(slots=slots, trials=trials, width_s=width_s):
            ends = [] if trials is None else [f"for {trials} samples"]
            if width_s is not None:
                ends.append(f"until the median is known to {1e3 * width_s:g} ms")
            end = " or ".join([*ends, f"at most {most}"])
            return f"a train of probes behind {slots} full slots, {end}"
        case OccupancyLoad(slots=slots, rounds=rounds):
            return f"{rounds} rounds, in each {slots} streams leave and as many requests follow"
        case ChunkFrontierLoad(bystanders=others, pairs=pairs):
            return f"{others} bystanders, {pairs} long prompts read and as many abandoned"
        case CancelStormLoad(streams=streams, storms=storms):
            return f"{storms} storms, each abandons {streams} streams at once"
        case None:
            return "requests that cases direct"
