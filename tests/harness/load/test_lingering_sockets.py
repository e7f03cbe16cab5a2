"""Connections that users left open live on after the load's process, until standard input ends."""

import socket
import subprocess
import sys

HOLDER = """
import socket, sys
from harness.load.client import keep_open
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1, 0, 0, 0, 0, 0, 0, 0]))
keep_open([connection.fileno()])
connection.close()
"""


def test_a_connection_outlives_its_process_and_ends_with_standard_input() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", HOLDER, port], stdin=subprocess.PIPE
        )
        peer, _ = listener.accept()
    with peer:
        assert process.wait(30) == 0
        peer.sendall(b"still there?")  # would be answered with a reset
        peer.setblocking(False)
        try:
            seen = peer.recv(1)
        except BlockingIOError:
            seen = b"nothing"
        assert seen == b"nothing", "the connection ended with the process"
        assert process.stdin is not None
        process.stdin.close()
        peer.settimeout(30)
        try:
            seen = peer.recv(1)
        except ConnectionResetError:
            seen = b"reset"
        assert seen == b"reset"
