"""LoRA adapters: what clients that left still hold of them."""

import time
from contextlib import closing
from typing import Any, Final

from harness.client.dialect import route
from harness.conform.bench import Bench
from harness.conform.bystanders import MOST_AT_ONCE, SPREAD_STEPS, leave_each
from harness.conform.case import case, reports
from harness.conform.finding import Evidence, Finding
from harness.conform.routes import Reply, Routes
from harness.experiments.outcome import CannotDecideError, RefusedError
from harness.records import Outcome
from harness.store.conform_result import Failure, Level

NOT_OFFERED: Final = (404, 405, 501)


class Adapter:
    """`weights`: where the server reads the adapter from, if it says so."""

    def __init__(self, routes: Routes, name: str, path: str) -> None:
        self._routes, self._name, self._path = routes, name, path
        models = routes.get(route(path, "models")).body.get("data")
        cards = [one for one in models or () if isinstance(one, dict) and one.get("id") == name]
        if not cards:
            raise CannotDecideError(f"the server lists no model {name!r}: --adapter names it")
        self.weights: str | None = cards[0].get("root") or cards[0].get("path")

    def unload(self) -> Reply:
        return self._post("unload_lora_adapter", {"lora_name": self._name})

    def load(self) -> Reply:
        named = {"lora_name": self._name, "lora_path": self.weights}
        return self._post("load_lora_adapter", named)

    def _post(self, what: str, body: dict[str, Any]) -> Reply:
        return self._routes.post(route(self._path, what), body)


@case(
    "adapter/pinned",
    Level.SHOULD,
    "A LoRA adapter can be unloaded after its clients have left.",
    wire="As many clients as slots ask for answers of the adapter (`--adapter NAME`) and leave in "
    "their prefill or between tokens; after the settle time the adapter is unloaded by "
    "/v1/unload_lora_adapter, and loaded again. The control does so after whole answers.",
    passes="the adapter is unloaded within the settle time, as in the control, and its next "
    "request is answered once it is loaded again",
    methods="R",
    why="A request that was aborted and keeps its reference pins the adapter: an unload waits for "
    "ever, and every later load behind it.",
    remedy="release the adapter in the one place through which every request ends",
    needs=("adapter", "http"),
    caught=reports("sgl-project/sglang#34205 sgl-project/sglang#31808"),
)
def pinned(bench: Bench) -> Finding:
    plan = bench.session.plan
    if bench.asked.adapter is None:
        raise CannotDecideError("the adapter is not known: name it with --adapter")
    with closing(Routes(plan, bench.known, longest_s=bench.settle_s + 4 * bench.ttft_s)) as routes:
        adapter = Adapter(routes, bench.asked.adapter, plan.target.path)
        asked = {"body": {"model": bench.asked.adapter}}
        row = bench.ask(bench.short(4, **asked))
        if row.outcome is not Outcome.COMPLETED:
            raise CannotDecideError(f"the adapter does not answer: {row.error or row.outcome}")
        control_s = swap(adapter)
        left = leave_in_numbers(bench, asked)
        bench.pause(bench.settle_s)
        try:
            after_s = swap(adapter)
        except CannotDecideError as error:
            said = f"the adapter cannot be unloaded after {left} clients have left: {error}"
            return Finding(Failure.NEVER, said, {"left": left, "control_s": round(control_s, 3)})
        again = bench.ask(bench.short(4, **asked))
    evidence: Evidence = {
        "left": left,
        "control_s": round(control_s, 3),
        "unload_and_load_s": round(after_s, 3),
    }
    if again.outcome is not Outcome.COMPLETED:
        said = f"loaded again, the adapter does not answer: {again.error or again.outcome}"
        return Finding(Failure.HARM, said, evidence)
    return Finding(None, f"the adapter was unloaded after {left} clients have left", evidence)


def swap(adapter: Adapter) -> float:
    """Unload it and load it again: how long that took (s). Raises RefusedError if the server has
    no such routes, and CannotDecideError if one does not answer or refuses."""
    began_s = time.perf_counter()
    unloaded = adapter.unload()
    if unloaded.status in NOT_OFFERED:
        raise RefusedError(f"adapters cannot be unloaded here: status {unloaded.status}")
    for reply, what in ((unloaded, "its unload"), (adapter.load(), "its load")):
        if not reply.is_good:
            raise CannotDecideError(f"{what} has status {reply.status}")
    return time.perf_counter() - began_s


def leave_in_numbers(bench: Bench, asked: dict[str, Any]) -> int:
    streams = [bench.start(bench.long(**asked)) for _ in range(bench.crowd(MOST_AT_ONCE))]
    bench.pause(0)  # the requests go out
    spread_s = bench.ttft_s + SPREAD_STEPS * bench.step_s
    return len(leave_each(bench, streams, within_s=spread_s))
