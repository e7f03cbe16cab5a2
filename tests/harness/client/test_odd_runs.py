"""`walkaway run` against odd servers: it ends by itself, says what was odd, and keeps the rows."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness.workload.load import RETRY_PAUSE_S
from tests.e2e.running import ROOT, Run
from tests.harness.client.asking import until_left
from tests.harness.client.conftest import Exchange, Script, Serve
from tests.harness.client.odd_streams import DONE, HEAD, OBJECTS, PAGE, TEXTS, ZERO, data, delta

pytestmark = pytest.mark.e2e

OK = b"HTTP/1.1 200 OK\r\n"
USERS, SECONDS = 5, 2.0
WORKLOAD = f"""
question = "What does it do with odd servers?"
[run]
users = {USERS}
max_seconds = {SECONDS}
timeout_s = 5.0
[load]
kind = "abandon"
abandon_after_tokens = [2]
stay_share = 0.5
prompt_tokens = [8, 8]
answer_tokens = 2000
stay_tokens = 2000
[settle]
seconds = 0.0
"""
ODDITIES = {
    b"HTTP/1.1 307 X\r\nlocation: /v2\r\ncontent-length: 0\r\n\r\n": "redirects to /v2",
    OK + b"content-encoding: gzip\r\n\r\n\x1f\x8b": "content-encoding: gzip",
    OK + b"transfer-encoding: chunked\r\n\r\nzz\r\n": "Invalid character in chunk size",
    OK + b"x: " + b"y" * 200_000: "headers without end",
    b"220 mail.example ESMTP\r\n": "it begins b'220 mail",
    OK + b"\r\ndata: " + b"a" * (1 << 21): "event of more than",
}


def only_to_the_load(answer: Script) -> Script:
    """This answer to the load's requests; the harness's own are answered as they should be."""

    def script(x: Exchange) -> None:
        if x.request_id.startswith("walkaway-"):
            answer(x)
        elif x.body.get("stream"):
            x.accept()
            x.token(finish_reason="length")
            x.finish()
        else:
            usage = {"prompt_tokens": 8, "completion_tokens": 1}
            body = json.dumps({"data": [{"id": "m"}], "choices": [], "usage": usage}).encode()
            x.send(OK + b"content-length: %d\r\n\r\n%b" % (len(body), body))

    return script


def end_of_run(folder: Path, url: str, *options: str, before: str = "true") -> tuple[int, str, Run]:
    """The code, the output and the folder of a run that has come to its end."""
    folder.mkdir(exist_ok=True)
    workload = folder / "odd.toml"
    workload.write_text(WORKLOAD)
    command = [sys.executable, "-m", "harness", "run", str(workload), "--target", url]
    command += ["--engine", "openai", "--out", str(folder / "run"), "--quiet", *options]
    done = subprocess.run(
        ["/bin/sh", "-c", f'{before}; exec "$@"', "sh", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode != 1, done.stdout
    ours = [line for line in done.stdout.splitlines() if line.startswith("Traceback")]
    assert not ours, "a server's own may stand in a sentence"
    return done.returncode, " ".join(done.stdout.split()), Run(folder / "run")


def test_answers_of_all_kinds(serve: Serve, tmp_path: Path) -> None:
    kinds = itertools.cycle(ODDITIES)

    def odd(x: Exchange) -> None:
        x.send(next(kinds))
        x.client_left_within(30)

    code, output, run = end_of_run(tmp_path, serve(only_to_the_load(odd)).url)
    errors = {row["error"] for row in run.rows("requests") if row["outcome"] == "failed"}
    for words in ODDITIES.values():
        assert any(words in error for error in errors), (words, errors)
    assert code == 5
    assert "requests failed, and none was answered; " in output


def test_users_pause_after_an_error_in_a_200_of_any_shape(serve: Serve, tmp_path: Path) -> None:
    """As after a 500: a dead server would otherwise get thousands of requests a second."""
    kinds = itertools.cycle([*TEXTS, *map(data, OBJECTS), delta("timeout"), PAGE])

    def odd(x: Exchange) -> None:
        x.send(HEAD)
        x.chunk(next(kinds) + DONE)
        x.send(ZERO)

    code, output, run = end_of_run(tmp_path, serve(only_to_the_load(odd)).url)
    rows = [row for row in run.rows("requests") if row["role"] == "user"]
    assert {row["outcome"] for row in rows} <= {"failed", "cut_off"}
    assert 5 < len(rows) <= USERS * (SECONDS / RETRY_PAUSE_S + 2)
    assert code == 5, output


def test_it_redirects(serve: Serve, tmp_path: Path) -> None:
    text = b"HTTP/1.1 301 X\r\nlocation: https://elsewhere/v1/models\r\ncontent-length: 0\r\n\r\n"
    code, output, _ = end_of_run(tmp_path, serve(lambda x: x.send(text)).url)
    assert code == 2
    assert "redirects to https://elsewhere/v1/models: name that address" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "way", "said"),
    [
        (
            "ulimit -n 115",
            "stop_reading",
            "no file handle is left, of 115: use fewer users",
        ),
        ("ulimit -f 64", "fin", "can no longer be written: No space left on device"),
    ],
    ids=["file handles", "room"],
)
def test_nothing_is_left(serve: Serve, tmp_path: Path, before: str, way: str, said: str) -> None:
    """Connections that users left open are open until the load ends; a limit on the size of files
    is like a full disk."""
    mix = f'load.mix=[{{plan="tokens", tokens=[1], way="{way}"}}]'
    code, output, run = end_of_run(
        tmp_path,
        serve(only_to_the_load(until_left)).url,
        *("--set", "load.abandon_after_tokens=[]", "--set", mix),
        *("--set", "load.stay_share=0.0", "--set", "run.max_seconds=30"),
        before=before,
    )
    assert code == 5
    assert said in output
    assert sum(row["outcome"] == "abandoned" for row in run.rows("requests")) > 10
