"""Which figure each fault of the bundled engine must move, and between which limits.

A case is measured twice in the same way: on a correct engine and on one with the fault. Both
readings have limits, and these do not meet.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tests.e2e.running import Run
from tests.reference_engine.running_engine import post_raw, running
from tests.truth.engine_log import Log
from tests.truth.fault_runs import ABANDONS, STEP_S, FaultRuns

DELAY_S = 0.1
TIMER_S = 0.001  # the frontend's event loop counts in milliseconds, and may be early by one
LOST_SHARE = 0.3
LEAKED = 2

Limits = tuple[float, float]
Reading = Callable[[FaultRuns, str], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A fault, the figure that it moves (in words), and where that lies without it and with it."""

    fault: str
    setting: str = ""
    figure: str
    read: Reading
    clean: Limits
    faulty: Limits

    @property
    def argument(self) -> str:
        return f"{self.fault}={self.setting}" if self.setting else self.fault


def of_metric(name: str, key: str = "mean") -> Reading:
    """A figure of the summary, by its name."""

    def read(runs: FaultRuns, fault: str) -> float:
        return float(runs.good(fault).metrics[name][key])

    return read


def ghosts(runs: FaultRuns, fault: str) -> float:
    return float(runs.with_short_answers(fault).metrics["ghost_rate"]["mean"])


def ghosts_without_a_token(runs: FaultRuns, fault: str) -> float:
    """Of those who left in the queue or during their prefill, and had no token either when the
    server saw it."""
    run = runs.with_short_answers(fault)
    phases = run.summary["breakdown"]["cancel_latency_by_phase"]
    early = [one["cancel_latency_s"] for one in phases if one["phase"] in ("waiting", "prefill")]
    n = sum(one["n"] for one in early) - Log(run).stopped_with_a_first_token()
    return float(sum(one["n_censored"] for one in early) / n)


def ghosts_of_unary(_: FaultRuns, fault: str) -> float:
    """Of clients who asked for an answer in one piece and left while it was made."""
    flags = ["--runner", "simulated", "--sim-fixed-ms", "10"]
    flags += ["--fault", fault] if fault else []
    names = [f"unary-{number}" for number in range(4)]
    with running(*flags) as engine:
        connections = [post_raw(engine, name, stream=False, max_tokens=100) for name in names]
        for name, connection in zip(names, connections, strict=True):
            engine.wait_for("first_token", name)
            connection.close()
        ends = [engine.wait_for("finished", name)["reason"] for name in names]
    return float(sum(reason != "abort" for reason in ends) / len(ends))


def exit_status(runs: FaultRuns, fault: str) -> float:
    return runs.ended(fault).code


def gap_of_survivors(runs: FaultRuns, fault: str) -> float:
    """Every second one stays: a few would have read too little for a mean."""
    run = runs.good(fault, "--set", "load.stay_share=0.5")
    return float(run.metrics["itl_s"]["mean"])


def innocents(runs: FaultRuns, fault: str) -> float:
    """Requests that failed although nobody left them."""
    return float(runs.good(fault).summary["outcomes"]["failed"])


def waste_of_two_answers(runs: FaultRuns, fault: str) -> float:
    return float(runs.with_two_answers(fault).metrics["wasted_tokens"]["p50"])


def slots_leaked_by_few(runs: FaultRuns, fault: str) -> float:
    """With so few that leave that there are slots for all of them to the end."""
    run = runs.good(fault, "--set", "load.stop_after_abandons=4")
    return float(run.metrics["leaked_slots"]["mean"])


def prefix_hits(runs: FaultRuns, fault: str) -> float:
    """Prompt tokens found in the prefix cache / looked for, where who left asks the same again."""
    found = last_values(runs.good(fault, "--set", 'load.ask_again_after=["abandoned"]'))
    return found["vllm:prefix_cache_hits_total"] / found["vllm:prefix_cache_queries_total"]


