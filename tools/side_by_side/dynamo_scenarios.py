"""Signals and ends of handlers, and their times: Dynamo's runtime and ours, in one set of cases.

    PYTHON tools/side_by_side/dynamo_scenarios.py run MODULE FILE.json [--quick]
    PYTHON tools/side_by_side/dynamo_scenarios.py cancels MODULE FILE.json [--quick]
    python tools/side_by_side/dynamo_scenarios.py table DYNAMO.json OURS.json

MODULE is `dynamo.runtime` or `reference_engine.dynamo`, and PYTHON one that has it. A caller, a
middle and a leaf, processes of their own, write what happens to them into one file; their clock is
the machine's. A case is a way in which the caller gives up after 10 items, the leaf's manner, and
how the middle calls it: `direct` (no middle), `passes` (`context=context`), or `passes not`.
`cancels`: 300 stops with each of the last two, and the ms until the leaf heard of it.
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import product
from pathlib import Path
from random import Random
from statistics import median, quantiles
from typing import Any, NamedTuple

GIVE_UP_AFTER = 10
WAYS = ("stop", "drop", "task", "hold", "process killed", "stopped before")
PROCESSES = ("caller", "middle", "leaf")
TIERS = ("direct", "passes", "passes not")
HOSTS = (
    "DYN_TCP_RPC_HOST",
    "DYN_TCP_RESPONSE_STREAM_HOST",
    "DYN_EVENT_PLANE_HOST",
    "DYN_SYSTEM_HOST",
)


class DynamoCase(NamedTuple):
    """`read on`: the caller does not give up."""

    way: str
    leaf: str
    tier: str

    @property
    def name(self) -> str:
        return " · ".join(self)


CASES = [
    *(DynamoCase(*axes) for axes in product(WAYS, ("looks", "never looks"), TIERS)),
    *(DynamoCase(way, "awaits", "direct") for way in ("stop", "drop")),
    *(DynamoCase(way, "has no context", "direct") for way in ("stop", "drop")),
    DynamoCase("stop", "raises CancelledError", "direct"),
    DynamoCase("stop", "has a last word", "direct"),
    *(DynamoCase("read on", "raises", tier) for tier in TIERS),
    DynamoCase("read on", "stops itself", "direct"),
    DynamoCase("read on", "dies", "direct"),  # the last one, because the leaf serves all the others
]


class SharedNotes:
    """Lines of JSON, each with the time in ns, in the file that all processes share."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("a", buffering=1)

    def note(self, case: str, who: str, what: str, context: Any = None, **facts: Any) -> None:
        if context is not None:
            facts |= {"stopped": context.is_stopped(), "killed": context.is_killed()}
        facts |= {"case": case, "who": who, "what": what, "t_ns": time.perf_counter_ns()}
        self._file.write(json.dumps(facts) + "\n")

    async def when_told(self, case: str, who: str, context: Any) -> None:
        await context.async_killed_or_stopped()
        self.note(case, who, "told", context)


def handler(who: str, notes: SharedNotes, items_of: Callable[..., AsyncIterator[Any]]) -> Any:
    """`items_of` as a handler that notes when it heard that it should end, and how it ended."""

    async def handle(request: Any, context: Any) -> AsyncIterator[Any]:
        case, how = request["case"], ["ran out"]
        told = asyncio.ensure_future(notes.when_told(case, who, context))
        notes.note(case, who, "started", context)
        try:
            async for item in items_of(request, context, how):
                yield item
        except GeneratorExit:
            how[:] = ["closed"]
            raise
        except BaseException as error:
            how[:] = [f"raised {type(error).__name__}"]
            raise
        finally:
            if told.cancel() and context.is_stopped():  # it had no turn yet
                notes.note(case, who, "told", context)
            notes.note(case, who, "ended", context, how=how[0])

    return handle


async def leaf_items(request: Any, context: Any, how: list[str]) -> AsyncIterator[Any]:
    manner, item_s = request["leaf"], request["item_s"]
    for number in range(request["items"]):
        if context.is_stopped() and manner not in ("never looks", "awaits", "has no context"):
            how[:] = ["looked"]
            if manner == "raises CancelledError":
                raise asyncio.CancelledError
            if manner == "has a last word":
                yield {"last_word": True}
            return
        if number == GIVE_UP_AFTER and manner == "raises":
            raise ValueError("a mistake of the leaf")
        if number == GIVE_UP_AFTER and manner == "stops itself":
            context.stop_generating()
        if number == GIVE_UP_AFTER and manner == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.sleep(item_s * (20 if manner == "awaits" and number >= GIVE_UP_AFTER else 1))
        yield {"token_ids": [number], "index": 0}


async def serve_leaf(runtime: Any, notes: SharedNotes) -> None:
    handle = handler("leaf", notes, leaf_items)

    class NoContext:
        """Stands in for the context that this handler does not have."""

        is_stopped = is_killed = staticmethod(lambda: False)
        async_killed_or_stopped = staticmethod(asyncio.Event().wait)

    async def without_context(request: Any) -> AsyncIterator[Any]:
        async for item in handle(request, NoContext):
            yield item

    await asyncio.gather(
        runtime.endpoint("lab.leaf.generate").serve_endpoint(handle),
        runtime.endpoint("lab.leaf.plain").serve_endpoint(without_context),
    )


