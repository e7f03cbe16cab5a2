"""A real HTTP server on loopback whose answers a test scripts. No test is judged by its time."""

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes, and the making of one, tells of the machine alone.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# From the request's path to status, headers and body.
Script = Callable[[str], tuple[int, dict[str, str], bytes]]
Serve = Callable[[Script], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts servers that answer GET as scripted; gives back their URL; stops them at the end."""
    running: list[tuple[ThreadingHTTPServer, threading.Thread]] = []

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

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        running.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server, thread in running:
        server.shutdown()
        thread.join()
        server.server_close()
