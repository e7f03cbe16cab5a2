"""Gentle watches of a server with busy users, held to the truth of a scripted server:
`python -m tools.truth.gentle [--seconds S] [--users N] [--seed S] [--rounds N] [NAME ...]`.

With `--server URL --engine NAME --model NAME` it watches a server that runs already, through a hop
that closes its connections `--late` seconds after the clients do, and forgets to for one leave in
`--every` (tools/truth/forgetful_hop.py). What the server itself takes is then no part of the truth.

32 slots, steps of 20 ms, other users who come and go, some of whom leave. For each behaviour of the
server a line of a table: what the watch says, and what the server knows. Then what the watch does
to the time between two tokens of the other users: with it and without, by turns.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import httpx
import numpy as np

from harness.experiments.averaged import Array, MeanEstimate
from tests.e2e.running import scripted_server

ROOT: Final = Path(__file__).parents[2]
SLOTS: Final = 32
BLOCKS: Final = 16384  # of 16 tokens
CONTEXT: Final = 4096
USERS: Final = 12
SLOWER: Final = {"step_s": 0.01, "stream_s": 0.001}
BY_REQUESTS: Final = {"has_memory": False}
SERVERS: Final[dict[str, dict[str, Any]]] = {
    "good": {},
    "ten steps late": {"linger_steps": 10},
    "thirty steps late": {"linger_steps": 30},
    "half forgotten": {"ghost_share": 0.5},
    "10 % forgotten": {"ghost_every": 10},
    "2 % forgotten": {"ghost_every": 50},
    "never": {"ghost_every": 1},
    "good, by requests": BY_REQUESTS,
    "ten steps late, by requests": BY_REQUESTS | {"linger_steps": 10},
    "half forgotten, by requests": BY_REQUESTS | {"ghost_share": 0.5},
    "never, by requests": BY_REQUESTS | {"ghost_every": 1},
    "good, by pace": SLOWER,
    "ten steps late, by pace": SLOWER | {"linger_steps": 10},
    "never, by pace": SLOWER | {"ghost_every": 1},
}
ENGINES: Final = {
    "bundled engine": (),
    "bundled engine, aborts 0.2 s late": ("delay-abort=0.2",),
    "bundled engine, half lost": ("lose-abort=0.5",),
    "bundled engine, 10 % lost": ("lose-abort=0.1",),
    "bundled engine, 2 % lost": ("lose-abort=0.02",),
    "bundled engine, deaf": ("ignore-disconnect",),
}
ENGINE: Final = {"engine": "reference", "model": "tiny"}
ARM_S: Final = 20.0
CHOOSING_S: Final = 12.0  # the prompt, before the first leave
OURS: Final = "walkaway-"
USERS_WHERE_NEVER: Final = 4  # whose ghosts take slots, too


class Watched(NamedTuple):
    """`told`: the watch's line of each turn. `held_s`: of our streams that left; None: for ever."""

    told: list[dict[str, Any]]
    held_s: list[float | None]

    @property
    def last(self) -> dict[str, Any]:
        return self.told[-1]

    @property
    def true_latency_s(self) -> float | None:
        """The median over the streams that the server let go of before their end."""
        let_go = [one for one in self.held_s if one is not None]
        return median(let_go) if let_go else None

    @property
    def true_ghost_rate(self) -> float:
        return sum(one is None for one in self.held_s) / max(1, len(self.held_s))


@contextmanager
def crowd(url: str, users: int, seed: int, model: str) -> Iterator[list[tuple[float, float]]]:
    """Afterwards the list has when each token came to the users, and after how long."""
    command = [sys.executable, "-m", "tools.truth.crowd", url, str(users), str(seed), model]
    gaps: list[tuple[float, float]] = []
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    ) as process:
        try:
            yield gaps
        finally:
            said, _ = process.communicate(timeout=10)
            gaps += json.loads(said)


def watch(
    *,
    seconds: float,
    users: int = USERS,
    seed: int = 1,
    has_metrics: bool = True,
    has_memory: bool = True,
    is_wanted: bool = False,
    leaves: int | None = None,
    **script: Any,
) -> Watched:
    """Watches the scripted server. `leaves`: after which it ends, if they come in time."""
    asked = {
        "has_metrics": has_metrics,
        "has_memory": has_memory and has_metrics,
        "is_wanted": is_wanted,
        **({} if leaves is None else {"leaves": leaves}),
    }
    settings = {"slots": SLOTS, "num_blocks": BLOCKS, "ghost_seed": seed, **script}
    with scripted_server(**settings) as server:
        told = _told(server.url, asked, seconds=seconds, users=users, seed=seed)
        left = [
            one
            for one in server.truth()["requests"]
            if one["client_id"].startswith(OURS) and one["closed_ns"] is not None
        ]
    return Watched(told, [_held_s(one) for one in left])


