"""A search's side that makes no load: it starts a server if none answers, and keeps no secret."""

import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from harness.errors import ConfigError, TargetError
from harness.place import Place
from harness.records import Way
from harness.run.process import Child, Interruption, free_port
from harness.run.progress import Progress
from harness.search.keeper import listens
from harness.search.messages import SearchEvent
from harness.search.schedule import Leave, Schedule, Visit
from harness.search.search import Search, SearchConfig, Starting, search, without_secrets
from harness.store.run_folder import RunFolder

LISTENS = "import socket, sys; a = socket.create_server(('127.0.0.1', {})); sys.stdin.read()"


class NoProgress:
    def __init__(self) -> None:
        self.phases: list[str] = []

    def phase(self, what: str) -> None:
        self.phases.append(what)


@pytest.fixture(name="children")
def _children() -> Iterator[ExitStack]:
    with ExitStack() as children:
        yield children


def starting(folder: Path, children: ExitStack, progress: Any = None) -> Starting:
    return Starting(
        RunFolder.claim(folder / "out"),
        cast(Progress, progress or NoProgress()),
        Interruption(),
        children,
    )


def asked(port: int, *command: str) -> SearchConfig:
    restart = shlex.join(command) if command else None
    return SearchConfig(target_url=f"http://127.0.0.1:{port}", restart=restart)


def test_a_server_that_does_not_answer_is_started_until_it_was_asked(
    tmp_path: Path, children: ExitStack
) -> None:
    port, progress = free_port(), NoProgress()
    command = [sys.executable, "-c", LISTENS.format(port), "--api-key", "abc"]
    assert starting(tmp_path, children, progress).start_if_silent(asked(port, *command))
    place = Place(f"http://127.0.0.1:{port}")
    assert listens(place)
    children.close()
    assert not listens(place)
    assert progress.phases[0].endswith("(4 more words)")


def test_a_server_that_answers_is_left_alone(tmp_path: Path, children: ExitStack) -> None:
    port = free_port()
    command = [sys.executable, "-c", LISTENS.format(port)]
    start = starting(tmp_path, children)
    assert start.start_if_silent(asked(port, *command))
    assert not start.start_if_silent(asked(port, "/no/such/server"))
    assert not start.start_if_silent(asked(port))


def test_a_command_that_ends_at_once_says_its_code_and_its_words(
    tmp_path: Path, children: ExitStack
) -> None:
    command = [sys.executable, "-c", "import sys; print('no such model'); sys.exit(7)"]
    with pytest.raises(TargetError, match=r"(?s)ended with code 7.*no such model"):
        starting(tmp_path, children).start_if_silent(asked(free_port(), *command))


def test_a_command_that_does_not_exist_is_named(tmp_path: Path, children: ExitStack) -> None:
    with pytest.raises(ConfigError, match="--restart /no/such/server: "):
        starting(tmp_path, children).start_if_silent(asked(free_port(), "/no/such/server"))


@pytest.mark.parametrize(
    ("restart", "kept"),
    [
        ("docker run -e HF_TOKEN=abc vllm --auth b", "docker … (6 more words)"),
        ("curl -H 'Authorization: Basic dXNlcjpwYXNz'", "curl … (2 more words)"),
        ("/srv/abc/serve 'KEY=a b'", "serve … (1 more word)"),
        ("KEY=abc serve", "… … (1 more word)"),
        ("serve", "serve"),
        ("serve 'PASSWD=a", "…"),
    ],
)
def test_no_secret_of_the_restart_command_is_kept(restart: str, kept: str) -> None:
    typed = ["walkaway", "search", f"--restart={restart}", "--minutes", "3"]
    assert without_secrets(typed) == [*typed[:2], f"--restart={kept}", *typed[3:]]
    typed[2:3] = ["--restart", restart]
    assert without_secrets(typed) == [*typed[:3], kept, *typed[4:]]


def test_a_command_line_without_restart_is_kept_as_it_is() -> None:
    assert without_secrets(["walkaway", "search"]) == ["walkaway", "search"]


def test_a_schedule_that_cannot_be_played_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    config = SearchConfig(
        target_url="http://127.0.0.1:1",
        engine="openai",
        restart="/no/such/server",
        schedule=Schedule(seed=1, visits=(Visit(leave=Leave(way=Way.CANCEL)),)),
        out=tmp_path / "out",
    )
    never = cast(Any, None)
    with pytest.raises(ConfigError, match="--schedule: visit 0 leaves by `cancel`"):
        search(config, show=never, progress=never, interruption=never)
    assert not (tmp_path / "out").exists()


def test_a_load_process_that_waits_long_and_says_so_is_not_taken_for_one_that_hangs() -> None:
    """It waits for 15 minutes; then it says nothing for ten."""
    now_s = 0.0

    def reports(_poll_s: float) -> list[bytes]:
        nonlocal now_s
        now_s += 100.0
        alive = msgspec.json.encode(SearchEvent(event="alive"))
        return [alive] if now_s <= 900.0 else []

    never = cast(Any, None)
    one = Search(
        config=never,
        order=cast(Any, SimpleNamespace(seconds=3600.0)),
        result=cast(Any, SimpleNamespace(end="")),
        folder=never,
        secrets=(),
        show=never,
        interruption=Interruption(),
        clock_s=lambda: now_s,
    )
    one._follow(cast(Child, SimpleNamespace(read_reports=reports)), 0.0)
    assert one.result.end == "the load process took too long"
    assert now_s == 1600.0
