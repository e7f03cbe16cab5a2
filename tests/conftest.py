"""Fixtures of all tests: texts held to a file, and a scripted HTTP server on loopback.

No test is judged by its time.
"""

import os
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from reference_engine.device import NoGpuError, Surroundings, find_gpus, look_around

# The time that an example takes depends on the machine alone.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def has_gpu(around: Surroundings) -> bool:
    """As torch would say, which takes seconds to import."""
    try:
        find_gpus(around)
    except NoGpuError:
        return False
    return True


# Without a GPU, Triton's kernels run in its interpreter; it reads this once, when it is imported.
if not has_gpu(look_around()):
    os.environ["TRITON_INTERPRET"] = "1"

SNAPSHOTS = Path(__file__).parent / "snapshots"
WRITES_SNAPSHOTS = os.environ.get("SNAPSHOTS") == "write"  # `make snapshots`

Snapshot = Callable[[str, str], None]


@pytest.fixture
def snapshot() -> Snapshot:
    """Holds a text to the file tests/snapshots/NAME.txt: `snapshot(name, text)`."""

    def hold(name: str, text: str) -> None:
        file = SNAPSHOTS / f"{name}.txt"
        if WRITES_SNAPSHOTS:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        assert file.exists(), f"{file} is missing: run `make snapshots` and look at it"
        assert text == file.read_text(), "is it meant? `make snapshots`, then look at the diff"

    return hold


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`make snapshots` runs only the tests that hold a text to a file."""
    if WRITES_SNAPSHOTS:
        items[:] = [item for item in items if "snapshot" in getattr(item, "fixturenames", ())]


# From the request's path to status, headers and body.
Script = Callable[[str], tuple[int, dict[str, str], bytes]]
ServePages = Callable[[Script], str]


class _Server(ThreadingHTTPServer):
    request_queue_size = 256  # of many that connect at once, the others would retry seconds later


@pytest.fixture
def serve_pages() -> Iterator[ServePages]:
    """Starts servers that answer GET as scripted; gives back their URL; stops them at the end."""
    running: list[tuple[_Server, threading.Thread]] = []

    def start(script: Script) -> str:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                status, headers, body = script(self.path)
                self.send_response(status)
                for name, value in {**headers, "content-length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                return

        server = _Server(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        running.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server, thread in running:
        server.shutdown()
        thread.join()
        server.server_close()
