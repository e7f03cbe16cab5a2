"""Gentle watches beside busy users, held to the truth of a scripted server:
`python -m tests.truth.gentle [--seconds S] [--users N] [--seed S] [NAME ...]`.

32 slots, steps of 20 ms, other users who come and go, some of whom leave. For each behaviour of the
server a line of a table: what the watch says, and what the server knows.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import httpx

from tests.e2e.running import scripted_server

ROOT: Final = Path(__file__).parents[2]
SLOTS: Final = 32
USERS: Final = 12
SLOWER: Final = {"step_s": 0.01, "stream_s": 0.001}
SERVERS: Final[dict[str, dict[str, Any]]] = {
    "good": {},
    "ten steps late": {"linger_steps": 10},
    "thirty steps late": {"linger_steps": 30},
    "half forgotten": {"ghost_share": 0.5},
    "2 % forgotten": {"ghost_share": 0.02},
    "never": {"ghost_every": 1},
    "good, by pace": SLOWER,
    "ten steps late, by pace": SLOWER | {"linger_steps": 10},
    "never, by pace": SLOWER | {"ghost_every": 1},
}
ENGINES: Final = {
    "bundled engine": (),
    "bundled engine, aborts 0.2 s late": ("delay-abort=0.2",),
    "bundled engine, half lost": ("lose-abort=0.5",),
    "bundled engine, deaf": ("ignore-disconnect",),
}
OURS: Final = "walkaway-"
USERS_WHERE_NEVER: Final = 4  # whose ghosts take slots, too


class Watched(NamedTuple):
    """`told`: a line for each turn. `held_s`: of our streams that left, None for ever."""

    told: list[dict[str, Any]]
    held_s: list[float | None]

    @property
    def last(self) -> dict[str, Any]:
        return self.told[-1]

    @property
    def true_latency_s(self) -> float | None:
        """Of those that were let go of before their end."""
        let_go = [one for one in self.held_s if one is not None]
        return median(let_go) if let_go else None

    @property
    def true_ghost_rate(self) -> float:
        return sum(one is None for one in self.held_s) / max(1, len(self.held_s))


@contextmanager
def crowd(url: str, users: int, seed: int) -> Iterator[None]:
    command = [sys.executable, "-m", "tests.truth.crowd", url, str(users), str(seed)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT) as process:
        try:
            yield
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(10)


def watch(
    *,
    seconds: float,
    users: int = USERS,
    seed: int = 1,
    has_metrics: bool = True,
    is_wanted: bool = False,
    **script: Any,
) -> Watched:
    """On the scripted server."""
    asked = {"has_metrics": has_metrics, "is_wanted": is_wanted}
    settings = {"slots": SLOTS, "num_blocks": 16384, "ghost_seed": seed, **script}
    with scripted_server(**settings) as server:
        told = _told(server.url, asked, seconds=seconds, users=users, seed=seed)
        left = [
            one
            for one in server.truth()["requests"]
            if one["client_id"].startswith(OURS) and one["closed_ns"] is not None
        ]
    return Watched(told, [_held_s(one) for one in left])


def watch_engine(*faults: str, seconds: float, users: int = USERS, seed: int = 1) -> Watched:
    """On the bundled engine, with these faults."""
    with bundled_engine(*faults) as url:
        asked = {"engine": "reference", "model": "tiny"}
        told = _told(url, asked, seconds=seconds, users=users, seed=seed)
        page = httpx.get(f"{url}/walkaway/lifecycle", params={"limit": 10**6}, trust_env=False)
    events: dict[str, dict[str, int]] = {}
    for line in page.text.splitlines():
        one = json.loads(line)
        if (one["client_request_id"] or "").startswith(OURS) and one["reason"] != "length":
            events.setdefault(one["client_request_id"], {})[one["event"]] = one["t_ns"]
    held_s = [
        None if "removed" not in one else (one["removed"] - one["disconnected"]) / 1e9
        for one in events.values()
        if "disconnected" in one
    ]
    return Watched(told, held_s)


@contextmanager
def bundled_engine(*faults: str) -> Iterator[str]:
    given = [word for fault in faults for word in ("--fault", fault)]
    command = [sys.executable, "-m", "reference_engine", "--port", "0", "--exit-with-stdin"]
    sizes = ["--max-num-seqs", str(SLOTS), "--num-blocks", "4096"]
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
    asked = asked | {
        "url": url,
        "way": "gentle",
        "slots": SLOTS,
        "settle_s": 1.0,
        "max_seconds": seconds,
        "seed": seed,
    }
    with crowd(url, users, seed):
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
        last["way"],
        stops,
        _first(seen),
        f"{last['leaves']} in {last['seconds']:.0f} s",
        _with_interval(last["latency_s"], last["latency_ci95"], 1e3),
        "none" if true_s is None else f"{1e3 * true_s:.0f}",
        _with_interval(last["ghost_rate"], last["ghost_ci95"], 100),
        f"{100 * seen.true_ghost_rate:.0f}",
        "-" if last["share_of_load"] is None else f"{100 * last['share_of_load']:.0f} %",
    )
    return f"| {' | '.join(cells)} |"


def _first(seen: Watched) -> str:
    """When the answer came that was kept."""
    kept = seen.last["stops"]
    since = next((n for n, one in enumerate(seen.told[::-1]) if one["stops"] != kept), None)
    first = seen.told[0 if since is None else len(seen.told) - since]
    return "-" if kept is None else f"{first['leaves']} in {first['seconds']:.0f} s"


def _with_interval(value: float | None, interval: Sequence[float] | None, factor: float) -> str:
    if value is None or interval is None:
        return "-"
    low, high = interval
    return f"{factor * value:.0f} [{factor * low:.0f}, {factor * high:.0f}]"


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
    "share of load",
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--users", type=int, default=USERS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("names", nargs="*", default=[*SERVERS, *ENGINES], metavar="NAME")
    options = parser.parse_args(arguments)
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}", flush=True)  # noqa: T201
    for name in options.names:
        print(row(name, look(name, options)), flush=True)  # noqa: T201
    return 0


def look(name: str, options: argparse.Namespace) -> Watched:
    script = SERVERS.get(name, {})
    is_deaf = bool(script.get("ghost_every")) or "deaf" in name
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
