"""`walkaway conform` as it is typed: on the bundled engine, on odd servers, and interrupted."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from xml.etree import ElementTree as ET

import httpx
import msgspec
import pytest
from typer.testing import CliRunner

from harness.commands.index import app
from harness.errors import WalkawayError
from harness.store.conform_result import (
    CONFORM_FILE,
    CaseResult,
    Verdict,
    WireEvent,
    read_conform,
)
from tests.e2e.running import ROOT, UNDECIDED, until_decided, wait_until
from tests.harness.conform.odd_server import Oddity, serving
from tests.reference_engine.running_engine import running
from tools.truth.conform_cases import ROWS, Row, judge, wrong

KEY = "sk-secret-of-a-test-41c7"
FEW_SLOTS = ("--runner", "simulated", "--sim-fixed-ms", "10", "--max-num-seqs", "4")
LONGEST_S = 120
LONGEST_ROW_S = 900


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "harness", "conform", *arguments]


def typed(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        env={**os.environ, "TEST_KEY": KEY},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=False,
    )


def test_a_server_needs_nothing_but_its_url(tmp_path: Path) -> None:
    """Its slots are found, its key is kept nowhere, and the wire's log says what the client did."""
    folders: list[Path] = []

    def conform(turn: int) -> subprocess.CompletedProcess[str]:
        folders.append(tmp_path / f"{turn}")
        return typed(
            *("stream/fin-decode", "--target", engine.url, "--engine", "openai", "--tries", "3"),
            *("--api-key-env", "TEST_KEY", "--header", f"X-Other={KEY}"),
            *("--out", str(folders[-1]), "--junit", str(tmp_path / "junit.xml"), "--json"),
        )

    with running(*FEW_SLOTS) as engine:
        ended = until_decided(conform, lambda ended: ended.returncode != UNDECIDED)
    assert ended.returncode == 0, ended.stderr
    result = read_conform(folders[-1] / CONFORM_FILE)
    assert json.loads(ended.stdout)["slots"] == result.slots == 4
    (case,) = result.cases
    assert case.verdict is Verdict.PASS
    assert case.wire_log is not None
    lines = (folders[-1] / case.wire_log).read_bytes().splitlines()
    events = [msgspec.json.decode(line, type=WireEvent) for line in lines]
    acts = [event for event in events if event.what == "act" and event.stream.startswith("leaver")]
    assert len(acts) == 3
    assert {act.call for act in acts} == {"close()"}
    for act in acts:
        probe = [one for one in events if one.stream.startswith("probe") and one.tokens]
        assert any(one.attempt == act.attempt and one.t_ns > act.t_ns for one in probe)
    kept = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert any(b"authorization: ***" in file.read_bytes() for file in kept)
    assert not [file for file in kept if KEY.encode() in file.read_bytes()]
    assert ET.parse(tmp_path / "junit.xml").getroot().get("failures") == "0"


def here(*arguments: str) -> tuple[int, str]:
    """The command in this process: its exit code, its output and its error message."""
    ended = CliRunner().invoke(app, ["conform", *arguments], env={"TEST_KEY": KEY})
    if isinstance(error := ended.exception, WalkawayError):
        return error.exit_code, f"{ended.output}{error}"
    return ended.exit_code, ended.output


def test_an_expected_failure_is_shown_and_does_not_fail_the_run(tmp_path: Path) -> None:
    known = tmp_path / "expected"
    known.write_text("unary/leave [reference] a test's own fault\n")
    with running(*FEW_SLOTS, "--fault", "ignore-disconnect-unary") as engine:
        code, said = here(
            *("unary/leave", "--target", engine.url, "--tries", "2"),
            *("--out", str(tmp_path / "out"), "--expected-failures", str(known)),
        )
    assert code == 0, said
    assert "expected fail" in said
    assert "(never)" in said


@pytest.mark.parametrize(
    ("oddity", "code", "why"),
    [
        (401, 2, "--api-key-env"),
        (404, 2, "does it serve --model odd?"),
        (429, 5, "HTTP 429"),
        ("dies", 5, "connection refused"),
        ("instant", UNDECIDED, "the tokens of an answer come in one piece"),
        ("endless", UNDECIDED, "ignores max_tokens: 8 were asked for"),
    ],
)
def test_an_odd_server(tmp_path: Path, oddity: Oddity, code: int, why: str) -> None:
    with serving(oddity) as server:
        ended, said = here(
            *("stream/fin-decode", "--target", server.url, "--engine", "openai"),
            *("--api-key-env", "TEST_KEY", "--out", str(tmp_path / "out")),
        )
    assert ended == code, said
    assert why in said
    assert KEY not in said


