"""README followed word by word: every shell block is run by `sh -e` in a clean clone.

As it stands, but for what takes too long here or needs another machine:

- `walkaway run` is short: the command on PATH adds `--set run.max_seconds=2`, but to the run that
  is judged: it must pass, and is made again where a busy machine made it invalid;
- `make` is dry (`make -n`): demo and test would install, and run, what CI does anyway;
- a block that says so is not run; `.venv` has nothing to activate, as the commands are on PATH;
- servers at ports 8000 and 8080 are scripted ones on free ports;
- a command that serves a page, on a free port too, is ended when the page is there.

A comment before a block says so to its reader and to this test. The commands of the other
pages are not run: `tests/harness/test_documents.py` holds each to the flags and keys there are.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.e2e.running import ROOT, UNDECIDED, page_served, scripted_server, until_decided
from tests.harness.documents import README, Block, blocks

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(300)]

SHORT = "--set run.max_seconds=2 --set settle.seconds=1"
COMMANDS = {
    "make": 'exec /usr/bin/env -i PATH="/usr/bin:/bin" make -n "$@"',
    "walkaway": f"""\
case "$*" in
  *--help*) ;;
  *--web*) set -- "$@" --web-port "$PAGE_PORT" ;;
  "run gate "*) ;;
  run*) set -- "$@" {SHORT} ;;
esac
exec {sys.executable} -m harness "$@"
""",
    "locust": f'exec {sys.executable} -m locust "$@" --web-port "$PAGE_PORT"',
}
JUDGED = ("gate-run", "gate.xml", "gate.md")


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("readme") / "walkaway"
    command = ["git", "clone", "--quiet", "--shared", str(ROOT), str(folder)]
    subprocess.run(command, check=True, timeout=60)
    activate = folder / ".venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.touch()
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """With the commands that README names first on PATH, and a free port for their pages."""
    folder = tmp_path_factory.mktemp("bin")
    for name, script in COMMANDS.items():
        file = folder / name
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    path = os.pathsep.join([str(folder), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "PAGE_PORT": str(port)}


def follow(script: str, clone: Path, environment: Mapping[str, str]) -> int:
    done = subprocess.run(
        ["sh", "-e"],
        input=script,
        cwd=clone,
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode in (0, UNDECIDED), f"{script}\n{done.stdout}\n{done.stderr}"
    return done.returncode


def again(script: str, number: int) -> str:
    return f"rm -r {' '.join(JUDGED)}\n{script}" if number else script


@pytest.mark.parametrize("block", blocks(README, "bash"), ids=lambda block: block.text[:30].strip())
def test_the_readme_can_be_followed(
    block: Block, clone: Path, environment: Mapping[str, str]
) -> None:
    match (block.directive or "").split():
        case ["not", "run,", "as", *_]:
            pytest.skip(block.directive or "")
        case ["until", "the", "page", "is", "there"]:
            url = f"http://127.0.0.1:{environment['PAGE_PORT']}"
            for line in block.text.splitlines():
                command = ["sh", "-c", f"exec {line}"]
                with page_served(command, url, folder=clone, env=environment):
                    pass
        case ["with", "stand-ins", "for", "the", "servers"]:
            with scripted_server(step_s=0.01) as one, scripted_server(step_s=0.01) as other:
                script = block.text.replace("http://127.0.0.1:8000", one.url)
                script = script.replace("http://127.0.0.1:8080", other.url)
                assert follow(script, clone, environment) == 0
        case [] if "walkaway gate" in block.text:
            until_decided(
                lambda number: follow(again(block.text, number), clone, environment),
                lambda code: code == 0,
            )
        case [] if "walkaway run" in block.text:
            until_decided(lambda _: follow(block.text, clone, environment), lambda code: code == 0)
        case [] | ["make", "-n"]:
            assert follow(block.text, clone, environment) == 0
        case directive:
            pytest.fail(f"unknown directive: {directive}")
