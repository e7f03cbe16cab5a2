"""Seeded settings of the scripted server, and how the harness looks at it.

Setting n is always the same. Together they cover every way in which the server can be wrong; each
leaves out faults that would hide another one from outside: a ghost keeps taking blocks, so blocks
leak only in settings without ghosts; nothing else is looked for on a wedged server.
"""

import random
from dataclasses import dataclass

from tools.truth.scripted_engine import Script

USERS = 7
ABANDONS = 120  # with this number chance moves a mean by less than the truth line allows
ABANDONS_WITH_GHOSTS = 40  # each ghost keeps a slot for ever
SETTLE_S = 2.0  # much longer than the script lets anything linger that is not to stay for ever
LATE_S = SETTLE_S + 1.3  # a late counter moves after the settle time still, by a part of the load

TARGET = """
description = "The scripted server, as a black box"
stream_options = {{ include_usage = true, continuous_usage_stats = true }}
continuous_usage = true
bytes_are_tokens = true
lifecycle = false
slots_from = "workload"
scrape_interval_s = 0.02
settle_s = {settle_s}
[metrics]
running = {{ name = "vllm:num_requests_running", {gauge} }}
waiting = {{ name = "vllm:num_requests_waiting", {gauge} }}
free_blocks = {{ name = "walkaway_engine_free_blocks", {gauge} }}
kv_usage = {{ name = "vllm:kv_cache_usage_perc", {gauge} }}
generated_tokens = {{ name = "vllm:generation_tokens_total", {counter} }}
prompt_tokens = {{ name = "vllm:prompt_tokens_total", {counter} }}
preemptions = {{ name = "vllm:num_preemptions_total", {counter} }}
[metrics.aborted]
name = "vllm:request_success_total"
labels = {{ finished_reason = "abort" }}
refresh = "at once"
trust = "exact"
"""

WALKING_AWAY = """
question = "What is left of those who left?"
[run]
seed = {number}
users = {users}
max_seconds = {max_seconds}
timeout_s = 20
first_token_timeout_s = 20
[load]
kind = "abandon"
abandon_after_tokens = [0, 1, 3, 8]
stay_share = 0.2
think = "step"
prompt_tokens = [10, 60]
answer_tokens = {answer_tokens}
stay_tokens = 12
stop_after_abandons = {abandons}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    number: int
    script: Script

    def target(self) -> str:
        """Its description has the true refresh rule of its gauges, and does not say how its counter
        of aborts lies.
        """
        script = self.script
        gauge = (
            f'refresh = "by script", lag_steps = {script.gauge_every_steps}, '
            f'lag_s = {script.gauge_every_s}, trust = "exact"'
        )
        counter = 'refresh = "at once", trust = "exact"'
        return TARGET.format(settle_s=SETTLE_S, gauge=gauge, counter=counter)

    def abandon_workload(self, *, answer_tokens: int = 2000) -> str:
        script = self.script
        return WALKING_AWAY.format(
            number=self.number,
            answer_tokens=answer_tokens,
            users=USERS,
            abandons=ABANDONS_WITH_GHOSTS if script.ghost_every else ABANDONS,
            max_seconds=4 if script.wedge_after else 60,
        )


def draw(number: int) -> Setting:
    """Setting `number`, from 1. In turn: ghosts, leaks, delays, delays with leaks, a wedge."""
    rng = random.Random(f"truth/{number}")
    kind = ("wedge", "ghosts", "leaks", "delays", "leaking delays")[number % 5]
    stale = ("not", "for seconds", "for steps")[number % 3]
    counter = "exact"
    if kind in ("leaks", "leaking delays"):
        counter = rng.choice(("exact", "double", "late", "stuck"))
    script = Script(
        # More slots than ghosts: else no other request is served any more.
        slots=rng.randint(5, 6) if kind == "ghosts" else rng.randint(2, 6),
        num_blocks=2048,
        linger_steps=rng.randint(0, 4),
        free_delay_s=rng.choice((0.0, round(rng.uniform(0.02, 0.2), 3))),
        ghost_every=rng.randint(12, 20) if kind == "ghosts" else 0,
        leak_blocks=rng.randint(1, 2) if "leak" in kind else 0,
        leak_slots=1 if kind == "leaks" else 0,
        wedge_after=rng.randint(8, 20) if kind == "wedge" else 0,
        gauge_every_s=round(rng.uniform(0.05, 0.2), 3) if stale == "for seconds" else 0.0,
        gauge_every_steps=rng.randint(2, 5) if stale == "for steps" else 0,
        aborted_counter=counter,
        counter_late_s=LATE_S if counter == "late" else 0.0,
    )
    return Setting(number=number, script=script)


def draw_clean(number: int) -> Setting:
    rng = random.Random(f"clean/{number}")
    script = Script(slots=rng.randint(2, 8), step_s=rng.choice((0.01, 0.02, 0.03)), num_blocks=2048)
    return Setting(number=number, script=script)