def test_clients_that_are_refused_cannot_leave_and_decide_nothing(tmp_path: Path) -> None:
    with serving("only short") as server:
        _, said = here(
            *("bystander/text", "bystander/ends", "leak/slots", "wedge/health", "--slots", "4"),
            *("--target", server.url, "--engine", "openai", "--out", str(tmp_path / "out")),
            *("--api-key-env", "TEST_KEY", "--markdown", str(tmp_path / "table.md")),
        )
    kept = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert not [file for file in kept if KEY.encode() in file.read_bytes()]
    assert KEY not in said
    results = read_conform(tmp_path / "out" / CONFORM_FILE).cases
    assert {one.verdict for one in results} == {Verdict.CANNOT_DECIDE}, said
    assert all("too long" in one.reason for one in results), said


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("stream/fin-decod",), "the nearest is stream/fin-decode"),
        (("--target", "127.0.0.1:8000"), "must be a URL such as"),
        (("--target", "http://192.0.2.1"), "--yes-load-this-host"),
        (("--engine", "vllm"), "needs --target URL"),
        (("--direct", "nowhere"), "must be a URL such as"),
        (("hop/",), "no case can be run: hop/tax (and 1 more): it needs the server behind the hop"),
        (("--junit", "."), "it is a folder"),
    ],
)
def test_a_mistake_is_said_in_a_sentence(arguments: tuple[str, ...], why: str) -> None:
    code, said = here(*arguments)
    assert code == 2
    assert why in said


@pytest.mark.e2e
def test_another_load_beside_the_run_is_no_red(tmp_path: Path) -> None:
    """It begins with the first case: its users ask again and again, two for each slot."""
    out, has_ended = tmp_path / "out", threading.Event()

    def ask_again() -> None:
        wait_until((out / "wire").exists, "a case begins", LONGEST_S)
        body = {"model": "tiny", "prompt": "another user's", "max_tokens": 60, "ignore_eos": True}
        while not has_ended.is_set():
            httpx.post(f"{engine.url}/v1/completions", json=body, timeout=30.0)

    asked = ("stream/fin-decode", "--tries", "2")
    with running(*FEW_SLOTS) as engine, ThreadPoolExecutor(8) as users:
        others = [users.submit(ask_again) for _ in range(8)]
        try:
            ended = typed(*asked, "--target", engine.url, "--out", str(out))
        finally:
            has_ended.set()
        for one in others:
            one.result()
    assert ended.returncode == UNDECIDED, ended.stdout
    (result,) = read_conform(out / CONFORM_FILE).cases
    assert result.verdict is Verdict.CANNOT_DECIDE
    assert re.search("others use this server|another load uses this server", result.reason)


def test_an_earlier_result_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / CONFORM_FILE).write_text("{}")
    assert here("stream/fin-decode", "--out", str(tmp_path))[0] == 2
    assert (tmp_path / CONFORM_FILE).read_text() == "{}"


def test_an_interrupted_run_keeps_what_was_decided(tmp_path: Path) -> None:
    with subprocess.Popen(
        command("stream/fin-decode", "stream/last-token", "--out", str(tmp_path / "out")),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        wait_until((tmp_path / "out" / CONFORM_FILE).is_file, "a case is decided", LONGEST_S)
        process.send_signal(signal.SIGINT)
        assert process.wait(LONGEST_S) == 130
    assert read_conform(tmp_path / "out" / CONFORM_FILE).cases[0].id == "stream/fin-decode"
    assert (tmp_path / "out" / "index.html").is_file()


@pytest.mark.e2e
@pytest.mark.timeout(LONGEST_ROW_S)
@pytest.mark.parametrize("row", [one for one in ROWS if one.soon], ids=lambda row: row.fault)
def test_a_fault_turns_its_cases_red_and_no_others(tmp_path: Path, row: Row) -> None:
    """The other rows take half an hour: `make conform-faults`."""

    def run(turn: int) -> dict[str, CaseResult]:
        (folder := tmp_path / f"{turn}").mkdir()
        return judge(row, folder)

    results = until_decided(
        run,
        lambda found: all(one.verdict is not Verdict.CANNOT_DECIDE for one in found.values()),
    )
    assert wrong(row, results) == []


@pytest.mark.e2e
@pytest.mark.table
def test_a_prompt_that_leaves_the_cache_with_its_client_shows(tmp_path: Path) -> None:
    """The case reports a figure and does not judge it."""

    def survives(fault: str) -> tuple[float, float]:
        (found,) = judge(Row(fault, (), ("prefix/survives",)), tmp_path).values()
        ratio, cached = found.evidence["ttft_ratio"], found.evidence["cached_tokens"]
        assert isinstance(ratio, float)
        assert isinstance(cached, float)
        return ratio, cached

    kept, dropped = survives(""), survives("drop-prefix-on-cancel")
    assert kept[0] < 0.5 < dropped[0]
    assert kept[1] > 1000 > dropped[1]
