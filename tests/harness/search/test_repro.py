"""repro.py: it is short, needs Python alone, and shows on a server what it was made for."""

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.search.broken import WAY, Broken, Violation
from harness.search.repro import ISSUE, REPRO, write_repro
from harness.search.wire_requests import seen_by
from harness.store.conform_result import ConformTarget, Machine
from harness.store.search_result import Rate, SearchFinding, SearchResult
from tests.harness.conform.slot_server import Manners, serving

MOST_LINES = 150


def request(tokens: int, **more: Any) -> dict[str, Any]:
    body = {"model": "m", "prompt": "Hello", "max_tokens": tokens, "stream": True}
    headers = {"content-type": "application/json", "x-request-id": "repro"}
    return {"path": "/v1/completions", "headers": headers, "body": body, **more}


FINDING = SearchFinding(
    number=1,
    broken="lost",
    said="1 of 4 slots is still held",
    sentence='Client 0 leaves; then: """1 of 4 slots is still held.',
    seed=7,
    drawn_visits=5,
    schedule={"seed": 7, "visits": [{}]},
    wire={
        "seen_by": "slots",
        "gauges": ["vllm:num_requests_running"],
        "slots": 4,
        "settle_s": 0.5,
        "patience_s": 20.0,
        "short": request(30),
        "greedy": [],
        "requests": [
            request(
                400,
                wait_s=0.0,
                after=None,
                leave={"way": "close", "after_events": 2, "after_s": 0.0},
                greedy=False,
            )
        ],
    },
    rate=Rate(5, 5),
    control=Rate(0, 2),
    is_fresh=True,
)


def result(url: str) -> SearchResult:
    return SearchResult(
        walkaway="0.1.0",
        started_at="2026-11-27T10:00:00+00:00",
        command="walkaway search",
        seed=0,
        target=ConformTarget(engine="openai", url=url, model="m"),
        machine=Machine(cpu="a processor", cores=2, python="3.11"),
        minutes=1.0,
    )


@pytest.mark.parametrize(("hold_s", "code"), [(0.0, 0), (-1, 1)])
def test_it_shows_a_lost_slot_and_shows_nothing_on_a_server_that_is_right(
    tmp_path: Path, hold_s: float, code: int
) -> None:
    manners = Manners(slots=4, step_s=0.005, hold_s=hold_s)
    with serving(manners, tmp_path / "server.log") as url:
        write_repro(tmp_path, FINDING, result(url))
        done = subprocess.run(
            [sys.executable, "-I", str(tmp_path / REPRO)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == code, done.stdout + done.stderr
    assert ("requests that run at once: 4 before, 3 after" in done.stdout) == bool(code)


def test_a_server_that_does_not_answer_shows_nothing(tmp_path: Path) -> None:
    write_repro(tmp_path, FINDING, result("http://127.0.0.1:1"))
    done = subprocess.run([sys.executable, "-I", str(tmp_path / REPRO)], timeout=60, check=False)
    assert done.returncode == 2


@pytest.mark.parametrize("count", [1, 4, 5, 64])
def test_it_is_short_however_much_it_has_to_say(tmp_path: Path, count: int) -> None:
    finding = msgspec.structs.replace(
        FINDING,
        sentence=" ".join(["client 0 asks for an answer of 64 tokens, and stays;"] * 40),
        wire=FINDING.wire | {"requests": FINDING.wire["requests"] * count, "gauges": []},
    )
    write_repro(tmp_path, finding, result("http://127.0.0.1:1"))
    text = (tmp_path / REPRO).read_text()
    compile(text, REPRO, "exec")
    assert len(text.splitlines()) <= MOST_LINES
    imported = {
        name.name.partition(".")[0]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import)
        for name in node.names
    }
    assert imported <= sys.stdlib_module_names


def test_its_head_is_the_sentence(tmp_path: Path) -> None:
    write_repro(tmp_path, FINDING, result("http://127.0.0.1:1"))
    text = (tmp_path / REPRO).read_text()
    assert "GAUGES = 'vllm:num_requests_running'" in text
    doc = ast.get_docstring(ast.parse(text)) or ""
    assert doc.startswith("Client 0 leaves; then: '''1 of 4 slots is still held.")
    assert "in 5 of 5 tries" in doc
    issue = (tmp_path / ISSUE).read_text()
    assert "1 of 4 slots is still held" in issue
    assert json.dumps("seed 7")[1:-1] in issue


@pytest.mark.parametrize(
    ("broken", "way", "by"),
    [
        (Broken.HELD, "occupancy", "slots"),
        (Broken.HELD, "gauge", "gauges"),
        (Broken.LOST, "quiet", None),
        (Broken.HUNG, None, "cut"),
        (Broken.COUNTERS, None, None),
    ],
)
def test_what_a_plain_client_sees_of_it(broken: Broken, way: str | None, by: str | None) -> None:
    evidence = {} if way is None else {WAY: way}
    assert seen_by(Violation(broken=broken, said="", evidence=evidence)) == by
