"""How many replicas a load needs, where cancellation is honoured, comes late, or is ignored.

A replica behind a router that does not look gets arrivals at its share of the rate, independent of
all others. So one replica is simulated, at rates that close in on the highest at which it still
holds the goal; the load divided by that rate is the number of replicas. Each seed searches on its
own, and the interval is Student's over the seeds, on a logarithmic scale.
"""

import math
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Final, NamedTuple, TypeVar

from harness.errors import ConfigError, InterruptedRunError
from harness.gate.limits import Limit, of_the_run_alone, parse_limits
from harness.records import Summary
from harness.run.process import Interruption
from harness.run.progress import Pace, PrefixedProgress, Progress
from harness.run.run_config import RunConfig
from harness.simulate.machine import SimulatedMachine
from harness.simulate.plan import Plan
from harness.simulate.simulation import (
    Computing,
    prepare,
    resolve_simulation,
    simulate,
)
from harness.store.capacity_result import CapacityResult, Estimate, Need
from harness.workload.arrivals import FlatArrivals
from harness.workload.load import AbandonLoad
from harness.workload.workload import Workload

T = TypeVar("T")
R = TypeVar("R")

RUNS: Final = "runs"
HOURS_A_MONTH: Final = 730.0
LATE_S: Final = 5.0
SEEDS: Final = 4
FEWEST_REQUESTS: Final = 1000
PRECISION: Final = 0.02  # of the highest rate
FIRST_STRIDE: Final = 1.1
NEXT_STRIDE: Final = 1.03  # seeds differ by little
MOST_STRIDES: Final = 6  # the last is by a factor of 21
DEFAULT_GOAL: Final = "ttft_s.p99 <= 1"
_REMARKS: Final = (
    "replicas are not rounded up, and none is kept in reserve",
    "a replica starts empty, and the goal is judged over all of its load: a short load flatters it",
    "seconds of GPU, slots and blocks spent on abandoned requests are of the first seed, all other "
    "figures means over the seeds",
)
# Metrics that a user feels: limits on these are the goal.
FELT: Final = ("ttft_s", "ttft_from_intended_s", "itl_s", "tpot_s", "e2e_s", "e2e_from_intended_s")


class Treatment(NamedTuple):
    """A way to treat a cancel, as faults of the engine."""

    name: str
    faults: tuple[str, ...]


def treatments(late_s: float) -> tuple[Treatment, ...]:
    return (
        Treatment("honoured", ()),
        Treatment(f"{late_s:g} s late", (f"delay-abort={late_s:g}",)),
        Treatment("ignored", ("ignore-disconnect",)),
    )


class Seen(NamedTuple):
    """One simulated rate: whether the replica held the goal, and where it is written."""

    holds: bool
    summary: Summary
    folder: Path


Try = Callable[[float], Seen]
Attempt = Callable[[Treatment, int, float], Seen]  # by seed and rate
Job = tuple[Treatment, int]


def goal_of(workload: Workload) -> tuple[list[Limit], str | None]:
    """The workload's limits on what users feel; without any, a goal that is assumed."""
    limits = parse_limits(workload.gate.limits, source="[gate]", arms=[])
    felt = [one for one in of_the_run_alone(limits) if one.metric in FELT]
    if felt:
        return felt, None
    assumed = parse_limits([DEFAULT_GOAL], source="the default", arms=[])
    return assumed, f"the goal {DEFAULT_GOAL} is an assumption: the workload's [gate] has none"


def holds(summary: Summary, goal: Sequence[Limit]) -> bool:
    """A figure that is known only to exceed something does not hold. Requests that were due and
    could not be sent show that the replica fell behind."""
    counted = summary.arrivals or {}
    if counted.get("sent", 0) < counted.get("planned", 0):
        return False
    for limit in goal:
        metric = summary.metrics.get(limit.metric)
        value = None if metric is None else getattr(metric, limit.key)
        if value is None or not limit.holds(value):
            return False
    return True


def highest_rate(attempt: Try, guess: float, stride: float = FIRST_STRIDE) -> tuple[float, Seen]:
    """The highest rate within PRECISION, and what was seen there. Raises ConfigError if every rate
    holds the goal, or none."""
    low, high, best = _bracket(attempt, guess, stride)
    while high / low > 1 + PRECISION:
        middle = math.sqrt(low * high)
        seen = attempt(middle)
        low, high, best = (middle, high, seen) if seen.holds else (low, middle, best)
    return low, best


