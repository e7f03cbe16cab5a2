"""One simulated run: plan it, have it computed, collect it. The result is a run's folder like any
other.

The plan is `simulation.json`; `python -m harness.simulate FOLDER` computes it, and the run's tables
are joined from its cells' tables.
"""

import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import msgspec

from harness.errors import ConfigError, InterruptedRunError, TargetError, WalkawayError
from harness.formatting import quantity
from harness.records import Protocol, Simulated
from harness.run.load_plan import fit_to_trace, make_load
from harness.run.pipeline import FinishedRun, ReportProcess, finish, write_summary
from harness.run.process import Child, Interruption, python_module
from harness.run.progress import PLAIN_EVERY_S, Progress
from harness.run.run_config import ResolvedRun, RunConfig, resolve_run
from harness.run.run_state import begin_manifest, choose_folder
from harness.run.server import Server
from harness.run.settle import settle_seconds, silence_seconds
from harness.simulate.cells import cell_folders, join_cells, load_window, read_facts, seen_by
from harness.simulate.machine import LIVE_SIMULATED, SimulatedMachine, load_machine
from harness.simulate.plan import SIMULATION, Plan
from harness.simulate.rows import CellFacts, Gauges
from harness.store.manifest import (
    ClockCheck,
    Idle,
    Manifest,
    MissedArrivals,
    ScheduledArrivals,
    Simulation,
    TargetFacts,
    status_after,
)
from harness.store.run_folder import RunFolder
from harness.workload.abandon import StayPlan
from harness.workload.cluster import ClusterSettings
from harness.workload.load import AbandonLoad
from harness.workload.target import Target
from harness.workload.workload import EngineSettings, Workload, as_plain_data
from reference_engine.config import FrontendSettings

