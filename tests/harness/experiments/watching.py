"""A patched process that lets one way watch a server: what to do as JSON on standard input; on
standard output its `Holds`, or why there are none. A gentle watch says a line for each turn."""

from gevent import monkey

monkey.patch_all()

import json
import math
import random
import sys
from typing import Any

from harness.client.lag import LagWatch
from harness.client.live_stream import LiveStream, join_all
from harness.client.session import LoadSession
from harness.experiments.gauge import GaugeWatcher
from harness.experiments.gentle import GentleTerms
from harness.experiments.gentle import watch as watch_gently
from harness.experiments.gentle_plan import WantedPrecision
from harness.experiments.holds import Leaver, Watcher
from harness.experiments.idle_server import ServerFacts
from harness.experiments.outcome import CannotDecideError
from harness.experiments.pace import PaceWatcher
from harness.experiments.quiet import QuietWatcher, meters_of
from harness.experiments.streams import Streams
from harness.workload.plan import LoadPlan
from harness.workload.workload import load_target
from tests.harness.client.asking import plan_of

READ_TOKENS = 4
OTHERS = 16  # that leave at once
LONG_S = 30.0


def plan_for(asked: dict[str, Any]) -> LoadPlan:
    if "engine" in asked:
        plan = plan_of(asked["url"], load=None)
        target = load_target(asked["engine"])
        return plan.model_copy(update={"target": target, "model": asked["model"]})
    running = {"name": "vllm:num_requests_running", "refresh": "at once", "trust": "exact"}
    waiting = running | {"name": "vllm:num_requests_waiting"}
    metrics = {"running": running, "waiting": waiting} if asked.get("has_metrics", True) else {}
    if asked.get("has_memory"):
        metrics["kv_usage"] = running | {"name": "vllm:kv_cache_usage_perc"}
    plan = plan_of(asked["url"], load=None)
    target = plan.target.model_validate(
        plan.target.model_dump() | {"metrics": metrics, "settle_s": asked["settle_s"]},
        strict=False,
    )
    return plan.model_copy(update={"target": target})


def watcher(streams: Streams, asked: dict[str, Any], rng: random.Random) -> Watcher:
    match asked["way"]:
        case "gauge":
            return GaugeWatcher(streams, [f"{asked['url']}/metrics"], rng)
        case "pace":
            return PaceWatcher(streams, rng, most_others=asked.get("most_others", 32))
        case _:
            return QuietWatcher(streams, meters_of(asked["pid"]), rng)


def main() -> None:
    asked = json.load(sys.stdin)
    session = LoadSession(
        plan_for(asked),
        api_key=None,
        tell=lambda _row: None,
        enough=lambda: None,
        give_up=sys.exit,
    )
    if asked["way"] == "gentle":
        gently(session, asked)
    else:
        print(json.dumps(holds(session, asked)))  # noqa: T201
    session.close()


def gently(session: LoadSession, asked: dict[str, Any]) -> None:
    terms = GentleTerms(
        max_seconds=asked["max_seconds"],
        settle_s=asked["settle_s"],
        slots=asked["slots"],
        context=asked.get("context"),
        wanted=WantedPrecision() if asked.get("is_wanted") else None,
    )
    urls = [f"{asked['url']}/metrics"]
    try:
        for found in watch_gently(session, urls, terms, random.Random(asked.get("seed", 1))):
            print(json.dumps(found._asdict()), flush=True)  # noqa: T201
            if found.leaves >= asked.get("leaves", math.inf):
                break
    except CannotDecideError as error:
        print(json.dumps({"why": str(error)}))  # noqa: T201


def holds(session: LoadSession, asked: dict[str, Any]) -> dict[str, Any]:
    facts = ServerFacts(asked["slots"], asked["step_s"], 2 * asked["step_s"], None)
    lag = LagWatch(open_streams=lambda: 0, give_up=sys.exit)
    streams = Streams(session, facts, asked["settle_s"], lag=lag)
    rng = random.Random(1)

    def ready(stream: LiveStream, _number: int) -> None:
        stream.wait_tokens(READ_TOKENS, LONG_S)

    def wait_half(_stream: LiveStream, _number: int) -> None:
        streams.pause(streams.ttft_s / 2)

    is_early = asked["is_early"]
    leaver = Leaver(
        streams.long(),
        streams.start,
        wait_half if is_early else ready,
        LiveStream.leave,
        is_early=is_early,
    )
    way = watcher(streams, asked, rng)
    try:
        assert way.can_judge(facts) is None
        told: dict[str, Any] = way.holds(leaver, asked["tries"])._asdict()
    except CannotDecideError as error:
        told = {"why": str(error)}
    if isinstance(way, PaceWatcher):
        told["ratio"] = way.ratio
        if asked.get("is_share"):
            told["held"] = way.held(lambda: leave_all(streams))
    streams.end()
    return told


def leave_all(streams: Streams) -> int:
    others = [streams.start(streams.long()) for _ in range(OTHERS)]
    for one in others:
        one.wait_tokens(READ_TOKENS, LONG_S)
    for one in others:
        one.leave()
    join_all(others, LONG_S)
    return len(others)


if __name__ == "__main__":
    main()
