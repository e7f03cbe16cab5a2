"""Cases of `walkaway conform` that the bundled engine does not speak: green and red on a scripted
server with other dialects, HTTP/2 and odd behaviour (tools/truth/dialects.py)."""

import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer

import pytest
import trustme

from harness.store.conform_result import CaseResult, Failure, Verdict, read_wire_log
from tests.e2e.running import dialect_server, until_decided
from tests.reference_engine.running_engine import running
from tools.truth.conform_cases import ODD, Odd, conform, engine_flags

TARGET = """
description = "The scripted server of other dialects"
stream_options = { include_usage = true, continuous_usage_stats = true }
continuous_usage = true
bytes_are_tokens = true
slots_from = "workload"
settle_s = 0.6
"""
SLOTS = 4
DRAIN_S = 1.0
CASES = (
    *("dialect/chat", "dialect/responses", "dialect/messages", "n/parent", "n/prompts"),
    *("structured/leave", "shape/half-close", "shape/stall", "h2/rst-one", "session/clean"),
)
COMPILES = {"compile_s": 0.4}


Settings = Mapping[str, float | str]


def judged(
    folder: Path, *cases: str, settings: Settings, ca_file: Path | None = None
) -> list[CaseResult]:
    flags = [] if ca_file is None else ["--ca-file", str(ca_file)]
    return until_decided(
        lambda turn: once(folder, *cases, *flags, settings=settings, turn=turn),
        lambda results: all(one.verdict is not Verdict.CANNOT_DECIDE for one in results),
    )


def once(
    folder: Path, *asked: str, settings: Settings, turn: int = 0, slots: int = SLOTS
) -> list[CaseResult]:
    target = folder / "target.toml"
    target.write_text(TARGET)
    with dialect_server(slots=SLOTS, step_s=0.01, num_blocks=4096, **settings) as server:
        flags = ["--target", server.url, "--engine", str(target), "--slots", str(slots)]
        return conform(folder / f"{turn}", *asked, *flags, "--tries", "3").cases


@pytest.mark.e2e
def test_a_good_server_passes_over_tls(tmp_path: Path) -> None:
    """HTTP/2 is agreed on by ALPN."""
    authority, key = trustme.CA(), tmp_path / "key.pem"
    key.write_bytes(authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.bytes())
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    ca_file, certificate = tmp_path / "ca.pem", str(key)
    results = judged(
        tmp_path, *CASES, ca_file=ca_file, settings={"certificate": certificate, **COMPILES}
    )
    assert {one.id: (one.verdict, one.reason) for one in results if one.verdict != "pass"} == {}
    assert {one.id for one in results} == set(CASES)
    logs = [read_wire_log(file) for file in tmp_path.glob("*/wire/h2-rst-one.jsonl")]
    assert "RST_STREAM" in [event.sent for event in logs[-1]]


@pytest.mark.e2e
@pytest.mark.parametrize(
    "odd",
    [
        pytest.param(
            one, marks=[] if one.kind is Failure.HARM else pytest.mark.table, id=f"{one.case} {one}"
        )
        for one in ODD
    ],
)
def test_an_oddity_is_red(tmp_path: Path, odd: Odd) -> None:
    (result,) = judged(tmp_path, odd.case, settings=odd.settings)
    assert (result.verdict, result.kind) == (Verdict.FAIL, odd.kind), result.reason


@pytest.mark.e2e
@pytest.mark.parametrize(("slots", "seen"), [(3, "of 4 requests 4"), (8, "of 9 requests 4")])
def test_a_wrong_number_of_slots_is_said_and_decides_nothing(
    tmp_path: Path, slots: int, seen: str
) -> None:
    (result,) = once(tmp_path, "storm/all", settings={}, slots=slots)
    assert result.verdict is Verdict.CANNOT_DECIDE
    assert f"said to have {slots} slots, but {seen} ran at once" in result.reason


@pytest.mark.e2e
def test_a_half_closed_client_may_be_answered_whole(tmp_path: Path) -> None:
    (result,) = judged(tmp_path, "shape/half-close", settings={"half_close": "answer"})
    assert (result.verdict, result.reason) == (
        Verdict.PASS,
        "a half-closed client is answered whole",
    )


class Draining(BaseRequestHandler):
    """Passes bytes on; when its client has left, it reads on for DRAIN_S."""

    server: "Hop"

    def handle(self) -> None:
        with socket.create_connection(("127.0.0.1", self.server.behind)) as upstream:
            reader = threading.Thread(target=self.pass_back, args=(upstream,))
            reader.start()
            with suppress(ConnectionError):
                while data := self.request.recv(65536):
                    upstream.sendall(data)
            reader.join(DRAIN_S)
            with suppress(OSError):
                upstream.shutdown(socket.SHUT_RDWR)
            reader.join()

    def pass_back(self, upstream: socket.socket) -> None:
        with suppress(OSError):
            while data := upstream.recv(65536):
                with suppress(OSError):
                    self.request.sendall(data)
        with suppress(OSError):
            self.request.shutdown(socket.SHUT_WR)


class Hop(ThreadingTCPServer):
    request_queue_size = 128

    def __init__(self, behind: int) -> None:
        super().__init__(("127.0.0.1", 0), Draining)
        self.behind = behind


@contextmanager
def hop(behind: str) -> Iterator[str]:
    with Hop(int(behind.rpartition(":")[2])) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.e2e
@pytest.mark.table
def test_a_hop_that_drains_is_late_and_says_for_how_long(tmp_path: Path) -> None:
    def run(turn: int) -> list[CaseResult]:
        with running(*engine_flags("")) as engine, hop(engine.url) as url:
            flags = ("--target", url, "--direct", engine.url, "--engine", "reference")
            return conform(tmp_path / f"{turn}", "hop/", *flags, "--tries", "3").cases

    tax, drain = until_decided(
        run, lambda results: all(one.verdict is not Verdict.CANNOT_DECIDE for one in results)
    )
    assert (tax.verdict, tax.kind) == (Verdict.FAIL, Failure.LATE), tax.reason
    assert drain.verdict is Verdict.INFO, drain.reason
    drained_s = drain.evidence["drained_s"]
    assert isinstance(drained_s, float)
    assert DRAIN_S / 2 < drained_s < 3 * DRAIN_S


@pytest.mark.e2e
@pytest.mark.table
def test_a_silent_client_that_is_held_too_long_is_red(tmp_path: Path) -> None:
    """The bundled engine lets it go after 11 s, not within the 2 s that are declared here."""
    target = tmp_path / "target.toml"
    target.write_text(f"silence_s = 2.0\n{TARGET}")
    with running(*engine_flags("")) as engine:
        flags = ("--target", engine.url, "--engine", str(target))
        (result,) = conform(tmp_path / "out", "shape/vanish", *flags).cases
    assert (result.verdict, result.kind) == (Verdict.FAIL, Failure.NEVER), result.reason
