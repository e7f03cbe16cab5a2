"""The options of clients' sockets, read from the kernel on accepted ones."""

import asyncio
import socket
import sys

import pytest
import uvloop

from reference_engine.config import FrontendSettings
from reference_engine.serve.http import ListenError, is_full, listen, num_acknowledged

SETTINGS = FrontendSettings(heartbeat_s=7, ack_timeout_s=12.5, send_buffer_bytes=32_768)
NEVER = FrontendSettings(heartbeat_s=0, ack_timeout_s=86_400)
UNHURRIED = FrontendSettings(ack_timeout_s=2, stall_timeout_s=60)
TCP = socket.IPPROTO_TCP


def accepted_option(settings: FrontendSettings, level: int, name: int) -> int:
    """As the server has it: accepted by its event loop from its listening socket."""

    async def accept() -> int:
        options: asyncio.Queue[int] = asyncio.Queue()

        class Accepted(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                connection = transport.get_extra_info("socket")
                options.put_nowait(connection.getsockopt(level, name))
                transport.close()

        with listen("127.0.0.1", 0, settings) as listener:
            address = listener.getsockname()
            async with await asyncio.get_running_loop().create_server(Accepted, sock=listener):
                with socket.create_connection(address):
                    return await options.get()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(accept())


@pytest.mark.skipif(sys.platform != "linux", reason="the names and units are Linux's")
@pytest.mark.parametrize(
    ("settings", "level", "name", "value"),
    [
        (SETTINGS, socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
        (SETTINGS, TCP, "TCP_KEEPIDLE", 7),
        (SETTINGS, TCP, "TCP_KEEPINTVL", 3),
        (SETTINGS, TCP, "TCP_USER_TIMEOUT", 12_500),
        (SETTINGS, TCP, "TCP_NODELAY", 1),
        (SETTINGS, socket.SOL_SOCKET, "SO_SNDBUF", 2 * 32_768),  # the kernel's own share with it
        (UNHURRIED, TCP, "TCP_USER_TIMEOUT", 60_000),  # or --stall-timeout-s would mean nothing
        (NEVER, TCP, "TCP_KEEPIDLE", 32_767),
        (NEVER, TCP, "TCP_USER_TIMEOUT", 86_400_000),
    ],
)
def test_an_accepted_socket_is_watched_by_the_kernel(
    settings: FrontendSettings, level: int, name: str, value: int
) -> None:
    assert accepted_option(settings, level, getattr(socket, name)) == value


def test_a_port_that_is_taken_is_an_error_of_ours() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ListenError, match="choose another"),
    ):
        listen("127.0.0.1", taken.getsockname()[1], SETTINGS)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own count is Linux's")
def test_acknowledged_bytes_are_counted() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as theirs,
        listener.accept()[0] as ours,
    ):
        before = num_acknowledged(ours)
        ours.sendall(b"x" * 300)
        theirs.recv(300)
        while num_acknowledged(ours) - before < 300:
            """The acknowledgement is on its way."""
        assert num_acknowledged(ours) - before == 300


def test_a_socket_without_tcp_is_not_full() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert not is_full(ours)
