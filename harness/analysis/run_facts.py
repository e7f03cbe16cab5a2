"""Facts about a run that its rows do not hold, read once from the manifest."""

from dataclasses import dataclass
from typing import Any, Final, Literal

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from harness.records import GAUGES, Trust, has_labels, is_disaggregated
from harness.stats import Bools, Ints
from harness.store.frames import RunFrames

# A source of figures: a log of the server, its configuration, or a condition of the run.
Need = Literal["lifecycle", "clock", "steps", "token lists", "block size", "load", "GPU"]
THIN: Final = "the rows of this simulation are thin: they have no lists of tokens"

ON_CPU: Final = "the engine computes on the CPU"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunFacts:
    """Nanoseconds are of the monotonic clock; nothing of the server is known after
    `observed_until_ns`.

    `no_gpu`: why its GPUs were not read. `idle_before` and `idle_after` map a metric's role to its
    value before the load (0 for a counter that was not there yet) and after the settle time,
    `idle_later` a little later still, each of `idle_loops` (with its time) after one of several
    loops. `missed_to_stay_s` and `missed_to_leave_s` are the waits of requests that an open loop
    never sent, by whether they would have been read to the end. `repeated`: roles that
    each of several pages shows whole. `trust` maps a role to how far the target's description
    believes it, `fallen` a counter's to two readings of one series of which the later is lower: its
    server was started anew, and what it did in all is not known. `lags` maps a role to how old its
    value can be (steps, seconds), `late` to how many steps old it is on average, by kind of change,
    where known. Slots and blocks: of all workers together.
    `says_known_texts`: the server was started with the texts of plan `task` to answer with.
    """

    status: str
    engine: str
    settle_s: float
    clocks_agree: bool
    has_lifecycle: bool
    says_known_texts: bool
    has_steps: bool
    has_token_lists: bool
    has_scrapes: bool
    no_gpu: str | None
    load_started_ns: int
    load_ended_ns: int
    observed_until_ns: int
    slots: int | None
    worker_slots: int | None
    block_size: int | None
    num_blocks: int | None
    idle_before: dict[str, float]
    idle_after: dict[str, float]
    idle_later: dict[str, float]
    idle_loops: list[tuple[int, dict[str, float]]]
    trust: dict[str, Trust]
    metric_names: dict[str, str]
    metric_labels: dict[str, dict[str, str]]
    fallen: dict[str, tuple[float, float]]
    repeated: set[str]
    is_disaggregated: bool
    lags: dict[str, tuple[float, float]]
    late: dict[str, dict[str, float]]
    is_open_loop: bool
    missed_to_stay_s: list[float]
    missed_to_leave_s: list[float]
    held_until_ns: list[int]

    @property
    def load_s(self) -> float:
        return (self.load_ended_ns - self.load_started_ns) / 1e9

    def is_in_load(self, t_ns: Ints) -> Bools:
        return (t_ns >= self.load_started_ns) & (t_ns <= self.load_ended_ns)

    def lacks(self, *needed: Need) -> str | None:
        known: dict[Need, tuple[bool, str]] = {
            "lifecycle": (
                self.has_lifecycle,
                f"{self.engine} gave no lifecycle log: when it noticed, removed and freed a "
                "request is not known",
            ),
            "clock": (
                self.clocks_agree,
                "the server's clock is not the client's: their stamps must not be subtracted",
            ),
            "steps": (self.has_steps, f"{self.engine} gave no step log"),
            "token lists": (self.has_token_lists, THIN),
            "block size": (
                self.block_size is not None,
                f"{self.engine} does not show its block size",
            ),
            "load": (self.load_s > 0, "the load window has no length"),
            "GPU": (self.no_gpu is None, self.no_gpu or ""),
        }
        return next((why for is_there, why in map(known.__getitem__, needed) if not is_there), None)

    @property
    def still_computing(self) -> bool | None:
        """None: not known. A counter at rest proves that the server computed nothing only if it
        moves with every step."""
        for role in ("decode_calls", "generated_tokens"):
            change = _change(self.idle_after, self.idle_later, role)
            if change is not None and change > 0:
                return True
            if change is not None and self.trust.get(role) == "exact":
                return False
        return None

    @property
    def generated_later(self) -> float | None:
        return _change(self.idle_after, self.idle_later, "generated_tokens")

    @property
    def still_there(self) -> float | None:
        """How many more requests the server shows after the settle time; None: not known."""
        running, waiting = self.idle_change("running"), self.idle_change("waiting")
        if running is None or self.trust.get("running") == "stuck":
            return None
        return running + (waiting or 0.0)

    def idle_change(self, role: str) -> float | None:
        if role in self.fallen:
            return None
        return _change(self.idle_before, self.idle_after, role)


def _change(before: dict[str, float], after: dict[str, float], role: str) -> float | None:
    return after[role] - before[role] if role in before and role in after else None


