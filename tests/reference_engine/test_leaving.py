"""Every way to leave, against the real engine: how it is detected, and that it ends in time."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import httpx
import pytest

from tests.reference_engine.running_engine import (
    RunningEngine,
    post_raw,
    raw_request,
    running,
)

pytestmark = pytest.mark.e2e

STEP_FLAGS = ["--runner", "simulated", "--sim-fixed-ms", "2", "--max-num-seqs", "2"]
TIME_FLAGS = ["--heartbeat-s", "0.2", "--ack-timeout-s", "1", "--stall-timeout-s", "0.5"]
# Of the range for benchmarks between networks; by process, since several may test at once.
_LAST = os.getpid() % 63 * 4
NETWORK = f"198.18.{os.getpid() // 63 % 256}"
OURS, THEIRS = f"{NETWORK}.{_LAST + 1}", f"{NETWORK}.{_LAST + 2}"


def ended(engine: RunningEngine, name: str) -> dict[str, Any]:
    """The engine's account of a request, once its last block is free."""
    engine.wait_for("finished", name)
    answer: dict[str, Any] = httpx.get(f"{engine.url}/v1/requests/{name}").json()
    return answer


@contextmanager
def both_slots_taken(engine: RunningEngine, name: str) -> Iterator[None]:
    fillers = [post_raw(engine, f"{name}-filler-{i}", stream=False) for i in range(2)]
    for i, _ in enumerate(fillers):
        engine.wait_for("first_token", f"{name}-filler-{i}")
    yield
    for filler in fillers:
        filler.close()


def lazy_client(engine: RunningEngine, name: str, **fields: Any) -> socket.socket:
    """A client whose machine takes little: its request is sent, nothing is read."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    client.connect(engine.address)
    client.sendall(raw_request(name, **fields))
    return client


def test_a_client_that_stops_reading_is_cut_off() -> None:
    with (
        running(*STEP_FLAGS, *TIME_FLAGS, "--send-buffer-bytes", "4096") as engine,
        lazy_client(engine, "lazy", stream=True),
    ):
        kept = ended(engine, "lazy")
    assert kept["cancellation"]["method"] == "stall"
    assert kept["usage"]["completion_tokens"] < 3000


def test_a_client_that_stops_reading_is_there_even_if_the_kernel_ends_it() -> None:
    """The kernel treats unread data like unacknowledged data; the engine must tell them apart.

    Here its buffers have room for the whole answer, so it sees no stall itself.
    """
    flags = ["--heartbeat-s", "0", "--ack-timeout-s", "1", "--stall-timeout-s", "1"]
    with (
        running(*STEP_FLAGS, *flags, "--send-buffer-bytes", str(2**20)) as engine,
        lazy_client(engine, "lazy", stream=True),
    ):
        assert ended(engine, "lazy")["cancellation"]["method"] == "stall"


@contextmanager
def cable(name: str) -> Iterator[str]:
    """A second machine at the end of a cable: a network namespace. Yields its name."""
    near, far = f"{name}n", f"{name}f"
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs `ip` and root for a network namespace")
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    if made.returncode != 0:
        pytest.skip(f"no network namespace can be made here: {made.stderr.decode().strip()}")
    try:
        for command in (
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
        subprocess.run(["ip", "netns", "del", name], check=True)


def pull(name: str) -> None:
    subprocess.run(["ip", "-n", name, "link", "set", f"{name}f", "down"], check=True)


FAR_CLIENT = """
import socket, sys
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])), 20)
connection.sendall(bytes.fromhex(sys.argv[3]))
print("sent", flush=True)
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
    with subprocess.Popen([*command, host, str(port), request], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"sent\n"
        try:
            yield
        finally:
            process.kill()


@pytest.fixture(scope="module")
def far_engine() -> Iterator[tuple[RunningEngine, str]]:
    with (
        cable(f"wa{os.getpid() % 100_000}") as netns,
        running(*STEP_FLAGS, "--sim-fixed-ms", "20", *TIME_FLAGS, "--host", OURS) as started,
    ):
        yield started, netns


@pytest.mark.parametrize(
    ("is_waiting", "stream"), [(True, False), (False, True)], ids=["waiting", "generating"]
)
def test_a_client_that_vanishes_without_a_word(
    far_engine: tuple[RunningEngine, str], is_waiting: bool, stream: bool
) -> None:
    """Its bound: heartbeat_s + ack_timeout_s, and the second in which the kernel counts probes."""
    engine, netns = far_engine
    name = f"vanishes-{is_waiting}-{stream}"
    subprocess.run(["ip", "-n", netns, "link", "set", f"{netns}f", "up"], check=True)
    with (
        both_slots_taken(engine, name) if is_waiting else nullcontext(),
        far_client(engine, netns, name, stream=stream),
    ):
        engine.wait_for("arrived" if is_waiting else "first_token", name)
        pull(netns)
        pulled_ns = httpx.get(f"{engine.url}/walkaway/clock").json()["now_ns"]
        kept = ended(engine, name)
    assert kept["cancellation"]["method"] == "heartbeat"
    assert kept["cancellation_info"]["phase"] == ("waiting" if is_waiting else "decode")
    assert (kept["cancellation"]["t_ns"] - pulled_ns) / 1e9 < 0.2 + 1.0 + 3.0
