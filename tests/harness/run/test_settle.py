"""The pages of an idle server: what they tell by role, and how long work is looked for on them."""

from collections.abc import Callable

import httpx
import pytest

from harness.collect.source import Notes
from harness.run.settle import CALM_SCRAPES, LATER_S, CalmWatch, IdlePages
from harness.workload.workload import load_target

URL = "http://127.0.0.1/metrics"


class Server:
    """Shows `running` requests and counts its readings; each pause takes its time."""

    def __init__(self) -> None:
        self.running: float | None = 0.0
        self.generated = 100.0
        self.reads = 0
        self.now_ns = 0
        self.notes = Notes()

    def answer(self, _request: httpx.Request) -> httpx.Response:
        self.reads += 1
        if self.running is None:
            return httpx.Response(500)
        lines = f"vllm:num_requests_running {self.running}\n"
        lines += f"vllm:generation_tokens_total {self.generated}\n"
        return httpx.Response(200, text=lines)

    def pages(self, *urls: str) -> IdlePages:
        client = httpx.Client(transport=httpx.MockTransport(self.answer))
        target = load_target("vllm").model_copy(update={"longest_step_s": 3.0})
        return IdlePages(client, list(urls), target, notes=self.notes, clock_ns=lambda: self.now_ns)

    def pause(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)


def never() -> bool:
    return False


def later(server: Server, *, interrupted: Callable[[], bool] = never) -> dict[str, float]:
    before = {"running": 0.0, "generated_tokens": 50.0}
    after = {"running": 1.0, "generated_tokens": 100.0}
    pages = server.pages(URL)
    return pages.roles_later(before, after, pause=server.pause, interrupted=interrupted)


def test_roles_are_told_and_the_names_kept() -> None:
    pages = Server().pages(URL)
    assert pages.roles() == {"running": 0.0, "generated_tokens": 100.0}
    assert pages.names_read == {"vllm:num_requests_running", "vllm:generation_tokens_total"}


def test_a_page_that_cannot_be_read_is_a_warning_and_no_zero() -> None:
    server = Server()
    server.running = None
    pages = server.pages(URL)
    assert pages.samples() is None
    assert pages.roles() == {}
    (said,) = server.notes.warnings()
    assert "500" in said


def test_without_a_page_nothing_is_asked() -> None:
    server = Server()
    assert server.pages().samples() is None
    assert server.reads == 0
    assert not server.notes.warnings()


@pytest.mark.parametrize(("running", "generated", "reads"), [(1.0, 130.0, 1), (1.0, 100.0, 3)])
def test_work_is_looked_for_until_it_shows_or_a_step_must_have_ended(
    running: float, generated: float, reads: int
) -> None:
    server = Server()
    server.running, server.generated = running, generated
    assert later(server)["generated_tokens"] == generated
    assert server.reads == reads
    assert server.now_ns == int(reads * LATER_S * 1e9)


def test_an_interrupted_look_ends_at_once() -> None:
    server = Server()
    server.running = 1.0
    later(server, interrupted=lambda: True)
    assert server.reads == 1


BEFORE = {"running": 0.0, "generated_tokens": 50.0}
STILL = {"running": 0.0, "generated_tokens": 100.0}


@pytest.mark.parametrize(
    ("scrapes", "now", "proves"),
    [
        ([(0.0, STILL), (0.5, STILL)], STILL, True),
        ([(0.1, STILL), (0.5, STILL)], STILL, False),
        ([(0.0, STILL), (0.5, STILL | {"generated_tokens": 101.0})], STILL, False),
        ([(0.0, STILL)], STILL | {"generated_tokens": 101.0}, False),
        ([(0.0, STILL | {"running": 1.0})], STILL | {"running": 1.0}, False),
        ([(0.0, {"running": 0.0})], {"running": 0.0}, False),
        ([], STILL, False),
    ],
    ids=[
        "it stood still",
        "not for long enough",
        "a counter moved on the way",
        "a counter moved at the end",
        "somebody has a slot",
        "no counter tells",
        "nothing was scraped",
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
    watch.take(9, STILL | {"running": 1.0})
    assert not watch.is_calm
