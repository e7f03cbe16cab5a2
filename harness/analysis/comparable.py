"""May two runs be compared at all, and what must be said beside their figures if so?

Refused is what has no common question: another workload. Told, as a warning, is what moves figures
without being the server's doing: another load, model, number of slots, machine, way of watching. A
difference that one may have meant (another seed, other settings of the engine) is information.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from harness.formatting import quantity
from harness.metrics import METRICS
from harness.records import Metric, Remark

STEP_TOLERANCE: Final = 0.1  # steps that differ by more are another speed, not noise
MOST_KEYS: Final = 6
OF_SPEED: Final = frozenset({"cpu", "cores", "gpus"})  # of the hardware
SAID_OR_MEANINGLESS: Final = frozenset({"model", "max_num_seqs", "frontend_pid", "worker_pid"})
# Figures that rest on how tokens were counted.
OF_TOKENS: Final = frozenset(one.name for one in METRICS.values() if one.of_tokens)


def why_not_at_all(baseline: Mapping[str, Any], candidate: Mapping[str, Any]) -> str | None:
    """Why two runs have no common question, by their manifests; None where they have one."""
    first, second = (one["workload"].get("name") for one in (baseline, candidate))
    if first != second:
        return f"they are of different workloads, `{first}` and `{second}`"
    kinds = [(one["workload"].get("load") or {}).get("kind") for one in (baseline, candidate)]
    if kinds[0] != kinds[1]:
        return f"their loads are of different kinds, `{kinds[0]}` and `{kinds[1]}`"
    return None


def manifest_remarks(baseline: Mapping[str, Any], candidate: Mapping[str, Any]) -> Iterator[Remark]:
    """What the manifests say against taking the figures as they are."""
    for section in ("load", "arrivals", "run", "settle", "collect"):
        keys = _changed(baseline["workload"].get(section), candidate["workload"].get(section))
        keys.pop("seed", None)
        if keys:
            yield _warning(f"not the same [{section}]: {_listed(keys)}")
    yield from _of_targets(baseline.get("target") or {}, candidate.get("target") or {})
    hardware = _changed(baseline.get("hardware"), candidate.get("hardware"))
    if machine := {key: both for key, both in hardware.items() if key in OF_SPEED}:
        yield _warning(f"different machines ({_listed(machine)}): trust figures in steps and rates")
    if baseline["seed"] != candidate["seed"]:
        yield _info(f"different seeds: {baseline['seed']} and {candidate['seed']}")
    if versions := _changed(baseline.get("versions"), candidate.get("versions")):
        yield _info(f"different versions: {_listed(versions)}")


def _of_targets(baseline: Mapping[str, Any], candidate: Mapping[str, Any]) -> Iterator[Remark]:
    for key, what in (("engine", "kinds of server"), ("model", "models")):
        if baseline.get(key) != candidate.get(key):
            yield _warning(f"different {what}: {baseline.get(key)} and {candidate.get(key)}")
    if baseline.get("version") != candidate.get("version"):
        first, second = (one.get("version") or "not known" for one in (baseline, candidate))
        yield _info(f"different versions of the server: {first} and {second}")
    slots = _slots(baseline), _slots(candidate)
    if slots[0] != slots[1]:
        first, second = (one or "not known" for one in slots)
        yield _warning(
            f"different numbers of batch slots: {first} and {second}: who waits, and how long, "
            "follows from them"
        )
    config = _changed(baseline.get("config"), candidate.get("config"))
    if settings := {key: both for key, both in config.items() if key not in SAID_OR_MEANINGLESS}:
        yield _info(f"the engine is set up differently: {_listed(settings)}")


def summary_remarks(baseline: Mapping[str, Any], candidate: Mapping[str, Any]) -> Iterator[Remark]:
    """What the summaries say of themselves: unfinished or invalid runs."""
    for which, summary in (("baseline", baseline), ("candidate", candidate)):
        if summary.get("status") != "complete":
            yield _warning(f"the {which} is not complete: {summary.get('status')}")
        for said in summary.get("validity", []):
            if said["level"] == "invalid":
                yield Remark(level="invalid", text=f"the {which}: {said['text']}")


def counting_remark(baseline: str | None, candidate: str | None) -> Remark | None:
    """Said where tokens do not mean the same in both (`token_counting` of their summaries)."""
    if is_counted_alike(baseline, candidate):
        return None
    return _warning(
        f"tokens are counted differently, by {baseline} and by {candidate}: no figure of tokens is "
        "compared"
    )


def is_counted_alike(first: str | None, second: str | None) -> bool:
    """Do tokens mean the same in both? Where a summary does not say, they are taken to."""
    return None in (first, second) or first == second


def step_remark(baseline: Metric | None, candidate: Metric | None) -> Remark | None:
    """Said where the steps of the two engines are not about as long."""
    if baseline is None or candidate is None or not baseline.p50 or not candidate.p50:
        return None
    if abs(candidate.p50 / baseline.p50 - 1) <= STEP_TOLERANCE:
        return None
    return _warning(
        f"a step takes {quantity(baseline.p50, 's')} and {quantity(candidate.p50, 's')}: of times "
        "trust what is so both as measured and in steps"
    )


def _slots(target: Mapping[str, Any]) -> int | None:
    slots: int | None = (target.get("config") or {}).get("max_num_seqs")
    return slots or target.get("slots_found")


def _changed(
    first: Mapping[str, Any] | None, second: Mapping[str, Any] | None
) -> dict[str, tuple[Any, Any]]:
    """The keys with different values, and both."""
    first, second = first or {}, second or {}
    return {
        key: (first.get(key), second.get(key))
        for key in dict.fromkeys([*first, *second])
        if first.get(key) != second.get(key)
    }


def _listed(keys: Mapping[str, tuple[Any, Any]]) -> str:
    flat = dict(_leaves(keys))
    shown = [f"{key} {was} / {now}" for key, (was, now) in list(flat.items())[:MOST_KEYS]]
    more = len(flat) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def _leaves(keys: Mapping[str, tuple[Any, Any]]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Of tables only what differs in them."""
    for key, (was, now) in keys.items():
        if isinstance(was, Mapping) and isinstance(now, Mapping):
            inner = _changed(was, now)
            yield from ((f"{key}.{name}", pair) for name, pair in _leaves(inner))
        else:
            yield key, (was, now)


def _warning(text: str) -> Remark:
    return Remark(level="warning", text=text)


def _info(text: str) -> Remark:
    return Remark(level="info", text=text)
