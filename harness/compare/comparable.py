"""May two figures be compared, and may two runs?

Figures: `why_not_figures` is the one rule of arms, `walkaway compare`, `walkaway trend` and the
gate. Runs: `walkaway compare` refuses only runs that ask different questions (`why_not_runs`) and
remarks on all else that moves figures. The gate, and a line of a trend, take only runs under equal
`Conditions` (`why_not_conditions`), and times only from one machine (`other_machine`). A line of a
trend also ends where the engine's faults or speed change (`ends_line`).
"""

import re
from collections.abc import Collection, Container, Iterator, Mapping
from typing import Any, Final

import msgspec

from harness.formatting import quantity
from harness.metrics import METRICS
from harness.records import ArmsSummary, ArmSummary, Metric, Remark, Summary, num_slots

STEP_TOLERANCE: Final = 0.1  # steps that differ by more are another speed, not noise
MOST_KEYS: Final = 6
SPEED_OF_MACHINE: Final = frozenset({"cpu", "cores", "gpus"})
SPEED_OF_ENGINE: Final = ("runner", "step_cost")  # its settings that make its speed
SAID_OR_MEANINGLESS: Final = frozenset(
    {"model", "max_num_seqs", "frontend_pid", "worker_pid", "name"}
)
_ONLY: Final = {"frontends": "frontend-0", "workers": "worker-0"}
# The demand on the server. Its own settings (`[engine]`) are not part of it: they are judged.
DEMAND: Final = ("run", "load", "arrivals")
NO_DEMAND: Final = ("seed", "rounds", "reference_arm")  # keys of [run]
BOUNDS: Final = {"point": "a value", "lower": "a lower bound", "upper": "an upper bound"}


def why_not_figures(
    name: str, first: Metric, second: Metric, counting: tuple[str | None, str | None]
) -> str | None:
    """`counting`: how each side counted its tokens; None: assumed to count alike."""
    if METRICS[name].of_tokens and not _are_counted_alike(*counting):
        return f"tokens are counted by {counting[0]} and by {counting[1]}"
    if first.method != second.method:
        return f"measured by {first.method} and by {second.method}"
    if first.bound != second.bound:
        return f"one is {BOUNDS[first.bound]}, the other {BOUNDS[second.bound]}"
    if first.of != second.of:
        return f"one is of {first.of or 'all'}, the other of {second.of or 'all'}"
    return None


def _are_counted_alike(first: str | None, second: str | None) -> bool:
    return None in (first, second) or first == second


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """The conditions on which the figures of a run, or of one of its arms, depend. `machine`: the
    processor, cores, GPUs and device, on which times depend, but steps do not."""

    workload: str
    engine: str | None
    model: str | None
    slots: int | None
    demand: dict[str, Any]
    machine: dict[str, Any]


def conditions_of(manifest: Mapping[str, Any], summary: Summary | ArmsSummary) -> Conditions:
    workload = manifest["workload"]
    target = manifest.get("target") or {}
    demand = {section: dict(workload.get(section) or {}) for section in DEMAND}  # collected: none
    for key in NO_DEMAND:
        demand["run"].pop(key, None)
    if (cluster := workload.get("simulate")) is not None:
        demand["simulate"] = dict(cluster)
    return Conditions(
        workload=str(summary.workload),
        engine=target.get("engine", summary.engine),
        model=target.get("model", summary.model),
        slots=_slots(target),
        demand=demand,
        machine=_machine_of(manifest),
    )