async def serve_middle(runtime: Any, notes: SharedNotes) -> None:
    client = await runtime.endpoint("lab.leaf.generate").client()
    await client.wait_for_instances()

    async def items(request: Any, context: Any, how: list[str]) -> AsyncIterator[Any]:
        passed = {"context": context} if request["tier"] == "passes" else {}
        async for item in await client.generate(request, annotated=False, **passed):
            yield item
        how[:] = ["its stream ended"]

    await runtime.endpoint("lab.middle.generate").serve_endpoint(handler("middle", notes, items))


class DynamoCaller:
    def __init__(self, module: Any, runtime: Any, notes: SharedNotes, *, quick: bool) -> None:
        self._new_context = module.Context
        self._runtime = runtime
        self._notes = notes
        self._size = {"items": 60, "item_s": 0.01} if quick else {"items": 100, "item_s": 0.02}
        self._quiet_s = 0.3 if quick else 0.8

    async def call(self, case: DynamoCase) -> None:
        path = "lab.leaf.generate" if case.tier == "direct" else "lab.middle.generate"
        if case.leaf == "has no context":
            path = "lab.leaf.plain"
        client = await self._runtime.endpoint(path).client()
        await client.wait_for_instances()
        context = self._new_context(case.name)
        if case.way == "stopped before":
            self._give_up(case)
            context.stop_generating()
        given_up = asyncio.Event()
        reading = asyncio.create_task(self._read(case, client, context, given_up))
        await given_up.wait()
        if case.way == "task":
            self._give_up(case)
            reading.cancel()
        try:
            late, error = await reading, ""
        except (Exception, asyncio.CancelledError) as failure:  # noqa: BLE001 each runtime's own
            late, error = 0, f"{type(failure).__name__}: {failure}".removesuffix(": ")
        del reading
        self._notes.note(case.name, "caller", "ended", context, late=late, error=error)
        await asyncio.sleep(self._quiet_s)
        self._notes.note(case.name, "caller", "quiet", context)

    async def cancel_often(self, times: int) -> None:
        """The cancels come at random moments of an item's time."""
        client = await self._runtime.endpoint("lab.middle.generate").client()
        await client.wait_for_instances()
        random, size = Random(0), {"items": 1000, "item_s": 0.005}
        for number, tier in product(range(times), TIERS[1:]):
            case = DynamoCase("stop", str(number), tier)
            request, context = {**size, **case._asdict(), "case": case.name}, self._new_context()
            stream = await client.generate(request, annotated=False, context=context)
            for _ in range(3):
                await anext(stream)
            await asyncio.sleep(random.uniform(0, size["item_s"]))
            self._give_up(case)
            context.stop_generating()
            async for _ in stream:
                pass

    async def _read(
        self, case: DynamoCase, client: Any, context: Any, given_up: asyncio.Event
    ) -> int:
        """The number of items after it gave up."""
        request = {**self._size, **case._asdict(), "case": case.name}
        if case.way not in ("hold", "read on"):
            request["items"] *= 5  # it must not run out on a busy machine
        stream = await client.generate(request, annotated=False, context=context)
        num_items = 0
        try:
            async for _ in stream:
                num_items += 1
                if num_items == GIVE_UP_AFTER:
                    given_up.set()
                    if case.way == "stop":
                        self._give_up(case)
                        context.stop_generating()
                    elif case.way in ("drop", "hold", "process killed"):
                        break
        finally:
            given_up.set()
        if case.way in ("drop", "hold", "process killed"):
            self._give_up(case)
        if case.way == "process killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if case.way == "hold":
            await asyncio.sleep(self._size["items"] * self._size["item_s"] * 1.5)
        del stream
        return max(0, num_items - GIVE_UP_AFTER) if case.way != "stopped before" else num_items

    def _give_up(self, case: DynamoCase) -> None:
        self._notes.note(case.name, "caller", "gave up")


async def role(args: argparse.Namespace) -> None:
    """One process's part; the callers end, the others serve until they are killed."""
    module, notes = import_module(args.module), SharedNotes(args.file)
    runtime = module.DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    if args.command == "leaf":
        await serve_leaf(runtime, notes)
    elif args.command == "middle":
        await serve_middle(runtime, notes)
    else:
        caller = DynamoCaller(module, runtime, notes, quick=args.quick)
        if args.case == "cancels":
            await caller.cancel_often(10 if args.quick else 300)
        cases = [case for case in CASES if args.case in ("", case.name)]
        if not args.case:
            cases = [case for case in cases if case.way != "process killed"]
        if args.quick:
            await asyncio.gather(*(caller.call(case) for case in cases[:-1]))
            cases = cases[-1:]
        for case in cases:
            await caller.call(case)
        runtime.shutdown()


Start = Callable[..., "subprocess.Popen[bytes]"]


