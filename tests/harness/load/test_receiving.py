"""Receiving waits as long as it may: on the system's sockets, and on gevent's, where one timer does
for all waits of a socket. (Nothing is patched here: only gevent's own sockets wait in its hub.)
"""

import socket as system_socket
import time
from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace

import gevent  # noqa: TID251
import pytest
from gevent import socket as gevent_socket  # noqa: TID251

from harness.load.receiver import BlockingReceiver, HubReceiver, Receiver, receiver

SHORT_S = 0.002
LONG_S = 30.0
NOTHING_CAME = (TimeoutError, BlockingIOError)


class Line:
    """A socket with its receiver, and the peer's end."""

    def __init__(self, near: system_socket.socket, far: system_socket.socket) -> None:
        self.sock, self.far = near, far
        self.receiver: Receiver = receiver(near)


@pytest.fixture(params=[system_socket, gevent_socket])
def line(request: pytest.FixtureRequest) -> Iterator[Line]:
    near, far = request.param.socketpair()
    with near, far:
        made = Line(near, far)
        yield made
        made.receiver.close()


@pytest.fixture
def hub_line() -> Iterator[Line]:
    near, far = gevent_socket.socketpair()
    with near, far:
        made = Line(near, far)
        yield made
        made.receiver.close()


def test_each_kind_of_socket_has_its_receiver(hub_line: Line) -> None:
    assert isinstance(hub_line.receiver, HubReceiver)
    near, far = system_socket.socketpair()
    with near, far:
        assert isinstance(receiver(near), BlockingReceiver)


@pytest.mark.parametrize("wait_s", [None, LONG_S, 0])
def test_what_has_come_is_received(line: Line, wait_s: float | None) -> None:
    line.far.sendall(b"word")
    assert line.receiver.receive(wait_s) == b"word"


def test_the_end_of_the_connection_is_nothing(line: Line) -> None:
    line.far.shutdown(system_socket.SHUT_WR)
    assert line.receiver.receive(LONG_S) == b""


def test_a_wait_without_bytes_times_out_and_the_next_one_may_succeed(line: Line) -> None:
    for _ in range(2):
        with pytest.raises(NOTHING_CAME):
            line.receiver.receive(SHORT_S)
    line.far.sendall(b"word")
    assert line.receiver.receive(LONG_S) == b"word"


def test_0_never_waits(line: Line) -> None:
    with pytest.raises(BlockingIOError):
        line.receiver.receive(0)


def test_each_receive_is_handed_over_until_that_is_enough(line: Line) -> None:
    began_ns = time.perf_counter_ns()
    taken: list[tuple[bytes, int]] = []

    def take(data: bytes, t_ns: int) -> bool:
        taken.append((data, t_ns))
        assert t_ns <= time.perf_counter_ns()
        line.far.sendall(b"%d" % len(taken))
        return len(taken) < 4

    line.far.sendall(b"0")
    line.receiver.receive_each(take, LONG_S, None)
    assert [data for data, _ in taken] == [b"0", b"1", b"2", b"3"]
    times = [began_ns, *(t_ns for _, t_ns in taken)]
    assert times == sorted(times)
    assert line.receiver.receive(LONG_S) == b"4"


def test_what_goes_wrong_with_the_bytes_is_for_who_waits(line: Line) -> None:
    def take(data: bytes, _t_ns: int) -> bool:
        raise ValueError(data)

    line.far.sendall(b"word")
    with pytest.raises(ValueError, match="word"):
        line.receiver.receive_each(take, LONG_S, None)
    line.far.sendall(b"next")
    assert line.receiver.receive(LONG_S) == b"next"


def test_a_connection_that_broke_is_for_who_waits(line: Line) -> None:
    line.sock.sendall(b"never read")
    line.far.close()
    with pytest.raises(OSError, match="reset"):
        line.receiver.receive_each(lambda _data, _t_ns: True, LONG_S, None)