def run_facts(frames: RunFrames) -> RunFacts:
    manifest = frames.manifest
    target = manifest.get("target") or {}
    config, spec = target.get("config") or {}, target.get("spec") or {}
    idle, sources = manifest.get("idle") or {}, spec.get("metrics") or {}
    missed = (manifest.get("arrivals") or {}).get("unsent") or {}
    window = manifest.get("window") or {}
    started_ns, ended_ns = load_window(
        window.get("load_started_ns"), window.get("load_ended_ns"), frames.requests
    )
    before, after = _known(idle.get("before")), _known(idle.get("after"))
    settle_s = manifest.get("settle_s")
    slots = config.get("max_num_seqs") or target.get("slots_found")
    blocks = config.get("num_blocks") or target.get("blocks_found")
    workers = config.get("workers") or ()
    has_two_tiers = is_disaggregated(workers)
    num_workers = max(1, len(workers)) * (1 + has_two_tiers)
    return RunFacts(
        status=manifest.get("status", "complete"),
        engine=target.get("engine") or "the server",
        settle_s=float("inf") if settle_s is None else float(settle_s),
        clocks_agree=bool((manifest.get("clock") or {}).get("comparable", False)),
        has_lifecycle=not frames.lifecycle.empty,
        says_known_texts=config.get("teacher") is not None,
        has_steps=not frames.steps.empty,
        has_token_lists=(manifest.get("simulated") or {}).get("keep") != "thin",
        has_scrapes=not frames.server_metrics.empty,
        no_gpu=_why_no_gpu(config) if frames.gpu.empty else None,
        load_started_ns=started_ns,
        load_ended_ns=ended_ns,
        observed_until_ns=_observed_until(frames, ended_ns),
        slots=None if slots is None else slots * num_workers,
        worker_slots=slots,
        block_size=config.get("block_size"),
        num_blocks=None if blocks is None else blocks * num_workers,
        idle_before=_not_there_yet(before, after) | before,
        idle_after=after,
        idle_later=_known(idle.get("later")),
        idle_loops=[(one["t_ns"], _known(one["values"])) for one in idle.get("loops") or []],
        trust={role: source["trust"] for role, source in sources.items()},
        metric_names={role: source["name"] for role, source in sources.items()},
        metric_labels={role: source.get("labels") or {} for role, source in sources.items()},
        fallen=_fallen(frames.server_metrics, sources),
        is_disaggregated=has_two_tiers,
        repeated={role for role, source in sources.items() if source.get("repeated")},
        lags={
            role: (source.get("lag_steps", 0.0), source.get("lag_s", 0.0))
            for role, source in sources.items()
        },
        late={
            role: source["late_steps"]
            for role, source in sources.items()
            if source.get("late_steps")
        },
        is_open_loop=manifest.get("arrivals") is not None,
        missed_to_stay_s=missed.get("to_stay_s") or [],
        missed_to_leave_s=missed.get("to_leave_s") or [],
        held_until_ns=window.get("held_until_ns") or [],
    )


def load_window(
    started_ns: int | None, ended_ns: int | None, requests: pd.DataFrame
) -> tuple[int, int]:
    if started_ns is None:
        started_ns = 0 if requests.empty else int(requests["sent_ns"].min())
    if ended_ns is None:
        ended_ns = started_ns if requests.empty else int(requests["ended_ns"].max())
    return started_ns, ended_ns


def _observed_until(frames: RunFrames, load_ended_ns: int) -> int:
    settled = (frames.manifest.get("window") or {}).get("settled_ns")
    if settled is not None and frames.manifest.get("status") != "target_failed":
        return int(settled)
    seen = pd.concat([frames.lifecycle["t_ns"], frames.steps["ended_ns"]])
    return load_ended_ns if seen.empty else int(seen.max())


def _not_there_yet(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {role: 0.0 for role in after if before and role not in before and role not in GAUGES}


def _fallen(
    samples: pd.DataFrame, sources: dict[str, dict[str, Any]]
) -> dict[str, tuple[float, float]]:
    found = {}
    for role, source in sources.items():
        of_role = samples[samples["name"] == source["name"]]
        if role in GAUGES or of_role.empty:
            continue
        wanted = source.get("labels") or {}
        of_role = of_role[[has_labels(labels, wanted) for labels in of_role["labels"]]]
        began_ns = of_role["t_ns"] - of_role["duration_ns"] // 2
        in_order = of_role.iloc[began_ns.argsort(kind="stable").to_numpy()]
        for _, values in in_order.groupby("labels")["value"]:
            falls = values.diff() < 0
            if falls.any():
                lower = int(falls.to_numpy().argmax())
                found[role] = (float(values.iloc[lower - 1]), float(values.iloc[lower]))
    return found


def _why_no_gpu(config: dict[str, Any]) -> str:
    return ON_CPU if config.get("device") == "cpu" else "no GPU of the server was watched"


def _known(values: dict[str, Any] | None) -> dict[str, float]:
    return {role: float(value) for role, value in (values or {}).items() if value is not None}


def is_among(ids: pd.Series, known: pd.Series | pd.Index) -> Bools:
    values = pa.array(known, type=pa.string(), from_pandas=True)
    asked = pa.array(ids, type=pa.string(), from_pandas=True)
    found: Bools = pc.is_in(asked, value_set=values, skip_nulls=True).to_numpy(zero_copy_only=False)
    return found
