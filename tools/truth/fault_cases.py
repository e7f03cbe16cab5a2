"""The table of faults: the figure that each fault of the bundled engine must move, and its limits.

A case is measured twice in the same way: on a correct engine and on one with the fault. Both
readings have limits, and these do not meet. Faults without a case move no figure of a run; cases of
`walkaway conform` show them.

`python -m tools.truth.fault_cases` measures all cases and writes docs/faults.md, in some minutes;
the exit status is 1 if a figure lies outside its limits.
"""

import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.e2e.running import Ended, Log, Run, assert_nothing_is_left, finish
from tests.reference_engine.running_engine import post_raw, running

TABLE = Path(__file__).parents[2] / "docs" / "faults.md"
STEP_S = 0.01
ABANDONS = 60
DELAY_S = 0.1
TIMER_S = 0.001  # the frontend's event loop counts in milliseconds, and may be early by one
LOST_SHARE = 0.3
LEAKED = 2

# An answer takes four seconds: every abandoned request is left long before its end.
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

# Forgotten requests, queued ones too, end by themselves before the settle time is over: whatever is
# missing then has leaked.
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
        folder = self._folder / f"{name}-{len(list(self._folder.iterdir()))}"
        return finish(self._workload, folder, *faults, *arguments)

    def good(self, fault: str, *arguments: str) -> Run:
        ended = self.ended(fault, *arguments)
        assert ended.code == 0, ended.output[-600:]
        assert_nothing_is_left(ended.run)
        return ended.run

    def with_short_answers(self, fault: str) -> Run:
        return self.good(fault, *SHORT_ANSWERS)

    def with_two_answers(self, fault: str) -> Run:
        return self.good(fault, "--engine", str(self.two_answers), *SHORT_ANSWERS)


# How a case is read, from a run without the fault and from one with it...

Reading = Callable[[FaultRuns, str], float]


def of_metric(name: str, key: str = "mean", *settings: str) -> Reading:
    flags = [word for setting in settings for word in ("--set", setting)]
    return lambda runs, fault: float(runs.good(fault, *flags).metrics[name][key])


def ghosts(runs: FaultRuns, fault: str) -> float:
    return float(runs.with_short_answers(fault).metrics["ghost_rate"]["mean"])


def ghosts_without_a_token(runs: FaultRuns, fault: str) -> float:
    """The share of ghosts among requests abandoned while queued or in prefill, and still without a
    token when the server saw the disconnect."""
    run = runs.with_short_answers(fault)
    phases = run.summary["breakdown"]["cancel_latency_by_phase"]
    early = [one["cancel_latency_s"] for one in phases if one["phase"] in ("waiting", "prefill")]
    n = sum(one["n"] for one in early) - Log(run).stopped_with_a_first_token()
    return float(sum(one["n_censored"] for one in early) / n)


def ghosts_of_unary(_: FaultRuns, fault: str) -> float:
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


def failed(runs: FaultRuns, fault: str) -> float:
    return float(runs.good(fault).summary["outcomes"]["failed"])


def waste_of_two_answers(runs: FaultRuns, fault: str) -> float:
    return float(runs.with_two_answers(fault).metrics["wasted_tokens"]["p50"])


def prefix_hits(runs: FaultRuns, fault: str) -> float:
    found = last_values(runs.good(fault, "--set", 'load.ask_again_after=["abandoned"]'))
    return found["vllm:prefix_cache_hits_total"] / found["vllm:prefix_cache_queries_total"]


def counted_aborts(runs: FaultRuns, fault: str) -> float:
    run = runs.good(fault)
    ends = [row for row in run.rows("lifecycle") if row["event"] == "finished"]
    counted = run.manifest["idle"]["after"]["aborted"] - run.manifest["idle"]["before"]["aborted"]
    return float(counted / sum(row["reason"] == "abort" for row in ends))


def running_at_the_end(runs: FaultRuns, fault: str) -> float:
    return last_values(runs.good(fault))["vllm:num_requests_running"]


def last_values(run: Run) -> dict[str, float]:
    rows = sorted(run.rows("server_metrics"), key=lambda row: row["t_ns"])
    return {row["name"]: row["value"] for row in rows}