POLL_S: Final = 0.1
_TERMS: Final = {
    "sim_fixed_ms": "fixed_s",
    "sim_prefill_token_ms": "prefill_token_s",
    "sim_decode_token_ms": "decode_token_s",
    "sim_context_token_ms": "context_token_s",
    "sim_swap_block_ms": "swap_block_s",
}
_INTERRUPTED: Final = (InterruptedRunError.exit_code, -signal.SIGINT)  # the latter at its start
_OF_A_MODEL: Final = (
    *("model", "dtype", "compile", "batch_invariant"),
    *("kv_cache_memory", "gpu_memory_utilization"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Computing:
    """Where the cells are computed: in processes of this machine, or by Ray at an address."""

    processes: int = 1
    ray: str | None = None

    @property
    def flags(self) -> list[str]:
        if self.ray is not None:
            return ["--ray", self.ray]
        return ["--processes", str(self.processes)]


def resolve_simulation(config: RunConfig) -> ResolvedRun:
    """Read and check all that can be checked before anything is written. Raises ConfigError."""
    resolved = resolve_run(config, simulates=True)
    for run in resolved.arm_runs:
        if run.target is not None:
            raise ConfigError(
                f"arm `{run.arm}` has a server of its own, and a simulation has none: leave out "
                "its `target`"
            )
    for workload in [run.workload for run in resolved.arm_runs] or [resolved.workload]:
        prepare(workload, resolved)
    return resolved


def prepare(workload: Workload, resolved: ResolvedRun) -> Plan:
    """Raises ConfigError."""
    cluster = workload.simulate or ClusterSettings()
    machine = _machine_of(workload, cluster)
    engine = _engine_of(workload.engine, machine)
    workload = workload.model_copy(update={"engine": engine, "simulate": cluster})
    assert machine.lags is not None
    _refuse_unknown(workload, machine.lags.detect_s)
    server = _stand_in(engine, cluster)
    load = make_load(workload, resolved.target, server, resolved.folder)
    load, arrivals = fit_to_trace(workload, load, server, resolved.folder)
    plan = Plan(
        workload=workload.model_copy(update={"load": load, "arrivals": arrivals}),
        machine=machine,
        arm=resolved.arm,
        settle_s=_settle_s(workload, machine, resolved.target),
    )
    assert plan.engine is not None  # what it refuses is refused now
    assert plan.faults is not None
    return plan


def _settle_s(workload: Workload, machine: SimulatedMachine, target: Target) -> float:
    slots = workload.engine.max_num_seqs or 1
    step_s = machine.cost.step_s(prefill=0, decode=slots, context=0)
    return settle_seconds(target, workload.settle, step_s) + silence_seconds(target, workload)


def _refuse_unknown(workload: Workload, ways: Collection[str]) -> None:
    """Raises ConfigError for what a simulation cannot do; `ways`: of leaving, with known lags."""
    why = next(_refusals(workload, ways), None)
    if why is not None:
        raise ConfigError(f"workload {workload.name} cannot be simulated: {why}")


def _refusals(workload: Workload, ways: Collection[str]) -> Iterator[str]:
    load = workload.load
    if not isinstance(load, AbandonLoad):
        yield f"a load of kind `{load.kind}` is directed by what it sees; only `abandon` is planned"
        return
    engine, run = workload.engine, workload.run
    for key, is_set, what in (
        ("load.canaries", load.canaries, "no text is made, so there is no known answer"),
        ("load.kill", load.kill is not None, "take `[[simulate.outages]]`"),
        ("load.protocol", load.protocol is Protocol.GRPC, "the way over gRPC was not measured"),
        ("run.loops", run.loops > 1, "each simulation begins anew"),
        ("engine.workers", engine.has_tiers, "take `simulate.replicas`"),
    ):
        if is_set:
            yield f"`{key}`: {what}"
    for plan in load.leavers:
        if plan.n > 1:
            yield f"plan `{plan.plan}`: `n` is {plan.n}, and a simulated request has one answer"
        if plan.documents > 1:
            yield f"plan `{plan.plan}`: `documents`: the bundled engine neither embeds nor ranks"
        if not isinstance(plan, StayPlan) and plan.way.value not in ways:
            known = ", ".join(sorted(ways))
            yield f"way `{plan.way}`: the lags have no `detect_s` of it; they have: {known}"


def _machine_of(workload: Workload, cluster: ClusterSettings) -> SimulatedMachine:
    machine = load_machine(cluster.machine or LIVE_SIMULATED)
    if not machine.adds_to_stated:
        return machine
    if workload.engine.runner != "simulated":
        raise ConfigError(
            f"workload {workload.name}: `engine.runner` is `{workload.engine.runner}`, and machine "
            f"{machine.name} only adds to what `engine.sim_*` say a step takes: name a machine of "
            "another kind with --machine, or --set engine.runner=simulated"
        )
    stated = {key: getattr(workload.engine, key) for key in _TERMS}
    own = {key: value for key, value in stated.items() if value is not None}
    if own.get("sim_fixed_ms") == 0:
        raise ConfigError(
            f"workload {workload.name}: `engine.sim_fixed_ms` is 0: a step without any length "
            "would let time stand still; give it one"
        )
    name = ", ".join(f"{key}={value:g}" for key, value in own.items())
    return machine.on_top_of(
        {_TERMS[key]: value / 1e3 for key, value in own.items()}, name=name or machine.name
    )


def _engine_of(engine: EngineSettings, machine: SimulatedMachine) -> EngineSettings:
    stated = machine.engine.model_dump(exclude_none=True)
    defaults = {key: value for key, value in stated.items() if getattr(engine, key) is None}
    cost = {key: getattr(machine.cost, term) * 1e3 for key, term in _TERMS.items()}
    neutral = {"runner": "simulated", "device": "auto", **dict.fromkeys(_OF_A_MODEL)}
    return engine.model_copy(update={**defaults, **cost, **neutral})


def _stand_in(engine: EngineSettings, cluster: ClusterSettings) -> Server:
    """The facts known of the engine, where a run has a server's answer."""
    config: dict[str, Any] = {"max_model_len": engine.max_model_len}
    if engine.max_num_seqs is not None:
        config["max_num_seqs"] = engine.max_num_seqs
        config["workers"] = [f"worker-{number}" for number in range(cluster.replicas)]
    return Server(url="", model="", config=config, engine=None)


def simulate_all(
    resolved: ResolvedRun, *, progress: Progress, interruption: Interruption, computing: Computing
) -> FinishedRun:
    """The one run, or all rounds of all arms."""
    one = partial(simulate, computing=computing)
    if not resolved.arm_runs:
        return one(resolved, progress=progress, interruption=interruption)
    from harness.run.rounds import execute_rounds  # analysis takes a second to import

    return execute_rounds(resolved, progress=progress, interruption=interruption, execute=one)


def simulate(
    resolved: ResolvedRun,
    /,
    *,
    progress: Progress,
    interruption: Interruption,
    computing: Computing,
    draws: bool = True,
) -> FinishedRun:
    """Raises ConfigError and TargetError if nothing was simulated; then nothing is left."""
    plan = prepare(resolved.workload, resolved)
    folder = RunFolder.claim(choose_folder(resolved))
    manifest = _begin(resolved, plan, folder)
    try:
        failure = _compute(plan, folder, progress, interruption, computing)
    except KeyboardInterrupt as error:  # the second Ctrl-C
        shutil.rmtree(folder.path)
        raise InterruptedRunError("interrupted: nothing was kept") from error
    except WalkawayError:
        shutil.rmtree(folder.path)
        raise
    progress.phase("collecting what was simulated")
    _collect(plan, resolved.target, folder, manifest, failure)
    summary = write_summary(folder)
    if draws:
        progress.phase("drawing the report")
    with ReportProcess(folder) as report:
        finished = finish(folder, summary, failure, report if draws else None)
    progress.close()
    return finished


def _begin(resolved: ResolvedRun, plan: Plan, folder: RunFolder) -> Manifest:
    machine, cluster = plan.machine, plan.cluster
    manifest = begin_manifest(resolved, run_id=folder.name)
    manifest.workload = as_plain_data(plan.workload)
    manifest.settle_s = plan.settle_s
    manifest.scrape_interval_s = None
    manifest.clock = ClockCheck(name="virtual time", comparable=True)
    manifest.simulated = Simulation(
        cost_model=machine.name,
        replicas=cluster.replicas,
        simulated=cluster.num_simulated,
        machine=as_plain_data(machine),
        router=cluster.router,
        keep=cluster.keep,
    )
    folder.write_manifest(manifest)
    return manifest


def _compute(
    plan: Plan,
    folder: RunFolder,
    progress: Progress,
    interruption: Interruption,
    computing: Computing,
) -> WalkawayError | None:
    """Returns the interruption, if some of it was kept. Raises if there is nothing to keep."""
    plan.write(folder.path)
    progress.phase("simulating")
    command = python_module(
        "harness.simulate", str(folder.path), "--exit-with-stdin", *computing.flags
    )
    log = folder.log("simulation")
    with Child("simulation", command, log) as child:
        code = _watch(child, progress, interruption)
    said = _last_words(child)
    if code == ConfigError.exit_code:
        raise ConfigError(said)
    if code not in (0, *_INTERRUPTED):
        has_said_why = code == TargetError.exit_code
        raise TargetError(
            said if has_said_why else f"the simulation ended with code {code}: {said}"
        )
    cells = read_facts(cell_folders(folder.path))
    if code == 0 and not any(cell.planned for cell in cells):
        raise ConfigError(f"workload {plan.workload.name}: no request is planned")
    if code == 0:
        return None
    if not cells:
        raise InterruptedRunError("interrupted before anything was simulated")
    num_cells, load_s = plan.num_cells, plan.load_s
    whole = sum(cell.complete for cell in cells)
    reached_s = min([load_s, *(cell.reached_s for cell in cells)])
    if len(cells) < num_cells:  # one has not begun
        reached_s = 0.0
    return InterruptedRunError(
        f"interrupted when virtual time had come to {reached_s:,.1f} s of {load_s:,.0f} s"
        + (f", and {whole} of {num_cells} cells were whole" if num_cells > 1 else "")
    )


def _watch(child: Child, progress: Progress, interruption: Interruption) -> int:
    shown = Shown(progress)
    is_asked = False
    while (code := child.wait(POLL_S)) is None:
        if interruption.requested and not is_asked:
            os.kill(child.pid, signal.SIGINT)
            is_asked = True
        shown.show(child.lines())
    return code


class Shown:
    """Shows the latest line of progress every few seconds."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._next_s = PLAIN_EVERY_S

    def show(self, lines: Sequence[str]) -> None:
        line = next((one for one in reversed(lines) if one.startswith("{")), None)
        if line is None:
            return
        try:
            seen = json.loads(line)
        except ValueError:  # half a line yet
            return
        if seen["elapsed_s"] < self._next_s:
            return
        self._next_s = seen["elapsed_s"] + PLAIN_EVERY_S
        left_s = seen["elapsed_s"] * max(seen["of_s"] / max(seen["virtual_s"], 1e-9) - 1, 0.0)
        self._progress.pace(
            f"{seen['virtual_s']:,.0f} s of {seen['of_s']:,.0f} s simulated, about "
            f"{quantity(round(left_s), 's')} left: {seen['requests']:,} requests; the "
            f"simulator's own rate, no server's: {seen['tokens_per_s']:,} tokens a second"
        )


def _last_words(child: Child) -> str:
    said = [line for line in child.lines() if line and not line.startswith("{")]
    return (said or ["it said nothing"])[-1].removeprefix("walkaway simulate: ")


def _collect(
    plan: Plan,
    target: Target,
    folder: RunFolder,
    manifest: Manifest,
    failure: WalkawayError | None,
) -> None:
    cells = read_facts(cell_folders(folder.path))
    join_cells(folder)
    assert manifest.simulated is not None
    manifest.simulated = simulated = msgspec.structs.replace(
        manifest.simulated,
        simulated=plan.replicas_of_cell * len(cells),
        reached_s=min(cell.reached_s for cell in cells),
    )
    manifest.target = _target(plan, target, simulated, cells)
    manifest.idle = _idle(cells)
    beyond = plan.machine.range.beyond(seen_by(folder.path / "steps.parquet"))
    extrapolated = [f"extrapolated: {one}" for one in beyond]
    manifest.notes = list(dict.fromkeys(note for cell in cells for note in cell.notes))
    if plan.machine.adds_to_stated:  # it knows most of a step's length from the workload
        manifest.notes += extrapolated
    else:
        manifest.warnings = extrapolated
    if (window := load_window(folder.path / "requests.parquet")) is not None:
        manifest.window.load_started_ns, manifest.window.load_ended_ns = window
    manifest.window.settled_ns = max(cell.reached_ns for cell in cells)
    if plan.arrivals is not None:
        manifest.arrivals = ScheduledArrivals(
            planned=sum(cell.planned for cell in cells),
            max_streams=plan.arrivals.max_streams,
            missed=MissedArrivals(
                to_stay_s=[one_s for cell in cells for one_s in cell.missed_to_stay_s],
                to_leave_s=[one_s for cell in cells for one_s in cell.missed_to_leave_s],
            ),
        )
    manifest.status = status_after(failure)
    folder.write_manifest(manifest)


def _target(
    plan: Plan, target: Target, simulated: Simulated, cells: Sequence[CellFacts]
) -> TargetFacts:
    return TargetFacts(
        engine=f"{target.name}, {simulated}",
        url="",
        metrics_urls=[],
        model=plan.machine.model or "none",
        started_by_us=True,
        spec=as_plain_data(target),
        config=_engine_config(plan, [one.worker for cell in cells for one in cell.before]),
    )


def _engine_config(plan: Plan, workers: Sequence[str]) -> dict[str, Any]:
    """What a live engine says at /walkaway/config, as far as there is one here."""
    config: dict[str, Any] = msgspec.to_builtins(plan.engine)
    config["faults"] = msgspec.to_builtins(plan.faults)
    config["frontend"] = FrontendSettings().shown()
    config["bytes_are_tokens"] = True
    if plan.texts:
        config["teacher"] = SIMULATION
    return config | {"workers": list(workers)}


def _idle(cells: Sequence[CellFacts]) -> Idle:
    """Sums over the replicas that are still there. After an interruption none is at rest."""
    after = {one.worker: one for cell in cells if cell.complete for one in cell.after}
    before = (one for cell in cells for one in cell.before if one.worker in after)
    return Idle(before=_sum(before), after=_sum(after.values()))


def _sum(gauges: Iterable[Gauges]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for one in gauges:
        total.update(running=one.running, waiting=one.waiting, free_blocks=one.free_blocks)
    return {role: float(value) for role, value in total.items()}