def counted_aborts(runs: FaultRuns, fault: str) -> float:
    """The counter of aborted requests / the aborts in the log."""
    run = runs.good(fault)
    ends = [row for row in run.rows("lifecycle") if row["event"] == "finished"]
    counted = run.manifest["idle"]["after"]["aborted"] - run.manifest["idle"]["before"]["aborted"]
    return float(counted / sum(row["reason"] == "abort" for row in ends))


def running_at_the_end(runs: FaultRuns, fault: str) -> float:
    """What the gauge of running requests shows when the last of them has ended."""
    return last_values(runs.good(fault))["vllm:num_requests_running"]


def last_values(run: Run) -> dict[str, float]:
    rows = sorted(run.rows("server_metrics"), key=lambda row: row["t_ns"])
    return {row["name"]: row["value"] for row in rows}


CASES = (
    Case(
        fault="ignore-disconnect",
        figure="`ghost_rate`",
        read=ghosts,
        clean=(0, 0),
        faulty=(1, 1),
    ),
    Case(
        fault="ignore-disconnect-unary",
        figure="ghosts among those who left an answer that is not streamed",
        read=ghosts_of_unary,
        clean=(0, 0),
        faulty=(1, 1),
    ),
    Case(
        fault="ignore-disconnect-while-waiting",
        figure="ghosts among those who left before their first token",
        read=ghosts_without_a_token,
        clean=(0, 0),
        faulty=(1, 1),
    ),
    Case(
        fault="delay-abort",
        setting=f"{DELAY_S}",
        figure="`signal_s`, median",
        read=of_metric("signal_s", "p50"),
        clean=(0, STEP_S),
        faulty=(DELAY_S - TIMER_S, DELAY_S + STEP_S),
    ),
    Case(
        fault="lose-abort",
        setting=f"{LOST_SHARE}",
        figure="`ghost_rate`",
        read=ghosts,
        clean=(0, 0),
        faulty=(0.1, 0.5),
    ),
    Case(
        fault="die-on-abort",
        figure="exit status of the run",
        read=exit_status,
        clean=(0, 0),
        faulty=(5, 5),
    ),
    Case(
        fault="abort-by-prefix",
        figure="requests that failed although nobody left them",
        read=innocents,
        clean=(0, 0),
        faulty=(1, ABANDONS),
    ),
    Case(
        fault="abort-parent-only",
        figure="`wasted_tokens`, median, two answers a request",
        read=waste_of_two_answers,
        clean=(0, 5),
        faulty=(60, 105),
    ),
    Case(
        fault="stall-survivors-on-abort",
        setting="0.1",
        figure="`itl_s` of survivors, mean",
        read=gap_of_survivors,
        clean=(0, 5 * STEP_S),
        faulty=(0.08, 1),
    ),
    Case(
        fault="leak-blocks",
        setting=f"{LEAKED}",
        figure="`leaked_blocks`",
        read=of_metric("leaked_blocks"),
        clean=(0, 0),
        faulty=(LEAKED * ABANDONS / 2, LEAKED * ABANDONS * 2),
    ),
    Case(
        fault="leak-slot",
        figure="`leaked_slots`",
        read=slots_leaked_by_few,
        clean=(0, 0),
        faulty=(1, 16),
    ),
    Case(
        fault="hold-blocks",
        setting="0.2",
        figure="`free_s`, median",
        read=of_metric("free_s", "p50"),
        clean=(0, STEP_S),
        faulty=(0.2, 0.2 + 2 * STEP_S),
    ),
    Case(
        fault="drop-prefix-on-cancel",
        figure="prompt tokens found in the prefix cache, share",
        read=prefix_hits,
        clean=(0.1, 1),
        faulty=(0, 0),
    ),
    Case(
        fault="double-count",
        figure="aborts counted / aborts",
        read=counted_aborts,
        clean=(1, 1),
        faulty=(2, 2),
    ),
    Case(
        fault="never-count",
        figure="aborts counted / aborts",
        read=counted_aborts,
        clean=(1, 1),
        faulty=(0, 0),
    ),
    Case(
        fault="stale-gauge",
        setting="60",
        figure="gauge of running requests after the last has ended",
        read=running_at_the_end,
        clean=(0, 0),
        faulty=(1, 16),
    ),
)
