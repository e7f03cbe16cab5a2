"""Which runs are recorded, one for each class of behaviour, and with which commands.

`walkaway run WORKLOAD *FLAGS --out NAME`, beside a server of its own where `server` names one: the
bundled engine with these flags, or the scripted server of `tests.truth` with this script.
"""

from dataclasses import dataclass
from typing import Final, Literal

Ending = Literal["by itself", "interrupted", "killed", "server killed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One recorded run. `sets` are the values of `--set`; `{url}` in `flags` is the server's."""

    workload: str = "golden.toml"
    sets: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    engine: tuple[str, ...] | None = None
    script: str | None = None
    ending: Ending = "by itself"


LONG: Final = "load.stop_after_abandons=5000"
SHORT: Final = "load.stop_after_abandons=30"
MIX: Final = (
    '[{plan="tokens",tokens=[2,8],way="rst"},{plan="time",seconds=[0.05,0.2],delivery="unary"},'
    '{plan="tokens",tokens=12,n=2},{plan="tokens",tokens=8,way="cancel"},'
    '{plan="tokens",tokens=4,way="half_close"},{plan="last_token"}]'
)
MIXED: Final = ("load.abandon_after_tokens=[]", f"load.mix={MIX}")
ENGINE: Final = ("--runner", "simulated", "--sim-fixed-ms", "10", "--max-num-seqs", "6")
AT: Final = ("--target", "{url}", "--engine")

RUNS: Final = {
    # a correct engine
    "clean": Recorded(),
    "clean_again": Recorded(sets=("run.seed=2",)),
    "slower_steps": Recorded(sets=("engine.sim_fixed_ms=20", SHORT)),
    "torch": Recorded(sets=('engine.runner="torch"', 'engine.device="cpu"', SHORT)),
    "two_processes": Recorded(sets=("run.processes=2", SHORT)),
    "all_ways": Recorded(sets=(*MIXED, "run.loops=5", "load.stop_after_abandons=24")),
    "canaries": Recorded(sets=("load.canaries=2", SHORT)),
    "preemptions": Recorded(
        sets=(
            *("engine.num_blocks=40", "engine.max_model_len=512", "load.stay_tokens=150"),
            *("load.stay_share=0.6", "load.answer_tokens=300", "load.stop_after_abandons=20"),
        )
    ),
    "prefill": Recorded(workload="prefill_abandon", sets=("load.stop_after_abandons=20",)),
    "queued": Recorded(workload="queue_abandon", sets=("load.stop_after_abandons=40",)),
    "last_token": Recorded(workload="last_token_race", sets=("load.stop_after_abandons=25",)),
    "open_loop": Recorded(workload="open_loop", sets=("arrivals.seconds=5", "load.stay_tokens=40")),
    "overload": Recorded(
        workload="open_loop",
        sets=(
            "arrivals.rate=40",
            "arrivals.seconds=3",
            "arrivals.max_streams=12",
            "run.max_seconds=4",
        ),
    ),
    "trace": Recorded(workload="trace_replay", sets=("arrivals.speed=12", "load.stay_tokens=60")),
    "slot_recovery": Recorded(workload="slot_recovery", sets=("load.trials=4",)),
    "cancel_storm": Recorded(
        workload="cancel_storm", sets=("load.storms=6", "load.streams=10", "load.stayers=2")
    ),
    # an engine that is wrong
    "ghosts": Recorded(sets=('engine.faults=["lose-abort=0.1"]',)),
    "ghosts_ended": Recorded(
        sets=('engine.faults=["lose-abort=0.3"]', "load.answer_tokens=60", SHORT)
    ),
    "ignored": Recorded(
        sets=('engine.faults=["ignore-disconnect"]', "load.answer_tokens=80", SHORT)
    ),
    "delayed_abort": Recorded(sets=('engine.faults=["delay-abort=0.1"]',)),
    "held_blocks": Recorded(sets=('engine.faults=["hold-blocks=0.2"]', SHORT)),
    "leaked_blocks": Recorded(
        sets=(
            *('engine.faults=["leak-blocks=1"]', "engine.num_blocks=2048"),
            *("run.loops=5", "load.stop_after_abandons=20"),
        )
    ),
    "leaked_slots": Recorded(
        sets=('engine.faults=["leak-slot"]', "load.stop_after_abandons=3", "run.max_seconds=3")
    ),
    "double_count": Recorded(sets=('engine.faults=["double-count", "stale-gauge=0.5"]', SHORT)),
    "parent_only": Recorded(
        sets=(
            *('engine.faults=["abort-parent-only"]', "load.abandon_after_tokens=[]"),
            *('load.mix=[{plan="tokens",tokens=8,n=2}]', "load.answer_tokens=120", SHORT),
        )
    ),
    # arms
    "early_late": Recorded(workload="early_late.toml"),
    "value": Recorded(
        workload="value_of_cancellation",
        sets=(
            *("run.rounds=2", "run.max_seconds=2", "engine.sim_fixed_ms=5", "settle.seconds=3"),
            *("run.users=12", "engine.max_num_seqs=8"),
        ),
    ),
    "asked_again": Recorded(
        workload="regenerate", sets=("run.rounds=1", "run.max_seconds=1", "run.users=4")
    ),
    "retries": Recorded(workload="retry_storm", sets=("run.rounds=1", "run.max_seconds=4")),
    "chunk_frontier": Recorded(workload="frontier.toml"),
    "build": Recorded(
        workload="early_late.toml",
        sets=('arms=[{name="build"}]', "run.rounds=4", "gate.limits=[]", "run.max_seconds=1"),
    ),
    "worse_build": Recorded(
        workload="early_late.toml",
        sets=(
            *('arms=[{name="build"}]', "run.rounds=4", "gate.limits=[]", "run.max_seconds=1"),
            *("run.seed=70",),
            'engine.faults=["delay-abort=0.05"]',
        ),
    ),
    # servers that show less
    "unscraped": Recorded(flags=("--no-scrape",)),
    "outside_only": Recorded(sets=("collect.exact=false",)),
    "stranger": Recorded(
        engine=ENGINE,
        flags=(*AT, "stranger.toml"),
        sets=("load.stop_after_abandons=200", "run.users=12"),
    ),
    "generic": Recorded(engine=ENGINE, flags=(*AT, "openai"), sets=(SHORT,)),
    "vllm": Recorded(engine=ENGINE, flags=(*AT, "vllm"), sets=(SHORT,)),
    "generic_probes": Recorded(
        workload="probes.toml", script='{"slots": 3}', flags=(*AT, "stranger.toml")
    ),
    "scripted_ghosts": Recorded(
        script='{"slots": 6, "num_blocks": 2048, "ghost_every": 14, "gauge_every_s": 0.1}',
        flags=(*AT, "stranger.toml"),
        sets=(SHORT,),
    ),
    "scripted_leaks": Recorded(
        script='{"leak_blocks": 2, "leak_slots": 1, "linger_steps": 3, "num_blocks": 2048}',
        flags=(*AT, "reference"),
        sets=("run.users=7",),
    ),
    "stuck_counter": Recorded(
        script='{"aborted_counter": "stuck", "free_delay_s": 0.1, "num_blocks": 2048}',
        flags=(*AT, "stranger.toml"),
        sets=(SHORT,),
    ),
    # runs that end badly
    "wedged": Recorded(
        script='{"wedge_after": 12, "num_blocks": 2048}',
        flags=(*AT, "stranger.toml"),
        sets=("run.max_seconds=3",),
    ),
    "timed_out": Recorded(
        sets=("run.total_timeout_s=0.2", "load.stay_tokens=200", "load.think=0.1", SHORT)
    ),
    "rejected": Recorded(
        engine=(*ENGINE, "--requests-per-minute", "60"),
        flags=(*AT, "reference"),
        sets=("run.max_seconds=2",),
    ),
    "nobody_left": Recorded(sets=("load.stay_share=1", "run.max_seconds=2")),
    "worker_died": Recorded(sets=('engine.faults=["die-on-abort"]', "run.max_seconds=4")),
    "server_died": Recorded(
        engine=ENGINE, flags=(*AT, "reference"), ending="server killed", sets=(LONG,)
    ),
    "interrupted": Recorded(sets=(LONG,), ending="interrupted"),
    "killed": Recorded(sets=(LONG,), ending="killed"),
}

# What is compared with what, and judged against which baseline.
PAIRS: Final = (
    ("clean", "clean_again"),
    ("clean", "slower_steps"),
    ("clean", "ghosts"),
    ("clean", "delayed_abort"),
    ("clean", "unscraped"),
    ("clean", "outside_only"),
    ("open_loop", "overload"),
    ("slot_recovery", "generic_probes"),
    ("build", "worse_build"),
    ("stranger", "scripted_ghosts"),
)
BASELINE: Final = "build"
COMPARED_ARMS: Final = ("build", "worse_build")  # judged here already: `compare` reads their rounds
HELD_TO_BASELINE: Final = ("build", "worse_build", "early_late")
COLLECTED: Final = "killed"  # left nothing but the shards of its load
