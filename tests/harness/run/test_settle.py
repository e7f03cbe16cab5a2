"""After the load: how long to settle, and the metrics pages of the idle server."""

import httpx
import pytest

from harness.collect.source import Notes
from harness.run.process import Interruption
from harness.run.settle import (
    CALM_SCRAPES,
    LATER_S,
    CalmWatch,
    IdlePages,
    may_end_early,
    settle_seconds,
    silence_seconds,
)
from harness.workload.workload import SettleSettings, load_target, load_workload


@pytest.mark.parametrize(
    ("engine", "step_s", "settings", "seconds"),
    [
        ("reference", None, SettleSettings(), 2.0),
        ("reference", 0.02, SettleSettings(), 2.0),
        ("reference", 0.5, SettleSettings(), 10.0),
        ("reference", 0.5, SettleSettings(steps=2), 2.0),
        ("reference", 0.02, SettleSettings(seconds=0.1), 0.4),
        ("reference", None, SettleSettings(seconds=7.0), 7.0),
        ("vllm", 9.0, SettleSettings(), 5.0),
    ],
)
def test_settle_time_is_seconds_or_steps_whichever_is_longer(
    engine: str, step_s: float | None, settings: SettleSettings, seconds: float
) -> None:
    assert settle_seconds(load_target(engine), settings, step_s) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("engine", "way", "settings", "seconds"),
    [
        ("reference", "vanish", [], 11.0),
        ("reference", "stop_reading", [], 11.0),
        ("reference", "fin", [], 0.0),
        ("reference", "vanish", ["settle.silence_seconds=3"], 3.0),
        ("vllm", "vanish", [], 0.0),
    ],
)
def test_users_that_leave_in_silence_make_the_settle_time_longer(
    engine: str, way: str, settings: list[str], seconds: float
) -> None:
    mix = f'load.mix=[{{plan="tokens", tokens=5, way="{way}"}}]'
    workload = load_workload("demo", ["load.abandon_after_tokens=[]", mix, *settings])
    assert silence_seconds(load_target(engine), workload) == seconds


@pytest.mark.parametrize(
    ("engine", "early"),
    [("reference", True), ("llamacpp", True), ("vllm", False), ("openai", False)],
)
def test_settling_ends_early_only_if_gauges_are_exact(engine: str, early: bool) -> None:
    assert may_end_early(load_target(engine)) is early


class Server(Interruption):
    """Shows `running` requests and counts its readings; each pause takes its time."""

    def __init__(self, *, running: float = 0.0, generated: float = 100.0) -> None:
        super().__init__()
        self.page = f"vllm:num_requests_running {running}\n"
        self.page += f"vllm:generation_tokens_total {generated}\n"
        self.reads = self.now_ns = 0
        self.notes = Notes()

    def answer(self, _request: httpx.Request) -> httpx.Response:
        self.reads += 1
        return httpx.Response(200, text=self.page) if self.page else httpx.Response(500)

    def pages(self, *urls: str) -> IdlePages:
        return IdlePages(
            client=httpx.Client(transport=httpx.MockTransport(self.answer)),
            urls=urls,
            target=load_target("vllm").model_copy(update={"longest_step_s": 3.0}),
            notes=self.notes,
            clock_ns=lambda: self.now_ns,
        )

    def pause(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)


def test_idle_pages_are_read_and_an_unreadable_one_is_a_warning_and_no_zero() -> None:
    server = Server()
    assert server.pages().samples() is None
    assert server.reads == 0, "without a page nothing is asked"
    pages = server.pages("http://s/metrics")
    assert pages.roles() == {"running": 0.0, "generated_tokens": 100.0}
    assert pages.names_read == {"vllm:num_requests_running", "vllm:generation_tokens_total"}
    assert not server.notes.warnings()
    server.page = ""
    assert (pages.samples(), pages.roles()) == (None, {})
    (said,) = server.notes.warnings()
    assert "500" in said


@pytest.mark.parametrize(
    ("running", "generated", "interrupted", "reads"),
    [
        (0.0, 100.0, False, 1),  # no slot is held
        (1.0, 130.0, False, 1),  # it works
        (1.0, 100.0, False, 3),  # the longest step may still be under way
        (1.0, 100.0, True, 1),
    ],
)
def test_a_held_slot_is_watched_until_work_shows_or_a_step_must_have_ended(
    running: float, generated: float, interrupted: bool, reads: int
) -> None:
    server = Server(running=running, generated=generated)
    server.requested = interrupted
    before = {"running": 0.0, "generated_tokens": 50.0}
    after = {"running": running, "generated_tokens": 100.0}
    later = server.pages("http://s/metrics").roles_later(before, after, interruption=server)
    assert later["generated_tokens"] == generated
    assert server.reads == reads
    assert server.now_ns == int(reads * LATER_S * 1e9)


BEFORE = {"running": 0.0, "generated_tokens": 50.0}
STILL = {"running": 0.0, "generated_tokens": 100.0}
MOVED, HELD = STILL | {"generated_tokens": 101.0}, STILL | {"running": 1.0}


@pytest.mark.parametrize(
    ("scrapes", "now", "proves"),
    [
        ([(0.0, STILL), (0.5, STILL)], STILL, True),
        ([(0.1, STILL), (0.5, STILL)], STILL, False),  # not for long enough
        ([(0.0, STILL), (0.5, MOVED)], STILL, False),  # a counter moved on the way,
        ([(0.0, STILL)], MOVED, False),  # or at the end
        ([(0.0, HELD)], HELD, False),
        ([(0.0, {"running": 0.0})], {"running": 0.0}, False),  # no counter
        ([], STILL, False),
    ],
)
def test_one_reading_proves_an_idle_server_only_if_all_stood_still(
    scrapes: list[tuple[float, dict[str, float]]], now: dict[str, float], proves: bool
) -> None:
    watch = CalmWatch(BEFORE)
    for at_s, values in scrapes:
        watch.take(int(at_s * 1e9), values)
    assert watch.is_idle(int(LATER_S * 1e9), now) == proves


def test_gauges_must_be_back_in_several_scrapes_in_a_row() -> None:
    watch = CalmWatch(BEFORE)
    for n in range(CALM_SCRAPES):
        watch.take(n, STILL)
        watch.take(n, STILL)  # read again before the next scrape came
        assert watch.is_calm == (n == CALM_SCRAPES - 1)
    for n, other in enumerate((HELD, {"generated_tokens": 100.0}), 9):
        watch.take(n, other)
        assert not watch.is_calm
    watch = CalmWatch({})
    for n in range(CALM_SCRAPES):
        watch.take(n, STILL)
    assert not watch.is_calm, "nothing shows that it is"