def _bracket(attempt: Try, guess: float, stride: float) -> tuple[float, float, Seen]:
    """A rate that holds, one that does not, and what was seen at the first. The way from the guess
    grows with each try."""
    rate = guess
    first = last = attempt(rate)
    for _ in range(MOST_STRIDES):
        before, seen = rate, last
        rate = rate * stride if first.holds else rate / stride
        stride *= stride
        last = attempt(rate)
        if first.holds and not last.holds:
            return before, rate, seen
        if last.holds and not first.holds:
            return rate, before, last
    if first.holds:
        raise ConfigError(
            f"a replica holds the goal even at {rate:.4g} requests a second: the goal is no limit; "
            "state another in the workload's [gate]"
        )
    raise ConfigError(
        f"no rate holds the goal, not even {rate:.3g} requests a second at a replica: state "
        "another goal in the workload's [gate], or take a faster machine"
    )


def highest_rates(
    attempt: Attempt,
    guesses: Mapping[Treatment, float],
    seeds: Sequence[int],
    processes: int = 1,
    *,
    ended: Callable[[], object] = lambda: None,
) -> dict[Treatment, list[tuple[float, Seen]]]:
    """One a seed. The first search says how far off the guesses are; all others start from there,
    `processes` at a time, so that their number changes nothing. `ended` is called after each."""
    first, *others = [(treatment, seed) for treatment in guesses for seed in seeds]
    found = [highest_rate(partial(attempt, *first), guesses[first[0]])]
    off = found[0][0] / guesses[first[0]]
    ended()

    def search(job: Job) -> tuple[float, Seen]:
        result = highest_rate(partial(attempt, *job), guesses[job[0]] * off, NEXT_STRIDE)
        ended()
        return result

    found += at_once(search, others, processes)
    own = iter(found)
    return {treatment: [next(own) for _ in seeds] for treatment in guesses}


def at_once(work: Callable[[T], R], each: Sequence[T], processes: int) -> list[R]:
    """Threads, each of which waits for a process of its own."""
    if processes == 1:
        return [work(one) for one in each]
    with ThreadPoolExecutor(processes) as pool:
        return list(pool.map(work, each))


def first_guess(workload: Workload, machine: SimulatedMachine, treatment: Treatment) -> float:
    """Little's law, were all slots always full."""
    load, slots = workload.load, workload.engine.max_num_seqs or 8
    assert isinstance(load, AbandonLoad)
    most = load.answer_tokens
    tokens = load.stay_share * load.stay_tokens
    leavers = [plan.weight for plan in load.leavers]
    early = fmean(load.abandon_after_tokens) if load.abandon_after_tokens else most / 2
    left = most if treatment.name == "ignored" else early
    tokens += (1 - load.stay_share) * left * (sum(leavers) > 0)
    context = slots * (fmean(load.prompt_tokens) + tokens / 2)
    prefill = fmean(load.prompt_tokens) * slots / max(tokens, 1)
    step_s = machine.cost.step_s(prefill=prefill, decode=slots, context=context)
    return slots / (max(tokens, 1.0) * step_s)


