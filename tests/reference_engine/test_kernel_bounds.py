"""What the kernel is told of a connection, and tells of it."""

import socket
import sys

import pytest

from reference_engine.config import FrontendSettings
from reference_engine.serve.http import bound_silence, is_full, num_acknowledged


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own count is Linux's")
def test_what_the_other_end_has_taken_is_counted() -> None:
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


def test_accepted_sockets_inherit_the_bounds() -> None:
    settings = FrontendSettings(
        heartbeat_s=2.0, ack_timeout_s=3.0, stall_timeout_s=3.0, send_buffer_bytes=8192
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        bound_silence(listener, settings)
        with socket.create_connection(listener.getsockname()):
            accepted, _ = listener.accept()
            with accepted:
                options = [
                    accepted.getsockopt(socket.IPPROTO_TCP, option)
                    for option in (socket.TCP_KEEPIDLE, socket.TCP_USER_TIMEOUT)
                ]
                assert options == [2, 3000]
                assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 2 * 8192
                assert not is_full(accepted)


def test_what_is_no_tcp_connection_is_not_full() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert not is_full(ours)