signal = of_metric("signal_s", "p50")
free = of_metric("free_s", "p50")
leaked_blocks = of_metric("leaked_blocks")
# With few abandons there are slots for all requests to the end.
leaked_slots = of_metric("leaked_slots", "mean", "load.stop_after_abandons=4")
# With one survivor in ten, too few gaps would be read for a mean.
gaps = of_metric("itl_s", "mean", "load.stay_share=0.5")

Limits = tuple[float, float]


class Case(NamedTuple):
    """A fault, the figure that it moves (in words), its limits without the fault and with it."""

    fault: str
    setting: str
    figure: str
    read: Reading
    clean: Limits
    faulty: Limits

    @property
    def argument(self) -> str:
        return f"{self.fault}={self.setting}" if self.setting else self.fault

    @property
    def names(self) -> str:
        """The beginning of its row: all but the figures."""
        wrong = GOES_WRONG[self.fault]
        return f"| {self.fault} | {wrong} | {self.setting or '-'} | {self.figure} |"


GOES_WRONG = {
    "ignore-disconnect": "requests of clients that left go on",
    "ignore-disconnect-unary": "unary requests of clients that left go on",
    "ignore-disconnect-while-waiting": "requests whose clients left before a token go on",
    "delay-abort": "the worker hears of an abort this many seconds later",
    "lose-abort": "the worker forgets an abort with this probability",
    "die-on-abort": "the worker's process ends at an abort",
    "abort-by-prefix": "requests whose ids begin with the aborted one's end too",
    "abort-parent-only": "of n answers only the first is ended",
    "stall-survivors-on-abort": "the step after an abort starts this many seconds later",
    "leak-blocks": "this many blocks of an aborted request are never given back",
    "leak-slot": "the batch slot of an aborted request is never given back",
    "hold-blocks": "blocks of an aborted request are given back this many seconds later",
    "drop-prefix-on-cancel": "blocks of an aborted request leave the prefix cache",
    "double-count": "an aborted request is counted twice",
    "never-count": "an aborted request is not counted",
    "stale-gauge": "the gauges change once in this many seconds",
}
SHOWN_BY_CONFORM = {
    "queued-abort-ends-running": "the abort of a waiting request ends a running one too",
    "running-abort-ends-running": "the abort of a running request ends the oldest running one too",
    "next-short": "the first request after an abort is a token short",
    "reuse-before-step-ends": "for three steps after an abort, others get the aborted one's token",
    "wedge-after": "after this many aborts nothing is generated; `/health` answers 200",
    "clean-up-on-traffic": "slots of requests that left an idle engine wait for the next end",
    "prefill-runs-on": "an abort in prefill waits for the first token",
    "second-prefill-dies": "the worker ends at an abort while a prompt is computed in chunks",
    "end-twice": "an abort in the step of the last token frees the slot a second time",
    "grow-memory": "this many megabytes are kept for each client that left",
    "abort-after-done": "an answer read to its end is counted as aborted too",
    "label-length": "an aborted request is counted as `length` too",
    "forget-aborted-tokens": "tokens of an aborted request are not counted",
    "cancel-does-nothing": "the cancel endpoint says that it has cancelled, and has not",
    "poll-rearms": "each reading of `/metrics` puts off the aborts of requests that were left",
    "spoil-prompt": "the prompt of an aborted request has another answer from then on",
    "count-left-as-waiting": "a request that is aborted in the queue stays in the waiting gauge",
    "grow-with-answers": "this many megabytes are kept for each request, left or not",
    "abort-says-stop": "what is aborted ends with the finish reason `stop`",
    "compute-refused": "a prompt that is refused as too long is computed all the same",
}

UNARY = "ghosts among abandoned unary requests"
EARLY = "ghosts among requests abandoned before their first token"
FAILED = "requests that failed without being abandoned"
GAPS = "`itl_s` of survivors, mean"
TWO = "`wasted_tokens`, median, two answers a request"
HITS = "prompt tokens found in the prefix cache, share"
COUNTED = "aborts counted / aborts"
GAUGE = "gauge of running requests after the last has ended"

ONE_STEP, DELAYED = (0, STEP_S), (DELAY_S - TIMER_S, DELAY_S + STEP_S)
SOME_BLOCKS = (LEAKED * ABANDONS / 2, LEAKED * ABANDONS * 2)

