"""Which figure each fault of the bundled engine must move, and between which limits.

A case is measured twice in the same way: on a correct engine and on one with the fault, where
answers are shorter if it forgets who left. Both readings have limits, and these do not meet.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.e2e.running import Ended, Run, run_to_end
from tests.reference_engine.running_engine import post_raw, running
from tests.truth.engine_log import Log

STEP_S = 0.01
DELAY_S = 0.1
LOST_SHARE = 0.3
LEAKED = 2
ABANDONS = 60

# An answer takes four seconds: whoever leaves does so long before its end.
WORKLOAD = f"""
question = "Does the harness see what is wrong?"
[run]
seed = 4
users = 20
max_seconds = 30
timeout_s = 20
[load]
kind = "abandon"
abandon_after_tokens = [0, 1, 4, 8]
stay_share = 0.1
think = "step"
prompt_tokens = [40, 60]
answer_tokens = 400
stay_tokens = 10
stop_after_abandons = {ABANDONS}
[settle]
seconds = 2.0
steps = 0
[engine]
runner = "simulated"
sim_fixed_ms = {STEP_S * 1e3}
max_num_seqs = 16
"""

# Requests that these forget, also those still in the queue, end by themselves before the settle
# time is over, which ends when they have. What is missing then has leaked, and is not in use.
FORGETFUL = ("ignore-disconnect", "ignore-disconnect-while-waiting", "lose-abort")
SHORT_ANSWERS = ("--set", "load.answer_tokens=100", "--set", "settle.seconds=20")

TWO_ANSWERS = """
description = "The bundled engine, asked for two answers at once"
extra_body = { ignore_eos = true, n = 2 }
stream_options = { include_usage = true, continuous_usage_stats = true }
continuous_usage = true
lifecycle = true
slots_from = "config"
scrape_interval_s = 0.05
settle_s = 2.0
[metrics]
running = { name = "vllm:num_requests_running", refresh = "each step", trust = "exact" }
free_blocks = { name = "walkaway_engine_free_blocks", refresh = "each step", trust = "exact" }
generated_tokens = { name = "vllm:generation_tokens_total", refresh = "each step", trust = "exact" }
"""


class FaultRuns:
    """Runs of the engine with one fault (none: "") and other arguments, each made once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._workload = folder / "controls.toml"
        self._workload.write_text(WORKLOAD)
        self.two_answers = folder / "two_answers.toml"
        self.two_answers.write_text(TWO_ANSWERS)
        self.ended = cache(self._measure)

    def _measure(self, fault: str, *arguments: str) -> Ended:
        faults = ("--set", f'engine.faults=["{fault}"]') if fault else ()
        name = fault.partition("=")[0] or "clean"
        lengths = SHORT_ANSWERS if name in FORGETFUL else ()
        folder = self._folder / f"{name}-{len(list(self._folder.iterdir()))}"
        return run_to_end(self._workload, folder, *faults, *lengths, *arguments)

    def good(self, fault: str, *arguments: str) -> Run:
        """A run that must have ended well."""
        ended = self.ended(fault, *arguments)
        assert ended.code == 0, ended.output[-600:]
        return ended.run

    def with_two_answers(self, fault: str) -> Run:
        """Each request asks for two answers at once."""
        return self.good(fault, "--engine", str(self.two_answers), *SHORT_ANSWERS)


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


def ghosts_without_a_token(runs: FaultRuns, fault: str) -> float:
    """Of those who left in the queue or during their prefill, and had no token either when the
    server saw it."""
    run = runs.good(fault)
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
        read=of_metric("ghost_rate"),
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
        faulty=(DELAY_S, DELAY_S + STEP_S),
    ),
    Case(
        fault="lose-abort",
        setting=f"{LOST_SHARE}",
        figure="`ghost_rate`",
        read=of_metric("ghost_rate"),
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