def estimate(values: Sequence[float]) -> Estimate:
    logs = [math.log(one) for one in values]
    mean = fmean(logs)
    if len(logs) < 2:
        return Estimate(value=math.exp(mean))
    from scipy.special import stdtrit

    spread = math.sqrt(sum((one - mean) ** 2 for one in logs) / (len(logs) - 1))
    half = float(stdtrit(len(logs) - 1, 0.975)) * spread / math.sqrt(len(logs))
    # A rate is known no better than the search closes in on it.
    half = max(half, PRECISION / 2)
    return Estimate(value=math.exp(mean), ci95=(math.exp(mean - half), math.exp(mean + half)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """`rate`: of all requests, a second; None: the workload's. `price_hour`: of one GPU."""

    rate: float | None = None
    late_s: float = LATE_S
    price_hour: float | None = None
    seeds: int = SEEDS


def need_of(
    treatment: Treatment,
    found: Sequence[tuple[float, Seen]],
    load_rate: float,
    price: float | None,
    machine: SimulatedMachine,
) -> Need:
    rates = [rate for rate, _ in found]
    rate = estimate(rates)
    replicas = _inverse(load_rate, rate)
    gpus = replicas.times(machine.gpus) if machine.gpus else None
    return Need(
        name=treatment.name,
        faults=list(treatment.faults),
        rates=rates,
        rate=rate,
        replicas=replicas,
        gpus=gpus,
        money_a_month=None if gpus is None or price is None else gpus.times(price * HOURS_A_MONTH),
        figures=_mean_figures([figures_of(seen.summary) for _, seen in found]),
        runs=[seen.folder.name for _, seen in found],
    )


def more_than(first: Need, need: Need) -> Estimate:
    """The two are compared seed by seed, since a seed brings the same bursts to both."""
    ratio = estimate([one / own for one, own in zip(first.rates, need.rates, strict=True)])
    ends = None if ratio.ci95 is None else (ratio.ci95[0] - 1, ratio.ci95[1] - 1)
    return Estimate(value=ratio.value - 1, ci95=ends)


def _inverse(load: float, rate: Estimate) -> Estimate:
    ends = None if rate.ci95 is None else (load / rate.ci95[1], load / rate.ci95[0])
    return Estimate(value=load / rate.value, ci95=ends)


def figures_of(summary: Summary) -> dict[str, float]:
    """Means, and sums over the load where a sum is asked for: `<metric>_sum`."""
    found: dict[str, float] = {"abandoned": float(summary.outcomes.get("abandoned", 0))}
    for name in ("throughput_tps", "slot_utilisation", "wasted_tokens", "cancel_latency_s"):
        metric = summary.metrics.get(name)
        if metric is not None and metric.mean is not None:
            found[name] = metric.mean
    for name in ("gpu_seconds", "slot_seconds", "block_seconds"):
        metric = summary.metrics.get(f"{name}_after_abandon")
        if metric is not None and metric.mean is not None:
            found[f"{name}_sum"] = metric.mean * metric.n
    ttft = summary.metrics.get("ttft_s")
    if ttft is not None and ttft.p99 is not None:
        found["ttft_p99_s"], found["ttft_n"] = ttft.p99, float(ttft.n)
    return found


def _mean_figures(each: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = set.intersection(*(set(one) for one in each))
    return {name: fmean(one[name] for one in each) for name in sorted(names)}


# The search, simulated


class _OfOneRate(PrefixedProgress):
    """Each rate has the same phases: only how far a long one has come is shown."""

    def phase(self, text: str) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacitySearch:
    """Simulates one replica at any rate, up to `processes` runs at once. Each run lies in `folder`;
    `done` has the finished runs."""

    config: RunConfig
    goal: Sequence[Limit]
    folder: Path
    progress: Progress
    interruption: Interruption
    processes: int = 1
    done: list[Seen] = field(default_factory=list)
    pace: Pace = field(default_factory=lambda: Pace("part", clock_s=time.monotonic))

    def attempt(self, treatment: Treatment, seed: int, rate: float, *, keep: str = "thin") -> Seen:
        """Raises InterruptedRunError."""
        self.interruption.check()
        name = f"{treatment.name.replace(' ', '-')}-seed-{seed}-rate-{rate:.4g}-{keep}"
        part = f"cancellation {treatment.name}, seed {seed}: {rate:.4g} requests/s"
        self.progress.phase(f"{self.pace}: {part}")
        one = one_replica(self.config, treatment, rate, seed)
        finished = simulate(
            resolve_simulation(
                replace(
                    one,
                    out=self.folder / name,
                    settings=[*one.settings, f"simulate.keep={keep}"],
                )
            ),
            progress=_OfOneRate(self.progress, part),
            interruption=self.interruption,
            computing=Computing(),
            draws=False,
        )
        if finished.failure is not None or not isinstance(finished.summary, Summary):
            raise finished.failure or InterruptedRunError("interrupted")
        held = holds(finished.summary, self.goal)
        self.done.append(Seen(held, finished.summary, finished.folder.path))
        return self.done[-1]


def capacity(config: RunConfig, question: Question, search: CapacitySearch) -> CapacityResult:
    """Raises ConfigError and InterruptedRunError."""
    try:
        return _capacity(config, question, search)
    except (InterruptedRunError, KeyboardInterrupt) as error:  # the latter: the second Ctrl-C
        if not search.done:
            raise InterruptedRunError("interrupted before one rate was simulated") from error
        raise InterruptedRunError(
            f"interrupted after {len(search.done)} simulated rates, too few to know the capacity; "
            f"their runs are in {search.folder}"
        ) from error


def _capacity(config: RunConfig, question: Question, search: CapacitySearch) -> CapacityResult:
    plan = plan_for(config)
    workload, machine = plan.workload, plan.machine
    assert isinstance(workload.arrivals, FlatArrivals)
    load_rate = question.rate or workload.arrivals.rate
    seeds = [workload.run.seed + number for number in range(question.seeds)]
    ways = treatments(question.late_s)
    guesses = {one: first_guess(workload, machine, one) for one in ways}
    pace = search.pace
    pace.num = len(ways) * (len(seeds) + 1)
    found = highest_rates(search.attempt, guesses, seeds, search.processes, ended=pace.step)

    def with_lists(treatment: Treatment) -> Seen:
        seen = search.attempt(treatment, seeds[0], found[treatment][0][0], keep="rows")
        pace.step()
        return seen

    whole = at_once(with_lists, ways, search.processes)
    needs = [need_of(one, found[one], load_rate, question.price_hour, machine) for one in ways]
    for need, seen in zip(needs, whole, strict=True):
        need.figures = figures_of(seen.summary) | need.figures
    for need in needs[1:]:
        need.more = more_than(needs[0], need)
    return CapacityResult(
        walkaway=version("walkaway"),
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join(config.command),
        workload=workload.name,
        question=_question(load_rate, machine),
        machine=machine.model_dump(exclude={"lags"}),
        rate=load_rate,
        goal=[limit.text for limit in search.goal],
        late_s=question.late_s,
        price_hour=question.price_hour,
        needs=needs,
        assumptions=[
            *filter(None, [goal_of(workload)[1]]),
            *(f"machine {machine.name}: {one}" for one in machine.assumptions),
            *_assumptions(question, machine),
        ],
        remarks=[
            *filter(None, [_too_few(needs), _no_money(question, machine)]),
            *_extrapolated(seen for each in found.values() for _, seen in each),
            *_REMARKS,
        ],
    )


def _question(load_rate: float, machine: SimulatedMachine) -> str:
    unit = "GPUs" if machine.gpus else "replicas"
    return (
        f"How many {unit} does a load of {load_rate:,g} requests a second need, if cancellation is "
        "honoured, late, or ignored?"
    )


def _too_few(needs: Sequence[Need]) -> str | None:
    """A high quantile of few requests is the whim of one burst."""
    fewest = min(need.figures.get("ttft_n", 0.0) for need in needs)
    if fewest >= FEWEST_REQUESTS:
        return None
    return (
        f"only {fewest:.0f} requests decide whether a replica holds the goal: let the load last "
        "longer (arrivals.seconds and run.max_seconds)"
    )


def _assumptions(question: Question, machine: SimulatedMachine) -> Iterator[str]:
    if machine.gpus and question.price_hour is not None:
        yield f"a GPU's hour costs {question.price_hour:g}, a month has {HOURS_A_MONTH:g} hours"
    yield (
        "a replica's arrivals are its share of all, independent of the others: a router that looks "
        "at the load may need fewer replicas"
    )


def _no_money(question: Question, machine: SimulatedMachine) -> str | None:
    if not machine.gpus:
        return f"machine {machine.name} has no GPU: replicas are counted, and no money"
    if question.price_hour is None:
        return "no price: state that of a GPU's hour with --price-hour"
    return None


def _extrapolated(runs: Iterable[Seen]) -> list[str]:
    """One remark for each quantity, however many runs went beyond what the machine covers."""
    said = (one.text for seen in runs for one in seen.summary.validity)
    beyond = [one for one in said if one.startswith("extrapolated: ")]
    return list({one.split()[1]: one for one in reversed(beyond)}.values())


def plan_for(config: RunConfig) -> Plan:
    """Raises ConfigError for a workload that the question makes no sense of."""
    resolved = resolve_simulation(config)
    if resolved.arm_runs:
        raise ConfigError(
            f"workload {resolved.workload.name}: has arms; capacity makes three of its own"
        )
    plan = prepare(resolved.workload, resolved)
    workload = plan.workload
    if not isinstance(workload.arrivals, FlatArrivals):
        raise ConfigError(
            f"workload {workload.name}: `arrivals.kind` is `{workload.arrivals.kind}`, and "
            "capacity looks for one rate: take `poisson`, `constant` or `gamma`"
        )
    if workload.engine.faults:
        raise ConfigError(f"workload {workload.name}: `engine.faults`: capacity sets its own")
    return plan


def one_replica(config: RunConfig, treatment: Treatment, rate: float, seed: int) -> RunConfig:
    """The workload at one replica."""
    faults = ", ".join(f'"{one}"' for one in treatment.faults)
    settings = [
        f"arrivals.rate={rate!r}",
        f"run.seed={seed}",
        f"engine.faults=[{faults}]",
        "simulate.replicas=1",
        "simulate.simulated=1",
    ]
    return replace(config, settings=[*config.settings, *settings])
