"""repro.py: it is short, needs Python alone, and shows on a server what it was made for."""

import ast
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
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
                may_end="whole|HTTP/1.1 (?:400|503)",
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
        target=ConformTarget(
            engine="openai",
            url=url,
            model="m",
            metrics_urls=[f"{url}/prometheus/metrics", "http://127.0.0.2:1/metrics"],
        ),
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
    pages = ["/prometheus/metrics", "http://127.0.0.2:1/metrics"]
    assert f"PAGES, GAUGES = {pages!r}, 'vllm:num_requests_running'  #" in text
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


WORD = b'data: {"choices":[{"text":" w","finish_reason":null}]}\n'
DONE = b"data: [DONE]\n"


def its_functions(folder: Path, *lines: bytes, hangs: bool = False) -> dict[str, Any]:
    """What repro.py defines before it begins, on a server that answers with these lines."""
    write_repro(folder, FINDING, result("http://127.0.0.1:1"))
    text, begins, _ = (folder / REPRO).read_text().partition("\nbefore, alone")
    assert begins
    names: dict[str, Any] = {}
    exec(compile(text, REPRO, "exec"), names)

    def answer() -> Iterator[bytes]:
        yield from lines
        if hangs:
            raise TimeoutError("timed out")

    no_socket = SimpleNamespace(shutdown=lambda _: None, close=lambda: None)
    names["ask"] = lambda _: (no_socket, answer())
    return names


@pytest.mark.parametrize(
    ("lines", "hangs", "seen"),
    [
        ([WORD] * 3, True, "left"),
        ([WORD, DONE], False, "left"),
        ([WORD], False, "cut: no end"),
        ([b"HTTP/1.1 500 Sorry\r\n"], False, "cut: HTTP/1.1 500 Sorry"),
        ([b"HTTP/1.1 503 No Slot\r\n"], False, "left"),
        ([WORD], True, "cut, timed out"),
    ],
)
def test_a_client_that_leaves_is_owed_what_it_was_to_read_before(
    tmp_path: Path, lines: list[bytes], hangs: bool, seen: str
) -> None:
    names = its_functions(tmp_path, *lines, hangs=hangs)
    names["visit"](0, names["REQUESTS"][0])
    assert names["SEEN"] == [seen]
    assert names["GONE"][0].is_set()


@pytest.mark.parametrize(
    ("lines", "end"), [([WORD, WORD, DONE], "whole"), ([DONE], "whole"), ([WORD, WORD], "no end")]
)
def test_how_a_stream_that_stays_ends_is_seen(tmp_path: Path, lines: list[bytes], end: str) -> None:
    names = its_functions(tmp_path, *lines)
    answer = [None, None, "", ""]
    names["follow"](answer, request(8))
    assert answer[3] == end


def judged(folder: Path, **seen: Any) -> dict[str, Any]:
    """What repro.py makes of what it has seen."""
    names = its_functions(folder) | {"alone": [], "beside": []} | seen
    text = (folder / REPRO).read_text()
    judges = text[text.index("\ngood = ") : text.index("\nshows = ")]
    exec(compile(judges, REPRO, "exec"), names)
    return names


@pytest.mark.parametrize(
    ("said", "is_cut"),
    [
        ("left", False),
        ("left, timed out", False),
        ("stays: 8 events, whole", False),
        ("stays: 0 events, HTTP/1.1 503 No Slot", False),
        ("stays: 0 events, HTTP/1.1 500 Sorry", True),
        ("stays: 3 events, no end", True),
        ("cut: no end", True),
        ("", True),
    ],
)
def test_a_refusal_that_the_search_does_not_count_is_no_cut(
    tmp_path: Path, said: str, is_cut: bool
) -> None:
    assert judged(tmp_path, SEEN=[said])["cut"] is is_cut


@pytest.mark.parametrize(
    ("end", "said", "is_cut", "is_another"),
    [
        ("HTTP/1.1 503 No Slot", "", False, False),
        ("no end", "on", True, False),
        ("whole", "one", False, False),
        ("whole", "two", False, True),
    ],
)
def test_a_stream_that_stays_may_find_no_slot_and_only_a_whole_one_has_a_text(
    tmp_path: Path, end: str, said: str, is_cut: bool, is_another: bool
) -> None:
    names = judged(
        tmp_path,
        SEEN=["left"],
        GREEDY=[{"may_end": "whole|HTTP/1.1 (?:503)"}],
        alone=[[0.0, 1.0, "one", "whole"]],
        beside=[[0.0, 1.0, said, end]],
    )
    assert (names["cut"], names["text"]) == (is_cut, is_another)


def test_a_gauge_that_first_shows_after_a_request_has_not_changed(tmp_path: Path) -> None:
    names = its_functions(tmp_path)
    seen = []
    names["PAGES"] = ["/metrics"]
    for page in ("", '{model="m 1"} 0.0', '{model="m 1"} 1.0', "_long 7", " -1"):
        text = f"# HELP vllm:num_requests_running 1\nvllm:num_requests_running{page}\n".encode()
        read = SimpleNamespace(urlopen=lambda *_, text=text, **__: io.BytesIO(text))
        names["urllib"] = SimpleNamespace(request=read)
        seen.append(len(names["look"]()[1]))
    assert seen == [0, 0, 1, 0, 1]
