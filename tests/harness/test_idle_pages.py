"""The pages of an idle server: what they tell by role, and how long work is looked for on them."""

from collections.abc import Callable

import httpx
import pytest

from harness.collect.source import Notes
from harness.run.idle_pages import LATER_S, IdlePages
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