def test_no_bytes_in_time_or_not_enough_of_them(line: Line) -> None:
    with pytest.raises(NOTHING_CAME):
        line.receiver.receive_each(lambda _data, _t_ns: True, SHORT_S, None)

    def take(_data: bytes, _t_ns: int) -> bool:
        line.far.sendall(b"and on")
        return True

    line.far.sendall(b"word")
    with pytest.raises(NOTHING_CAME):
        line.receiver.receive_each(take, LONG_S, time.perf_counter_ns() + int(SHORT_S * 1e9))


def test_the_next_bytes_have_as_long_as_the_first(
    hub_line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns = 0  # the timer is the system's, the time that it looks at is ours
    clock = SimpleNamespace(perf_counter_ns=lambda: now_ns)
    monkeypatch.setattr("harness.load.receiver.time", clock)
    numbers = count(1)

    def take(_data: bytes, _t_ns: int) -> bool:
        nonlocal now_ns
        now_ns += int(SHORT_S * 1e9) - 1
        gevent.spawn_later(4 * SHORT_S, hub_line.far.sendall, b"next")
        return next(numbers) < 4

    hub_line.far.sendall(b"first")
    hub_line.receiver.receive_each(take, SHORT_S, None)
    assert next(numbers) == 5


def test_bytes_that_come_while_waiting_end_the_wait(hub_line: Line) -> None:
    gevent.spawn(hub_line.far.sendall, b"word")  # its turn comes when we wait
    assert hub_line.receiver.receive(LONG_S) == b"word"


def test_the_timer_of_an_earlier_wait_does_not_end_a_longer_one(hub_line: Line) -> None:
    hub_line.far.sendall(b"one")
    assert hub_line.receiver.receive(SHORT_S) == b"one"
    gevent.spawn_later(4 * SHORT_S, hub_line.far.sendall, b"two")
    assert hub_line.receiver.receive(LONG_S) == b"two"


def test_a_shorter_wait_than_the_timer_is_set_for_ends_in_time(hub_line: Line) -> None:
    hub_line.far.sendall(b"one")
    assert hub_line.receiver.receive(LONG_S) == b"one"
    with pytest.raises(NOTHING_CAME):
        hub_line.receiver.receive(SHORT_S)


def test_what_comes_while_nobody_waits_is_left_alone_until_somebody_does(hub_line: Line) -> None:
    assert isinstance(hub_line.receiver, HubReceiver)
    hub_line.far.sendall(b"one")
    assert hub_line.receiver.receive(LONG_S) == b"one"
    hub_line.far.sendall(b"two")
    while hub_line.receiver.is_watched:  # for ever, and the loop would turn without a pause
        gevent.idle()
    assert hub_line.receiver.receive(LONG_S) == b"two"


def test_who_was_killed_waits_no_more(hub_line: Line) -> None:
    waiting = gevent.spawn(hub_line.receiver.receive, LONG_S)
    gevent.sleep(0)
    waiting.kill()
    hub_line.far.sendall(b"word")
    assert hub_line.receiver.receive(LONG_S) == b"word"


def test_only_bytes_or_time_end_a_wait(hub_line: Line) -> None:
    waiting = gevent.spawn(hub_line.receiver.receive, LONG_S)
    gevent.sleep(0)
    gevent.get_hub().loop.run_callback(waiting.switch, "somebody else")
    gevent.sleep(0)
    assert not waiting.dead
    hub_line.far.sendall(b"word")
    assert waiting.get() == b"word"


def test_what_came_as_late_as_the_timer_is_received(hub_line: Line) -> None:
    waiting = gevent.spawn(hub_line.receiver.receive, SHORT_S)
    gevent.sleep(0)
    hub_line.far.sendall(b"word")
    due_s = time.perf_counter() + 2 * SHORT_S
    while time.perf_counter() < due_s:
        """Whoever is busy finds both at once."""
    assert waiting.get() == b"word"