CASES = (
    Case("ignore-disconnect", "", "`ghost_rate`", ghosts, (0, 0), (1, 1)),
    Case("ignore-disconnect-unary", "", UNARY, ghosts_of_unary, (0, 0), (1, 1)),
    Case("ignore-disconnect-while-waiting", "", EARLY, ghosts_without_a_token, (0, 0), (1, 1)),
    Case("delay-abort", f"{DELAY_S}", "`signal_s`, median", signal, ONE_STEP, DELAYED),
    Case("lose-abort", f"{LOST_SHARE}", "`ghost_rate`", ghosts, (0, 0), (0.1, 0.5)),
    Case("die-on-abort", "", "exit status of the run", exit_status, (0, 0), (5, 5)),
    Case("abort-by-prefix", "", FAILED, failed, (0, 0), (1, ABANDONS)),
    Case("abort-parent-only", "", TWO, waste_of_two_answers, (0, 5), (60, 105)),
    Case("stall-survivors-on-abort", "0.1", GAPS, gaps, (0, 5 * STEP_S), (0.08, 1)),
    Case("leak-blocks", f"{LEAKED}", "`leaked_blocks`", leaked_blocks, (0, 0), SOME_BLOCKS),
    Case("leak-slot", "", "`leaked_slots`", leaked_slots, (0, 0), (1, 16)),
    Case("hold-blocks", "0.2", "`free_s`, median", free, ONE_STEP, (0.2, 0.2 + 2 * STEP_S)),
    Case("drop-prefix-on-cancel", "", HITS, prefix_hits, (0.1, 1), (0, 0)),
    Case("double-count", "", COUNTED, counted_aborts, (1, 1), (2, 2)),
    Case("never-count", "", COUNTED, counted_aborts, (1, 1), (0, 0)),
    Case("stale-gauge", "60", GAUGE, running_at_the_end, (0, 0), (1, 16)),
)


def is_within(value: float, limits: Limits) -> bool:
    return limits[0] <= value <= limits[1]


# The table in docs/faults.md...

HEAD = """\
# Faults of the bundled engine

To run the engine with a fault, for example to see a gate go red:

    walkaway engine --fault lose-abort=0.05
    walkaway run gate --set 'engine.faults=["lose-abort=0.05"]'

Each row shows one figure, measured alike on a correct engine and on one with the fault: simulated
runner, steps of 10 ms, 16 slots, 20 users. Nine in ten requests ask for 400 tokens and are
abandoned; a run ends after 60 abandons. Some rows differ, for both figures:

- `ignore-disconnect`, `ignore-disconnect-while-waiting`, `lose-abort`: 100 tokens an answer, so
  that forgotten requests end during the run;
- `abort-parent-only`: two answers of 100 tokens a request;
- `stall-survivors-on-abort`: every second request is abandoned;
- `leak-slot`: the run ends after 4 abandons;
- `drop-prefix-on-cancel`: after an abandon the user sends the same prompt again;
- `ignore-disconnect-unary`: four requests that do not stream, all abandoned.

`make faults-table` writes this page. The limits of each figure are in `tools/truth/fault_cases.py`.

| fault | what goes wrong | setting | figure | correct engine | with the fault |
|---|---|---|---|---:|---:|
"""
MORE = """
Some faults move no figure of a run. A case of `walkaway conform` shows each of them.

| fault | what goes wrong |
|---|---|
"""


def more() -> str:
    rows = [f"| {fault} | {wrong} |\n" for fault, wrong in SHOWN_BY_CONFORM.items()]
    return MORE + "".join(rows)


def main() -> int:
    lines, all_right = [], True
    with tempfile.TemporaryDirectory() as folder:
        runs = FaultRuns(Path(folder))
        for case in CASES:
            clean, faulty = case.read(runs, ""), case.read(runs, case.argument)
            is_right = is_within(clean, case.clean) and is_within(faulty, case.faulty)
            lines.append(f"{case.names} {clean:.3g} | {faulty:.3g} |")
            said = lines[-1] if is_right else f"{lines[-1]} OUTSIDE ITS LIMITS"
            print(said, flush=True)  # noqa: T201
            all_right &= is_right
    TABLE.write_text(HEAD + "\n".join(lines) + "\n" + more())
    return 0 if all_right else 1


if __name__ == "__main__":
    sys.exit(main())
