"""A server that a command of the user's starts: a real process on loopback."""

import shlex
import sys
from pathlib import Path

import httpx
import pytest

from harness.errors import ConfigError, InterruptedRunError, TargetError
from harness.run.server import parse_command, started_command

SERVER = """\
import http.server, sys

class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0

    def do_GET(self):
        Handler.asked += self.path == "/health"
        is_well = self.path != "/health" or Handler.asked > 2
        self.send_response(200 if is_well else 503)
        self.end_headers()

    def log_message(self, *_):
        pass

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def start(
    words: list[str], folder: Path, *, ready_s: float = 60.0, is_interrupted: bool = False
) -> None:
    """Start it, see that it answers, and end it."""
    command = parse_command(shlex.join(words))
    with (
        httpx.Client() as client,
        started_command(
            command,
            folder / "engine.log",
            client=client,
            ready_s=ready_s,
            interrupted=lambda: is_interrupted,
        ) as (child, url),
    ):
        assert client.get(f"{url}/health").is_success
    assert child.wait(0) is not None


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code, "{port}"]


def test_it_is_ready_when_it_is_well_and_ends_with_its_run(tmp_path: Path) -> None:
    start(python(SERVER), tmp_path)


def test_one_that_ends_is_told_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="ended with code 3:\n  server: no such model"):
        start(python("print('no such model'); raise SystemExit(3)"), tmp_path)


def test_one_that_never_serves_is_given_up(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"was not ready in 0\.2 s \(target\.ready_s\)"):
        start(python("import signal; signal.pause()"), tmp_path, ready_s=0.2)


def test_waiting_for_it_can_be_interrupted(tmp_path: Path) -> None:
    with pytest.raises(InterruptedRunError):
        start(python("import signal; signal.pause()"), tmp_path, is_interrupted=True)


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"target\.command: no-such-program: No such file"):
        start(["no-such-program", "{port}"], tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("serve --port 8000", "has no {port}: put it where the server is told its port"),
        ("serve 'the {port}", "No closing quotation"),
    ],
)
def test_a_command_that_cannot_be_used_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_command(text)
    assert said in str(refusal.value)
