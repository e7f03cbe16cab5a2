"""`walkaway run` against odd servers: it ends by itself, says what was odd, and keeps the rows."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.running import ROOT, Run
from tests.harness.load.conftest import Exchange, Script, Secrets, Serve

pytestmark = pytest.mark.e2e

OK = b"HTTP/1.1 200 OK\r\n"
WORKLOAD = """
question = "What does it do with odd servers?"
[run]
users = 5
max_seconds = 2.0
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


class Ended:
    """A run that has come to its end."""

    def __init__(self, folder: Path, url: str, *options: str, before: str = "true") -> None:
        folder.mkdir(exist_ok=True)
        workload = folder / "odd.toml"
        workload.write_text(WORKLOAD)
        self.run = Run(folder / "run")
        command = [sys.executable, "-m", "harness", "run", str(workload), "--target", url]
        command += ["--engine", "openai", "--out", str(self.run.folder), "--quiet", *options]
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
        self.code, self.output = done.returncode, " ".join(done.stdout.split())
        assert self.code != 1, self.output
        assert "Traceback" not in self.output


def test_answers_of_all_kinds(serve: Serve, tmp_path: Path) -> None:
    kinds = itertools.cycle(ODDITIES)

    def odd(x: Exchange) -> None:
        x.send(next(kinds))
        x.client_left_within(30)

    ended = Ended(tmp_path, serve(only_to_the_load(odd)).url)
    rows = ended.run.rows("requests")
    errors = {row["error"] for row in rows if row["outcome"] == "failed"}
    for words in ODDITIES.values():
        assert any(words in error for error in errors), (words, errors)
    assert ended.code == 5
    assert "requests failed, and none was answered; the first: " in ended.output


def test_it_redirects(serve: Serve, tmp_path: Path) -> None:
    text = b"HTTP/1.1 301 X\r\nlocation: https://elsewhere/v1/models\r\ncontent-length: 0\r\n\r\n"
    ended = Ended(tmp_path, serve(lambda x: x.send(text)).url)
    assert ended.code == 2
    assert "redirects to https://elsewhere/v1/models: name that address" in ended.output


@pytest.mark.slow
def test_it_is_not_trusted_until_its_ca_is_named(
    serve: Serve, secrets: Secrets, tmp_path: Path
) -> None:
    def answer(x: Exchange) -> None:
        x.accept()
        x.stream(tokens=40, gap_s=0.01)
        x.goes_on = x.closed_ns is None

    server = serve(only_to_the_load(answer), tls=secrets.server)
    ended = Ended(tmp_path / "first", server.url)
    assert ended.code == 5
    assert "the certificate of 127.0.0.1 is not trusted" in ended.output
    ended = Ended(
        tmp_path / "second",
        server.url,
        *("--ca-file", secrets.ca_file, "--set", "load.stop_after_abandons=4"),
        *("--set", "run.timeout_s=30", "--set", "run.max_seconds=30"),
        *("--set", "run.keep_alive=true"),
    )
    assert ended.code == 0, ended.output
    rows = ended.run.rows("requests")
    assert sum(row["outcome"] == "abandoned" for row in rows) >= 4
    assert {row["error"] for row in rows} == {None}


@pytest.mark.slow
def test_no_file_handle_is_left(serve: Serve, tmp_path: Path) -> None:
    """Connections that users left open are open until the load ends."""

    def answer(x: Exchange) -> None:
        x.accept()
        x.token()
        x.client_left_within(60)

    server = serve(only_to_the_load(answer))
    staying_open = 'load.mix=[{plan="tokens", tokens=[1], way="stop_reading"}]'
    ended = Ended(
        tmp_path,
        server.url,
        *("--set", "load.abandon_after_tokens=[]", "--set", staying_open),
        *("--set", "load.stay_share=0.0", "--set", "run.max_seconds=30"),
        before="ulimit -n 115",
    )
    assert ended.code == 5
    assert "no file handle is left, of 115: use fewer users, or raise `ulimit -n`" in ended.output
    rows = ended.run.rows("requests")
    assert sum(row["outcome"] == "abandoned" for row in rows) > 10
    assert sum(row["outcome"] == "failed" for row in rows) >= 1


@pytest.mark.slow
def test_no_room_is_left(serve: Serve, tmp_path: Path) -> None:
    """As on a full disk, here by a limit on the size of files."""

    def answer(x: Exchange) -> None:
        x.accept()
        x.stream(tokens=50, gap_s=0.001)

    ended = Ended(
        tmp_path,
        serve(only_to_the_load(answer)).url,
        *("--set", "run.max_seconds=30"),
        before="ulimit -f 64",
    )
    assert ended.code == 5
    assert "can no longer be written: No space left on device" in ended.output
    assert len(ended.run.rows("requests")) > 5
