"""Each defect of the pair engine shows where its two features meet, and the engine without one is
right there."""

from collections.abc import Callable
from typing import Any

import pytest

from tools.truth.pair_engine import ADAPTER, DEFECTS, MEMORY, SLOTS, PairEngine, Request
from tools.truth.search_faults import PAGE

LONG = MEMORY // SLOTS - 40  # of a prompt: one a slot just fits into memory


class Bench:
    """Requests on one engine, and what their clients got."""

    def __init__(self, defect: str) -> None:
        self.engine = PairEngine(defect)
        self.texts: dict[Request, str] = {}
        self.cut: set[Request] = set()

    def ask(self, prompt: str = "abc", tokens: int = 8, **more: Any) -> Request:
        def deliver(_index: int, word: str, _is_last: bool) -> None:
            self.texts[request] += word

        request = Request(
            name=more.pop("name", "r"),
            prompt=prompt,
            tokens=tokens,
            deliver=deliver,
            cut=lambda: self.cut.add(request),
            **more,
        )
        self.texts[request] = ""
        self.engine.submit(request)
        return request

    def run(self, steps: int = 40) -> None:
        for _ in range(steps):
            self.engine.step()

    @property
    def is_idle(self) -> bool:
        """Nothing is held, and the page says so."""
        engine = self.engine
        gauges = [line.split()[1] for line in engine.page().splitlines()[:2]]
        return not engine.has_work and not engine.held_tokens and gauges == ["0", "0"]

    def preempt_the_last(self, **more: Any) -> Request:
        """Others take the memory until the latest request gives its own up."""
        for number in range(SLOTS - more.get("n", 1)):
            self.ask(f"{number}" + "x" * LONG, tokens=200)
        left = self.ask("y" * LONG, tokens=400, **more)
        while not any(part.was_preempted for part in left.parts):
            self.engine.step()
        return left


def n_preempted(bench: Bench) -> bool:
    bench.engine.leave(bench.preempt_the_last(n=2))
    bench.run(300)
    return bench.is_idle


def cancel_preempted(bench: Bench) -> bool:
    bench.engine.leave(bench.preempt_the_last(), "cancel")
    bench.run(300)
    return bench.is_idle


def schema_again(bench: Bench) -> bool:
    left = bench.ask(has_schema=True)
    bench.run(2)
    bench.engine.leave(left)
    again = bench.ask(has_schema=True)
    bench.run()
    return again.is_over


def prefix_chunk(bench: Bench) -> bool:
    bench.ask("s" * 64, tokens=1)
    bench.run(3)
    left = bench.ask("s" * 64 + "t" * 200)
    bench.run(2)
    bench.engine.leave(left)
    return bench.is_idle


def id_again(bench: Bench) -> bool:
    bench.engine.leave(bench.ask(name="one"), "cancel")
    again = bench.ask(name="one")
    bench.run()
    return len(bench.texts[again].split()) == again.tokens


def stop_last(bench: Bench) -> bool:
    left = bench.ask(has_stop=True, tokens=3)
    bench.run(3)
    bench.engine.leave(left)
    return bench.is_idle


def priority_queued(bench: Bench) -> bool:
    _, left, behind = (
        [bench.ask(priority=1) for _ in range(SLOTS)],
        bench.ask(priority=1),
        bench.ask(priority=1),
    )
    bench.run(2)
    bench.engine.leave(left)
    bench.run()
    return behind.is_over


def unary_half_close(bench: Bench) -> bool:
    for _ in range(SLOTS):
        bench.ask()
    left = bench.ask(is_stream=False)
    bench.run(2)
    bench.engine.leave(left, "half-close")
    bench.run()
    return bench.is_idle


def tools_twin(bench: Bench) -> bool:
    left, stays = bench.ask(has_tools=True), bench.ask(has_tools=True)
    bench.run(3)
    bench.engine.leave(left)
    bench.run()
    return stays not in bench.cut


def adapter_twin(bench: Bench) -> bool:
    alone = bench.ask()
    bench.run()
    left, stays = bench.ask(model=ADAPTER), bench.ask()
    bench.run(3)
    bench.engine.leave(left)
    bench.run()
    return bench.texts[stays] == bench.texts[alone]


def unary_fan_out(bench: Bench) -> bool:
    bench.engine.leave(bench.ask(is_stream=False, n=2))
    return bench.is_idle


def reset_chat(bench: Bench) -> bool:
    left = bench.ask(is_chat=True)
    bench.run(2)
    bench.engine.leave(left, "rst")
    return not bench.engine.ended["length"]


def slot_in_20(bench: Bench) -> bool:
    for _ in range(20):
        left = bench.ask()
        bench.run(2)
        bench.engine.leave(left)
    return bench.is_idle


PAIRS: dict[str, Callable[[Bench], bool]] = {
    one.__name__.replace("_", "-"): one
    for one in (
        *(n_preempted, cancel_preempted, schema_again, prefix_chunk, id_again, stop_last),
        *(priority_queued, unary_half_close, tools_twin, adapter_twin, unary_fan_out),
        *(reset_chat, slot_in_20),
    )
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_pair_breaks_something_with_its_own_defect_alone(name: str) -> None:
    is_right = PAIRS[name]
    assert is_right(Bench(""))
    assert not is_right(Bench(name))
    others = [other for other in DEFECTS if other != name and not is_right(Bench(other))]
    assert not others


def test_a_request_beyond_the_slots_waits_and_is_answered() -> None:
    bench = Bench("")
    asked = [bench.ask(f"{number}", priority=number % 2) for number in range(3 * SLOTS)]
    bench.run(80)
    assert all(len(bench.texts[one].split()) == one.tokens for one in asked)
    assert bench.is_idle
    assert bench.engine.ended == {"length": 3 * SLOTS, "abort": 0}


def test_what_was_preempted_has_the_same_text_in_the_end() -> None:
    bench, alone = Bench(""), Bench("")
    preempted = bench.preempt_the_last()
    bench.run(1000)
    whole = alone.ask(preempted.prompt, tokens=preempted.tokens)
    alone.run(1000)
    assert bench.texts[preempted] == alone.texts[whole]
    assert len(alone.texts[whole].split()) == preempted.tokens


def test_the_page_of_the_search_describes_each_defect() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert not [name for name, what in DEFECTS.items() if f"| `{name}` | {what}" not in page]
