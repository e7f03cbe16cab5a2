"""The ways that need no full slots, each on a server whose truth is known:
`python -m tools.truth.ways [--tries N]`.

For each way a server in good order, one that is ten steps late, and one that never lets go: what
the way says, and what the server knows.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from tests.e2e.running import scripted_server

ROOT: Final = Path(__file__).parents[2]
SLOTS: Final = 32
SETTLE_S: Final = 1.0
WAYS: Final[dict[str, dict[str, Any]]] = {
    "gauge": {},
    "pace": {"step_s": 0.01, "stream_s": 0.004},
    "quiet": {"busy_s": 0.006},
}
SERVERS: Final[dict[str, dict[str, Any]]] = {
    "good": {},
    "ten steps late": {"linger_steps": 10},
    "never": {"ghost_every": 1},
}


class Watched(NamedTuple):
    """`told`: the way's answer; `held_s`: how long the server held each stream that left; None: for
    ever."""

    told: dict[str, Any]
    held_s: list[float | None]


def watch(
    way: str,
    *,
    tries: int,
    step_s: float = 0.02,
    most_others: int = 32,
    is_share: bool = False,
    is_early: bool = False,
    **script: Any,
) -> Watched:
    with scripted_server(slots=SLOTS, step_s=step_s, num_blocks=8192, **script) as server:
        asked = {
            "url": server.url,
            "way": way,
            "slots": SLOTS,
            "step_s": step_s,
            "settle_s": SETTLE_S,
            "tries": tries,
            "is_share": is_share,
            "is_early": is_early,
            "pid": server.process.pid,
            "most_others": most_others,
        }
        done = subprocess.run(
            [sys.executable, "-m", "tests.harness.experiments.watching"],
            input=json.dumps(asked),
            stdout=subprocess.PIPE,
            text=True,
            timeout=120,
            check=True,
            cwd=ROOT,
        )
        left = [one for one in server.truth()["requests"] if one["closed_ns"] is not None]
    held_s = [
        None if one["freed_ns"] is None else (one["freed_ns"] - one["closed_ns"]) / 1e9
        for one in left
    ]
    return Watched(json.loads(done.stdout), held_s)


def row(way: str, name: str, seen: Watched) -> str:
    told = seen.told
    if "why" in told:
        return f"| {way} | {name} | {told['why']} |"
    let_go = [one for one in seen.held_s if one is not None]
    figures: tuple[Sequence[float | None], ...] = (
        told["tries_s"],
        told["controls_s"],
        [told["floor_s"]],
        [median(let_go) if len(let_go) == len(seen.held_s) else None],
    )
    return f"| {way} | {name} | {' | '.join(map(_in_ms, figures))} |"


def _in_ms(figures: Sequence[float | None]) -> str:
    return ", ".join("never" if one is None else f"{1e3 * one:.0f}" for one in figures)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tries", type=int, default=4)
    options = parser.parse_args(arguments)
    heads = "way", "server", "held, ms", "controls, ms", "floor, ms", "truth, median ms"
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}", flush=True)  # noqa: T201
    for way, own in WAYS.items():
        for name, script in SERVERS.items():
            seen = watch(way, tries=options.tries, **own, **script)
            print(row(way, name, seen), flush=True)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