def _machine_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Times of a simulation depend on its cost model, and not on the machine that computed it."""
    if (simulated := manifest.get("simulated")) is not None:
        return {"cpu": f"cost model {simulated['cost_model']}", **simulated["machine"]["cost"]}
    hardware, target = manifest["hardware"], manifest.get("target") or {}
    return {
        "cpu": hardware.get("cpu"),
        "cores": hardware.get("cores"),
        "gpus": hardware.get("gpus"),
        "device": (target.get("config") or {}).get("device"),
    }


def why_not_conditions(mine: Conditions, baseline: Conditions) -> str | None:
    for name in ("engine", "model", "slots"):
        here, there = getattr(mine, name), getattr(baseline, name)
        if here != there:
            return f"the {name} of the baseline: {there}; of this run: {here}"
    for section, there in baseline.demand.items():
        here = mine.demand.get(section, {})
        for key in sorted({*there, *here}):
            if key not in there or key not in here:
                which = "run" if key in there else "baseline"
                return f"the {which} does not know `{section}.{key}`: save the baseline again"
            if here[key] != there[key]:
                return f"`{section}.{key}` of the baseline: {there[key]}; of this run: {here[key]}"
    return None


def other_machine(mine: Conditions, baseline: Conditions) -> str | None:
    return None if mine.machine == baseline.machine else machine_in_words(baseline)


def machine_in_words(conditions: Conditions) -> str:
    machine = conditions.machine
    cores = machine.get("cores")
    parts = [machine.get("cpu"), cores and f"{cores} cores", *(machine.get("gpus") or [])]
    return ", ".join(str(part) for part in parts if part)


def depends_on_machine(unit: str) -> bool:
    return unit in ("s", "rps", "tokens/s", "block seconds", "W", "J")


def ends_line(
    before: Conditions,
    after: Conditions,
    configs: tuple[Mapping[str, Any], Mapping[str, Any]],
    unit: str,
) -> bool:
    """Whether the line of a trend ends between two runs; `configs`: the settings of their servers.

    Only faults that are on count, since a newer engine has more of them.
    """
    first, second = configs
    if why_not_conditions(after, before) or _faults(first) != _faults(second):
        return True
    is_as_fast = other_machine(after, before) is None and all(
        first.get(key) == second.get(key) for key in SPEED_OF_ENGINE
    )
    return depends_on_machine(unit) and not is_as_fast


def _faults(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in (config.get("faults") or {}).items() if value}


def why_not_runs(baseline: Mapping[str, Any], candidate: Mapping[str, Any]) -> str | None:
    first, second = baseline["workload"], candidate["workload"]
    if first.get("name") != second.get("name"):
        names = f"`{first.get('name')}` and `{second.get('name')}`"
        return f"they are of different workloads, {names}"
    kinds = [(one.get("load") or {}).get("kind") for one in (first, second)]
    if kinds[0] != kinds[1]:
        return f"their loads are of different kinds, `{kinds[0]}` and `{kinds[1]}`"
    return None


def why_not_arms(baseline: Collection[str], candidate: Collection[str]) -> str | None:
    if bool(baseline) != bool(candidate):
        return "only one of them has arms; name one of the runs in rounds/"
    if baseline and not {*baseline} & {*candidate}:
        return f"they have no arm in common ({', '.join(baseline)} and {', '.join(candidate)})"
    return None


def manifest_remarks(baseline: Mapping[str, Any], candidate: Mapping[str, Any]) -> Iterator[Remark]:
    are_simulated = [one.get("simulated") is not None for one in (baseline, candidate)]
    if any(are_simulated) and not all(are_simulated):
        which = "baseline" if are_simulated[0] else "candidate"
        yield _warning(
            f"the {which} is simulated, and the other ran live: a difference may be an error of "
            "the cost model"
        )
    for section in ("load", "arrivals", "simulate", "run", "settle", "collect"):
        keys = _changed(baseline["workload"].get(section), candidate["workload"].get(section))
        keys.pop("seed", None)
        if keys:
            yield _warning(f"different [{section}]: {_listed(keys)}")
    yield from _target_remarks(baseline.get("target") or {}, candidate.get("target") or {})
    hardware = _changed(baseline.get("hardware"), candidate.get("hardware"))
    if all(are_simulated):
        hardware = {}
    if machine := {key: both for key, both in hardware.items() if key in SPEED_OF_MACHINE}:
        yield _warning(f"different machines ({_listed(machine)}): trust figures in steps and rates")
    if baseline["seed"] != candidate["seed"]:
        yield _info(f"different seeds: {baseline['seed']} and {candidate['seed']}")
    if changed := _changed(baseline.get("versions"), candidate.get("versions")):
        yield _info(f"different versions: {_listed(changed)}")


def _target_remarks(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[Remark]:
    for key, what in (("engine", "kinds of server"), ("model", "models")):
        if _without_part(first.get(key)) != _without_part(second.get(key)):
            yield _warning(f"different {what}: {first.get(key)} and {second.get(key)}")
    if versions := _changed_in("version", first, second):
        yield _info(f"different versions of the server: {versions}")
    slots = ({"slots": _slots(one)} for one in (first, second))
    if numbers := _changed_in("slots", *slots):
        yield _warning(f"different numbers of batch slots: {numbers}: waiting times depend on them")
    config = _changed(_settings(first), _settings(second), without=SAID_OR_MEANINGLESS)
    if config:
        yield _info(f"the engine is set up differently: {_listed(config)}")


def summary_remarks(
    baseline: Summary | ArmsSummary, candidate: Summary | ArmsSummary
) -> Iterator[Remark]:
    for which, summary in (("baseline", baseline), ("candidate", candidate)):
        if summary.status != "complete":
            yield _warning(f"the {which} is not complete: {summary.status}")
        for said in summary.validity:
            if said.level == "invalid":
                yield Remark(level="invalid", text=f"the {which}: {said.text}")


def figure_remarks(
    baseline: Summary | ArmSummary, candidate: Summary | ArmSummary
) -> Iterator[Remark]:
    counting = baseline.token_counting, candidate.token_counting
    if not _are_counted_alike(*counting):
        how = f"tokens are counted by {counting[0]} and by {counting[1]}"
        yield _warning(f"{how}: no figure of tokens is compared")
    steps = (one.metrics.get("step_s") for one in (baseline, candidate))
    first, second = (None if step is None else step.p50 for step in steps)
    if first and second and abs(second / first - 1) > STEP_TOLERANCE:
        yield _warning(
            f"a step takes {quantity(first, 's')} and {quantity(second, 's')}: trust a "
            "difference of times only if it holds both as measured and in steps"
        )


def _without_part(name: str | None) -> str | None:
    """How many replicas of a simulation were computed is no property of its engine."""
    return name and re.sub(r", \d+ of [\d,]+ replicas\)$", ")", name)


def _settings(target: Mapping[str, Any]) -> dict[str, Any]:
    """Processes without their pids; a run from before there were several names none."""
    config = target.get("config") or {}
    named = {kind: sorted(config.get(kind) or [one]) for kind, one in _ONLY.items()}
    return {**config, **named}


def _slots(target: Mapping[str, Any]) -> int | None:
    return num_slots(target.get("config"), target.get("slots_found"))


def _changed_in(key: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> str | None:
    if first.get(key) == second.get(key):
        return None
    return " and ".join(str(one.get(key) or "not known") for one in (first, second))


def _changed(
    first: Mapping[str, Any] | None, second: Mapping[str, Any] | None, without: Container[str] = ()
) -> dict[str, tuple[Any, Any]]:
    first, second = first or {}, second or {}
    return {
        key: (first.get(key), second.get(key))
        for key in dict.fromkeys([*first, *second])
        if key not in without and first.get(key) != second.get(key)
    }


def _listed(keys: Mapping[str, tuple[Any, Any]]) -> str:
    shown = [f"{key} {was} / {now}" for key, (was, now) in _leaves(keys)]
    more = f" and {len(shown) - MOST_KEYS} more" if len(shown) > MOST_KEYS else ""
    return ", ".join(shown[:MOST_KEYS]) + more


def _leaves(keys: Mapping[str, tuple[Any, Any]]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for key, (was, now) in keys.items():
        if isinstance(was, Mapping) and isinstance(now, Mapping):
            yield from ((f"{key}.{name}", pair) for name, pair in _leaves(_changed(was, now)))
        else:
            yield key, (was, now)


def _warning(text: str) -> Remark:
    return Remark(level="warning", text=text)


def _info(text: str) -> Remark:
    return Remark(level="info", text=text)
