"""Receiving waits as long as it may: on the system's sockets, and on gevent's, where one timer does
for all waits of a socket. (Nothing is patched here: only gevent's own sockets wait in its hub.)
"""

import socket as system_socket
import time
from collections.abc import Iterator
from itertools import count
from types import ModuleType, SimpleNamespace

import gevent  # noqa: TID251
import pytest
from gevent import socket as gevent_socket  # noqa: TID251

from harness.client.receiver import HubReceiver, receiver

SHORT_S = 0.002
LONG_S = 30.0
NOTHING_CAME = (TimeoutError, BlockingIOError)


class Line:
    """A socket with its receiver, and the peer's end."""

    def __init__(self, module: ModuleType) -> None:
        self.sock, self.far = module.socketpair()
        self.receiver = receiver(self.sock)
        self.receive, self.receive_each = self.receiver.receive, self.receiver.receive_each

    def close(self) -> None:
        self.receiver.close()
        self.sock.close()
        self.far.close()


@pytest.fixture(params=[system_socket, gevent_socket])
def line(request: pytest.FixtureRequest) -> Iterator[Line]:
    made = Line(request.param)
    yield made
    made.close()


@pytest.fixture
def hub_line() -> Iterator[Line]:
    made = Line(gevent_socket)
    yield made
    made.close()


@pytest.mark.parametrize("wait_s", [None, LONG_S, 0])
def test_what_has_come_is_received_and_nothing_is_the_end(line: Line, wait_s: float | None) -> None:
    line.far.sendall(b"word")
    assert line.receive(wait_s) == b"word"
    line.far.shutdown(system_socket.SHUT_WR)
    assert line.receive(wait_s) == b""


def test_a_wait_without_bytes_times_out_and_the_next_one_may_succeed(line: Line) -> None:
    with pytest.raises(BlockingIOError):
        line.receive(0)
    for _ in range(2):
        with pytest.raises(NOTHING_CAME):
            line.receive(SHORT_S)
    line.far.sendall(b"word")
    assert line.receive(LONG_S) == b"word"


def test_each_receive_is_handed_over_until_that_is_enough(line: Line) -> None:
    began_ns = time.perf_counter_ns()
    taken: list[tuple[bytes, int]] = []

    def take(data: bytes, t_ns: int) -> bool:
        taken.append((data, t_ns))
        assert t_ns <= time.perf_counter_ns()
        line.far.sendall(b"%d" % len(taken))
        return len(taken) < 4

    line.far.sendall(b"0")
    line.receive_each(take, LONG_S, None)
    assert [data for data, _ in taken] == [b"0", b"1", b"2", b"3"]
    times = [began_ns, *(t_ns for _, t_ns in taken)]
    assert times == sorted(times)
    assert line.receive(LONG_S) == b"4"


def test_an_error_in_taking_bytes_is_raised_in_the_wait(line: Line) -> None:
    def take(data: bytes, _t_ns: int) -> bool:
        raise ValueError(data)

    line.far.sendall(b"word")
    with pytest.raises(ValueError, match="word"):
        line.receive_each(take, LONG_S, None)
    line.far.sendall(b"next")
    assert line.receive(LONG_S) == b"next"


def test_a_connection_that_broke_is_an_error_of_the_wait(line: Line) -> None:
    line.sock.sendall(b"never read")
    line.far.close()
    with pytest.raises(OSError, match="reset"):
        line.receive_each(lambda _data, _t_ns: True, LONG_S, None)


def test_no_bytes_in_time_or_not_enough_of_them(line: Line) -> None:
    with pytest.raises(NOTHING_CAME):
        line.receive_each(lambda _data, _t_ns: True, SHORT_S, None)

    def take(_data: bytes, _t_ns: int) -> bool:
        line.far.sendall(b"and on")
        return True

    line.far.sendall(b"word")
    with pytest.raises(NOTHING_CAME):
        line.receive_each(take, LONG_S, time.perf_counter_ns() + int(SHORT_S * 1e9))


def test_the_next_bytes_have_as_long_as_the_first(
    hub_line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns = 0  # the timer is the system's, the time that it looks at is ours
    clock = SimpleNamespace(perf_counter_ns=lambda: now_ns)
    monkeypatch.setattr("harness.client.receiver.time", clock)
    numbers = count(1)

    def take(_data: bytes, _t_ns: int) -> bool:
        nonlocal now_ns
        now_ns += int(SHORT_S * 1e9) - 1
        gevent.spawn_later(4 * SHORT_S, hub_line.far.sendall, b"next")
        return next(numbers) < 4

    hub_line.far.sendall(b"first")
    hub_line.receive_each(take, SHORT_S, None)
    assert next(numbers) == 5


def test_each_wait_has_its_own_time_whatever_the_timer_was_set_for(hub_line: Line) -> None:
    hub_line.far.sendall(b"one")
    assert hub_line.receive(SHORT_S) == b"one"
    gevent.spawn_later(4 * SHORT_S, hub_line.far.sendall, b"two")
    assert hub_line.receive(LONG_S) == b"two"
    with pytest.raises(NOTHING_CAME):
        hub_line.receive(SHORT_S)


def test_what_comes_between_two_waits_is_left_alone(hub_line: Line) -> None:
    assert isinstance(hub_line.receiver, HubReceiver)
    hub_line.far.sendall(b"one")
    assert hub_line.receive(LONG_S) == b"one"
    hub_line.far.sendall(b"two")
    while hub_line.receiver.is_watched:  # for ever, and the loop would turn without a pause
        gevent.idle()
    assert hub_line.receive(LONG_S) == b"two"


def test_a_killed_greenlet_waits_no_more(hub_line: Line) -> None:
    waiting = gevent.spawn(hub_line.receive, LONG_S)
    gevent.sleep(0)
    waiting.kill()
    hub_line.far.sendall(b"word")
    assert hub_line.receive(LONG_S) == b"word"


def test_only_bytes_or_time_end_a_wait(hub_line: Line) -> None:
    waiting = gevent.spawn(hub_line.receive, LONG_S)
    gevent.sleep(0)
    gevent.get_hub().loop.run_callback(waiting.switch, "from elsewhere")
    gevent.sleep(0)
    assert not waiting.dead
    hub_line.far.sendall(b"word")
    assert waiting.get() == b"word"


def test_what_came_as_late_as_the_timer_is_received(hub_line: Line) -> None:
    waiting = gevent.spawn(hub_line.receive, SHORT_S)
    gevent.sleep(0)
    hub_line.far.sendall(b"word")
    due_s = time.perf_counter() + 2 * SHORT_S
    while time.perf_counter() < due_s:
        """A busy loop finds both at once."""
    assert waiting.get() == b"word"
