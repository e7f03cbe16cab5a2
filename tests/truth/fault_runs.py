"""Runs of the bundled engine with a fault or without, all with one workload."""

from functools import cache
from pathlib import Path

from tests.e2e.running import Ended, Run, run_to_end

STEP_S = 0.01
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

# Requests that an engine forgets, also those still in the queue, end by themselves before the
# settle time is over, which ends when they have. What is missing then has leaked, and is not in
# use.
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
        folder = self._folder / f"{name}-{len(list(self._folder.iterdir()))}"
        return run_to_end(self._workload, folder, *faults, *arguments)

    def good(self, fault: str, *arguments: str) -> Run:
        """A run that must have ended well."""
        ended = self.ended(fault, *arguments)
        assert ended.code == 0, ended.output[-600:]
        return ended.run

    def with_short_answers(self, fault: str) -> Run:
        """For faults that forget who left."""
        return self.good(fault, *SHORT_ANSWERS)

    def with_two_answers(self, fault: str) -> Run:
        """Each request asks for two short answers at once."""
        return self.good(fault, "--engine", str(self.two_answers), *SHORT_ANSWERS)