@contextmanager
def processes(module: str, file: Path, *, quick: bool) -> Iterator[Start]:
    """A leaf and a middle, and what starts a caller. All write to `file`."""
    settings = dict.fromkeys(HOSTS, "127.0.0.1") | {
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(file.parent),
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_LOG": "error",
    }

    def start(name: str, case: str = "") -> "subprocess.Popen[bytes]":
        command = [sys.executable, __file__, name, module, str(file), "--case", case]
        return subprocess.Popen(
            [*command, *(["--quick"] if quick else [])], env={**os.environ, **settings}
        )

    serving = [start("leaf"), start("middle")]
    try:
        yield start
    finally:
        for process in serving:
            process.terminate()
            process.wait(10)


def run(module: str, *, quick: bool) -> dict[str, Any]:
    """The facts of each case, by its name."""
    killed = [case.name for case in CASES if case.way == "process killed"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "notes.jsonl"
        with processes(module, file, quick=quick) as start:
            started = [start("caller", name) for name in killed] if quick else []
            for caller in started or (start("caller", name) for name in killed):
                caller.wait(60)
                time.sleep(0 if quick else 0.8)  # noqa: TID251 quiet, as between other cases
            if (status := start("caller").wait(300)) != 0:
                raise RuntimeError(f"the caller ended with status {status}")
        return facts(file, [case.name for case in CASES])


def cancels(module: str, *, quick: bool) -> dict[str, list[float]]:
    """The ms until the leaf heard of each stop, with the context passed on and without."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "notes.jsonl"
        with processes(module, file, quick=quick) as start:
            if (status := start("caller", "cancels").wait(300)) != 0:
                raise RuntimeError(f"the caller ended with status {status}")
            time.sleep(0.2)  # noqa: TID251 for the last one that is not linked
        times = 10 if quick else 300
        names = {
            tier: [DynamoCase("stop", str(n), tier).name for n in range(times)]
            for tier in TIERS[1:]
        }
        found = facts(file, [name for of_tier in names.values() for name in of_tier])
    return {tier: [found[n]["leaf"]["told_ms"] for n in names[tier]] for tier in names}


def facts(file: Path, cases: list[str]) -> dict[str, Any]:
    """The signal of each case's processes, how each ended, and ms since the caller gave up."""
    found: dict[str, Any] = {}
    notes = [json.loads(line) for line in file.read_text().splitlines()]
    for case in cases:
        of_case = [note for note in notes if note["case"] == case]
        gave_up = [note for note in of_case if note["what"] == "gave up"] or of_case
        found[case] = {who: {} for who in PROCESSES}
        for note in of_case:
            told = found[case][note["who"]]
            is_killed, is_stopped = note.get("killed"), note.get("stopped")
            told["signal"] = "kill" if is_killed else "stop" if is_stopped else ""
            if note["what"] in ("told", "ended"):
                told[f"{note['what']}_ms"] = round((note["t_ns"] - gave_up[0]["t_ns"]) / 1e6, 2)
            told |= {name: note[name] for name in ("how", "late", "error") if name in note}
    return found


def table(dynamo: dict[str, Any], ours: dict[str, Any]) -> str:
    """A Markdown table. A number is milliseconds since the caller gave up, or its call began."""
    sides = [f"{side}: {who}" for side in ("Dynamo", "walkaway") for who in PROCESSES]
    lines = [f"| gives up · leaf · context | {' | '.join(sides)} |", f"|{' --- |' * 7}"]
    for case in CASES:
        cells = [cell(who, side[case.name][who]) for side in (dynamo, ours) for who in PROCESSES]
        lines.append(f"| {case.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(who: str, told: dict[str, Any]) -> str:
    """The caller's stream end and context; each other's signal and end."""
    if not told or (who == "caller" and "ended_ms" not in told):
        return ""
    ended = f" {told['ended_ms']:.0f}" if "ended_ms" in told else ""
    if who == "caller":
        late = f", {told['late']} late" if told["late"] else ""
        signal = f"; own context: {told['signal']}" if told["signal"] else ""
        return f"{told['error'] or 'no error'}{ended}{late}{signal}"
    heard = f"{told['signal']} {told['told_ms']:.0f}" if "told_ms" in told else "not told"
    return f"{heard}; {told.get('how', 'no end')}{ended}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=("run", "cancels", "table", "leaf", "middle", "caller"))
    parser.add_argument("module")
    parser.add_argument("file", type=Path)
    parser.add_argument("--case", default="")
    parser.add_argument("--quick", action="store_true", help="small sizes, all cases at once")
    args = parser.parse_args()
    if args.command in ("run", "cancels"):
        found = (run if args.command == "run" else cancels)(args.module, quick=args.quick)
        args.file.write_text(json.dumps(found, indent=1) + "\n")
        if args.command == "cancels":
            for tier, times_ms in found.items():
                p99 = quantiles(times_ms, n=100)[-1]
                print(f"{tier}: median {median(times_ms):.2f} ms, p99 {p99:.2f} ms")  # noqa: T201
    elif args.command == "table":
        both = (json.loads(Path(file).read_text()) for file in (args.module, args.file))
        print(table(*both))  # noqa: T201
    else:
        asyncio.run(role(args))


if __name__ == "__main__":
    main()
