"""Clients that fall silent, against the real engine: how it is detected, and that it ends in time.

The other ways to leave, and the same in the harness's own hands: tests/e2e/test_ways_to_leave.py.
"""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.reference_engine.running_engine import RunningEngine, post_raw, raw_request, running

pytestmark = pytest.mark.e2e

STEP_FLAGS = ["--runner", "simulated", "--max-num-seqs", "2", "--sim-fixed-ms"]
# Of the range for benchmarks between networks; by process, since several may test at once.
_LAST = os.getpid() % 63 * 4
NETWORK = f"198.18.{os.getpid() // 63 % 256}"
OURS, THEIRS = f"{NETWORK}.{_LAST + 1}", f"{NETWORK}.{_LAST + 2}"


def cancellation_of(engine: RunningEngine, name: str) -> tuple[str, str, int]:
    """How its leaving was seen, in what phase and when, once its last block is free."""
    engine.wait_for("finished", name)
    kept = httpx.get(f"{engine.url}/v1/requests/{name}").json()
    seen = kept["cancellation"]
    return seen["method"], kept["cancellation_info"]["phase"], seen["t_ns"]


def lazy_client(engine: RunningEngine, name: str, **fields: Any) -> socket.socket:
    """A client whose machine takes little: its request is sent, nothing is read."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    client.connect(engine.address)
    client.sendall(raw_request(name, **fields))
    return client


def test_a_client_that_stops_reading_is_there_even_if_the_kernel_ends_it() -> None:
    """The kernel treats unread data like unacknowledged data; the engine must tell them apart.

    Here its buffers have room for the whole answer, so it sees no stall itself.
    """
    flags = ["--heartbeat-s", "0", "--ack-timeout-s", "1", "--stall-timeout-s", "1"]
    with (
        running(*STEP_FLAGS, "2", *flags, "--send-buffer-bytes", str(2**20)) as engine,
        lazy_client(engine, "lazy", stream=True),
    ):
        method, _, _ = cancellation_of(engine, "lazy")
        assert method == "stall"


@contextmanager
def cable(name: str) -> Iterator[str]:
    """A second machine at the end of a cable: a network namespace. Yields its name."""
    near, far = f"{name}n", f"{name}f"
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs `ip` and root for a network namespace")
    try:
        for command in (
            f"ip netns add {name}",
            f"ip link add {near} type veth peer name {far} netns {name}",
            f"ip addr add {OURS}/30 dev {near}",
            f"ip link set {near} up",
            f"ip -n {name} addr add {THEIRS}/30 dev {far}",
            f"ip -n {name} link set {far} up",
        ):
            made = subprocess.run(command.split(), capture_output=True, check=False)
            if made.returncode != 0:
                pytest.skip(f"{command}: {made.stderr.decode().strip()}")
        yield name
    finally:
        # By itself the cable would stay for as long as the far machine has something to send.
        subprocess.run(["ip", "link", "del", near], capture_output=True, check=False)
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


FAR_CLIENT = """
import socket, sys
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])), 20)
connection.sendall(bytes.fromhex(sys.argv[3]))
connection.settimeout(None)
while connection.recv(65536):
    pass
"""


@contextmanager
def far_client(engine: RunningEngine, netns: str, name: str, **fields: Any) -> Iterator[None]:
    """A client on the other machine, that reads all it gets."""
    host, port = engine.address
    request = raw_request(name, **fields).hex()
    command = ["ip", "netns", "exec", netns, sys.executable, "-c", FAR_CLIENT]
    with subprocess.Popen([*command, host, str(port), request]) as process:
        try:
            yield
        finally:
            process.kill()


def test_clients_that_vanish_without_a_word_are_seen_generating_or_waiting() -> None:
    """Bound: heartbeat_s + ack_timeout_s, and the second in which the kernel counts probes."""
    flags = ["--heartbeat-s", "0.2", "--ack-timeout-s", "1", "--stall-timeout-s", "0.5"]
    with (
        cable(f"wa{os.getpid() % 100_000}") as netns,
        running(*STEP_FLAGS, "20", *flags, "--host", OURS) as engine,
        post_raw(engine, "near"),
        far_client(engine, netns, "generating", stream=True),
    ):
        for name in ("near", "generating"):
            engine.wait_for("first_token", name)
        # The near one in the queue takes the slot that the vanished one leaves.
        with post_raw(engine, "next"), far_client(engine, netns, "waiting"):
            engine.wait_for("arrived", "waiting")
            subprocess.run(["ip", "-n", netns, "link", "set", f"{netns}f", "down"], check=True)
            pulled_ns = httpx.get(f"{engine.url}/walkaway/clock").json()["now_ns"]
            for name, expected in (("generating", "decode"), ("waiting", "waiting")):
                method, phase, seen_ns = cancellation_of(engine, name)
                assert (method, phase) == ("heartbeat", expected)
                assert (seen_ns - pulled_ns) / 1e9 < 0.2 + 1.0 + 3.0
