"""A server started by a command of the user's, for one run of an arm.

So two builds are compared without a script that starts them, and each run meets a server that has
served nobody yet, as with the bundled engine. The command names where the port goes; the server is
ready when it tells its models and, where it has a page for its health, that it is well.
"""

import shlex
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import httpx

from harness.errors import ConfigError, InterruptedRunError, TargetError
from harness.process import Child

PORT: Final = "{port}"
POLL_S: Final = 0.1


def parse_command(text: str) -> list[str]:
    """The words of a command line, as a shell would split them. Raises ConfigError."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"target.command: {text}: {error}") from error
    if not any(PORT in word for word in words):
        raise ConfigError(
            f"target.command: {text}: has no {PORT}: put it where the server is told its port, "
            f"such as `--port {PORT}`"
        )
    return words


@contextmanager
def started_command(
    command: list[str],
    log: Path,
    *,
    client: httpx.Client,
    ready_s: float,
    interrupted: Callable[[], bool],
    clock_ns: Callable[[], int] = time.perf_counter_ns,
) -> Iterator[tuple[Child, str]]:
    """The server for the length of a `with` block: its process and its URL.

    Raises ConfigError for a program that cannot be started, TargetError where it ends or is not
    ready within `ready_s` seconds, and InterruptedRunError where the user gave up waiting.
    """
    port = _free_port()
    words = [word.replace(PORT, str(port)) for word in command]
    try:
        child = Child("server", words, log, quit_s=0)
    except OSError as error:
        raise ConfigError(f"target.command: {words[0]}: {error.strerror}") from error
    with child as server:
        url = f"http://127.0.0.1:{port}"
        until_ns = clock_ns() + int(ready_s * 1e9)
        while clock_ns() < until_ns:
            if (code := server.wait(POLL_S)) is not None:
                raise TargetError(f"the server ended with code {code}:\n{server.tail()}")
            if interrupted():
                raise InterruptedRunError("interrupted while the server was starting")
            if _is_ready(client, url):
                yield server, url
                return
        raise TargetError(
            f"the server was not ready in {ready_s:g} s (target.ready_s):\n{server.tail()}"
        )


def _free_port() -> int:
    """One that is free now; who takes it first has it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _is_ready(client: httpx.Client, url: str) -> bool:
    try:
        health, models = (client.get(f"{url}{path}") for path in ("/health", "/v1/models"))
    except httpx.HTTPError:
        return False
    return models.is_success and (health.is_success or health.status_code == httpx.codes.NOT_FOUND)