def watch_engine(*faults: str, seconds: float, users: int = USERS, seed: int = 1) -> Watched:
    """Watches the bundled engine, with these faults."""
    with bundled_engine(*faults) as url:
        told = _told(url, ENGINE, seconds=seconds, users=users, seed=seed)
        page = httpx.get(f"{url}/walkaway/lifecycle", params={"limit": 10**6}, trust_env=False)
    events: dict[str, dict[str, dict[str, Any]]] = {}
    for line in page.text.splitlines():
        one = json.loads(line)
        if (one["client_request_id"] or "").startswith(OURS):
            events.setdefault(one["client_request_id"], {})[one["event"]] = one
    held_s = [
        _until_removed_s(one["disconnected"], one.get("removed"))
        for one in events.values()
        if "disconnected" in one and not _had_ended(one)
    ]
    return Watched(told, held_s)


def watch_server(
    url: str,
    engine: str,
    model: str,
    *,
    slots: int,
    every: int,
    late_s: float,
    seconds: float,
    users: int,
    seed: int,
) -> Watched:
    command = [sys.executable, "-m", "tools.truth.forgetful_hop", url, str(every), str(late_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as hop:
        assert hop.stdout is not None
        hop_url = json.loads(hop.stdout.readline())["url"]
        asked = {"engine": engine, "model": model, "slots": slots}
        told = _told(hop_url, asked, seconds=seconds, users=users, seed=seed)
        said, _ = hop.communicate(timeout=10)
    left = [is_forgotten for name, is_forgotten in json.loads(said) if name.startswith(OURS)]
    return Watched(told, [None if is_forgotten else late_s for is_forgotten in left])


def _had_ended(events: dict[str, dict[str, Any]]) -> bool:
    """It had ended before its client closed the connection."""
    return "removed" in events and events["removed"]["t_ns"] <= events["disconnected"]["t_ns"]


def _until_removed_s(left: dict[str, Any], removed: dict[str, Any] | None) -> float | None:
    """None: it ran to its end."""
    if removed is None or removed["reason"] == "length":
        return None
    return float(removed["t_ns"] - left["t_ns"]) / 1e9


@contextmanager
def bundled_engine(*faults: str) -> Iterator[str]:
    given = [word for fault in faults for word in ("--fault", fault)]
    command = [sys.executable, "-m", "reference_engine", "--port", "0", "--exit-with-stdin"]
    sizes = ["--max-num-seqs", str(SLOTS), "--num-blocks", str(BLOCKS)]
    pace = ["--runner", "simulated", "--sim-fixed-ms", "20", "--sim-decode-token-ms", "0"]
    with subprocess.Popen(
        [*command, *sizes, *pace, *given],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.stdin.close()
            process.wait(20)


def _told(
    url: str, asked: dict[str, Any], *, seconds: float, users: int, seed: int
) -> list[dict[str, Any]]:
    with crowd(url, users, seed, asked.get("model", ENGINE["model"])):
        return _watched(url, asked, seconds=seconds, seed=seed)


def _watched(url: str, asked: dict[str, Any], *, seconds: float, seed: int) -> list[dict[str, Any]]:
    usual = {"slots": SLOTS, "context": CONTEXT, "settle_s": 1.0}
    asked = usual | asked | {"url": url, "way": "gentle", "max_seconds": seconds, "seed": seed}
    done = subprocess.run(
        [sys.executable, "-m", "tests.harness.experiments.watching"],
        input=json.dumps(asked),
        stdout=subprocess.PIPE,
        text=True,
        timeout=seconds + 60,
        check=True,
        cwd=ROOT,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


# What the other users notice...


def beside(url: str, asked: dict[str, Any], *, rounds: int, users: int, seed: int) -> Array:
    """The median and the 99th percentile of the time between two tokens of the other users, in
    seconds: [rounds, 2 (with the watch, without), 2]."""
    arms: list[tuple[float, float]] = []
    with crowd(url, users, seed, ENGINE["model"]) as gaps:
        for one in range(rounds):
            told = _watched(url, asked, seconds=ARM_S + CHOOSING_S, seed=seed + one)
            now_s = time.perf_counter()
            arms.append((now_s - told[-1]["seconds"] + told[0]["seconds"], now_s))
            time.sleep(ARM_S + 1)  # noqa: TID251  an arm lasts as long as that
            arms.append((now_s + 1, now_s + 1 + ARM_S))
    at_s, gap_s = np.array(gaps).T
    found = [np.quantile(gap_s[(at_s >= low) & (at_s < high)], (0.5, 0.99)) for low, high in arms]
    return np.array(found).reshape(rounds, 2, 2)


def beside_row(name: str, found: Array) -> str:
    cells = [name]
    for figure in range(2):
        on, off = found[:, 0, figure], found[:, 1, figure]
        ratio = MeanEstimate.of(np.log(on / off))
        low, high = np.exp(ratio.interval())
        cells += [
            f"{1e3 * np.median(on):.2f}",
            f"{1e3 * np.median(off):.2f}",
            f"{np.exp(ratio.mean):.3f} [{low:.3f}, {high:.3f}]",
        ]
    return f"| {' | '.join(cells)} |"


def _held_s(request: dict[str, Any]) -> float | None:
    if request["freed_ns"] is None or request["is_ghost"]:
        return None
    return float(request["freed_ns"] - request["closed_ns"]) / 1e9


def row(name: str, seen: Watched) -> str:
    last = seen.last
    if "stops" not in last:
        return f"| {name} | {last['why']} |"
    stops = {True: "yes", False: "no", None: f"not yet: {last['why']}"}[last["stops"]]
    true_s = seen.true_latency_s
    cells = (
        name,
        "memory" if last["share_of_memory"] else last["way"],
        stops,
        _first(seen),
        f"{last['leaves']} in {last['seconds']:.0f} s",
        _with_interval(last["latency_s"], last["latency_ci95"], 1e3),
        "none" if true_s is None else f"{1e3 * true_s:.0f}",
        _with_interval(last["ghost_rate"], last["ghost_ci95"], 100, digits=1),
        f"{100 * seen.true_ghost_rate:.1f}",
        _found(seen),
        _percent(last["share_of_load"]),
        _percent(last["share_of_memory"]),
        _percent(last["mistaken_share"]),
    )
    return f"| {' | '.join(cells)} |"


def _first(seen: Watched) -> str:
    """The leaves and the time at which the answer came that was kept."""
    kept = seen.last["stops"]
    since = next((n for n, one in enumerate(seen.told[::-1]) if one["stops"] != kept), None)
    first = seen.told[0 if since is None else len(seen.told) - since]
    return "-" if kept is None else f"{first['leaves']} in {first['seconds']:.0f} s"


def _found(seen: Watched) -> str:
    """The leaves and the time since which the interval of the ghost rate begins above 0."""
    above = [one["ghost_ci95"] is not None and one["ghost_ci95"][0] > 0 for one in seen.told]
    if not above[-1]:
        return "-"
    first = seen.told[len(above) - above[::-1].index(False) if False in above else 0]
    return f"{first['leaves']} in {first['seconds'] / 60:.1f} min"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _with_interval(
    value: float | None, interval: Sequence[float] | None, factor: float, *, digits: int = 0
) -> str:
    if value is None or interval is None:
        return "-"
    low, high = interval
    return f"{factor * value:.{digits}f} [{factor * low:.{digits}f}, {factor * high:.{digits}f}]"


HEAD: Final = (
    "server",
    "way",
    "stops",
    "known after leaves",
    "leaves",
    "latency, ms",
    "truth",
    "forgotten, %",
    "truth",
    "ghosts seen after leaves",
    "share of load",
    "of memory",
    "looks like a leave without one",
)
BESIDE: Final = (
    "other users of",
    "ITL p50 with, ms",
    "without",
    "ratio",
    "p99 with, ms",
    "without",
    "ratio",
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--users", type=int, default=USERS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=6, help="of the arms (0: none)")
    parser.add_argument("--server", metavar="URL")
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--model", default="random")
    parser.add_argument("--slots", type=int, default=SLOTS)
    parser.add_argument("--every", type=int, default=0)
    parser.add_argument("--late", type=float, default=0.0)
    parser.add_argument("names", nargs="*", default=[*SERVERS, *ENGINES], metavar="NAME")
    options = parser.parse_args(arguments)
    _say_head(HEAD)
    if options.server:
        names = ("slots", "every", "seconds", "users", "seed")
        settings = {one: getattr(options, one) for one in names}
        seen = watch_server(
            options.server, options.engine, options.model, late_s=options.late, **settings
        )
        print(row(options.engine, seen))  # noqa: T201
        return 0
    for name in options.names:
        print(row(name, look(name, options)), flush=True)  # noqa: T201
    if options.rounds:
        how = {"rounds": options.rounds, "users": options.users, "seed": options.seed}
        _say_head(BESIDE)
        with scripted_server(slots=SLOTS, num_blocks=BLOCKS) as server:
            found = beside(server.url, {"has_memory": True}, **how)
            print(beside_row("the scripted server", found), flush=True)  # noqa: T201
        with bundled_engine() as url:
            found = beside(url, ENGINE, **how)
            print(beside_row("the bundled engine", found), flush=True)  # noqa: T201
    return 0


def _say_head(cells: Sequence[str]) -> None:
    print(f"| {' | '.join(cells)} |\n|{'---|' * len(cells)}", flush=True)  # noqa: T201


def look(name: str, options: argparse.Namespace) -> Watched:
    script = SERVERS.get(name, {})
    is_deaf = script.get("ghost_every") == 1 or "deaf" in name
    users = USERS_WHERE_NEVER if is_deaf else options.users
    if name in ENGINES:
        return watch_engine(*ENGINES[name], seconds=options.seconds, users=users, seed=options.seed)
    return watch(
        seconds=options.seconds,
        users=users,
        seed=options.seed,
        has_metrics="stream_s" not in script,
        **script,
    )


if __name__ == "__main__":
    sys.exit(main())
