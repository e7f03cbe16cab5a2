"""A conformance result that never was: a case of each verdict and each kind, with wire logs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from harness.store.conform_result import (
    Aftermath,
    CaseResult,
    ConformResult,
    ConformTarget,
    Failure,
    Level,
    Machine,
    Verdict,
    WireEvent,
    wire_log_name,
)

STEP_MS: Final = 10
# id, level, verdict, kind, aftermath, reason, evidence
_CASES: Final = (
    ("stream/fin-decode", Level.MUST, Verdict.FAIL, Failure.LATE, Aftermath.CLEAN)
    + ("The slot served the next request 21.3 steps after t0; 4 are allowed.",)
    + ({"median_steps": 21.3, "worst_steps": 24.0, "tries": 8.0, "control_steps": 0.4},),
    ("stream/rst-decode", Level.MUST, Verdict.PASS, None, Aftermath.CLEAN)
    + ("The slot served the next request 0.7 steps after t0.",)
    + ({"median_steps": 0.7, "worst_steps": 1.9, "tries": 8.0},),
    ("unary/leave", Level.MUST, Verdict.FAIL, Failure.NEVER, Aftermath.SLOW)
    + ("No probe was served within the settle time of 2 s.", {"held": 1.0, "settle_s": 2.0}),
    ("queue/mass", Level.MUST, Verdict.FAIL, Failure.HARM, Aftermath.DEAD)
    + ("The server closed all its connections after the leaves.", {"queued": 64.0}),
    ("queue/leave", Level.MUST, Verdict.CANNOT_DECIDE, None, None)
    + ("The server was gone.", {}),
    ("api/cancel", Level.MUST, Verdict.NOT_SUPPORTED, None, Aftermath.CLEAN)
    + ("The server has no cancel endpoint: 404.", {"status": 404.0, "path": None}),
    ("bystander/pace", Level.SHOULD, Verdict.FAIL, Failure.HARM, Aftermath.WRONG_TEXT)
    + ("The p99 gap of the others grew to 2.2 times.", {"gap_ratio": 2.2}),
    ("prefix/survives", Level.INFO, Verdict.INFORMATIONAL, None, Aftermath.CLEAN)
    + ("The turn after a stopped one started in 0.3 of the time.", {"ttft_ratio": 0.31}),
    ("leak/slots", Level.MUST, Verdict.PASS, None, Aftermath.CLEAN)
    + ("No slot was held after 20 loops.", {"held": 0.0, "leaves": 160.0}),
)


def conform_result(**changed: Any) -> ConformResult:
    cases = [
        CaseResult(
            id=id,
            level=level,
            verdict=verdict,
            requirement=f"What {id} demands holds for each request.",
            reason=reason,
            kind=kind,
            aftermath=aftermath,
            evidence=dict(evidence),
            took_s=3.1,
            repeat=f"walkaway conform {id} --target http://127.0.0.1:8000 --engine vllm",
            wire_log=wire_log_name(id),
            wire="Read 16 tokens, drain, close().",
            passes="At most 4 steps at the median of 8 tries, 12 in each.",
            why="A slot that serves a user who left is lost to the users who wait.",
            caught=("https://github.com/an/engine/issues/7", "javascript:alert(1)"),
            expected="listed" if id == "unary/leave" else None,
        )
        for id, level, verdict, kind, aftermath, reason, evidence in _CASES
    ]
    whole: dict[str, Any] = {
        "walkaway": "0.1.0",
        "started_at": "2026-11-23T09:00:00+00:00",
        "command": "walkaway conform --target http://127.0.0.1:8000 --engine vllm",
        "seed": 7,
        "machine": Machine(cpu="a processor", cores=2, python="3.12.3"),
        "target": ConformTarget(
            engine="vllm",
            url="http://127.0.0.1:8000",
            model="tiny",
            version="0.11.0",
            configuration="--max-num-seqs 4",
        ),
        "step_s": STEP_MS / 1e3,
        "slots": 4,
        "ttft_s": 0.021,
        "lag_s": 0.0003,
        "cases": cases,
        "not_run": ["leak/process", "hop/tax"],
        "notes": ["the server's clock was not asked for"],
        "exit_code": 3,
    }
    return ConformResult(**(whole | changed))


def save_conform(folder: Path, **changed: Any) -> Path:
    """The folder, with a wire log of three tries for each case; the third is the slowest."""
    folder.mkdir(parents=True, exist_ok=True)
    result = conform_result(**changed)
    result.write(folder)
    for one in result.cases:
        if one.wire_log is not None:
            file = folder / one.wire_log
            file.parent.mkdir(exist_ok=True)
            waits = (8, 12, None) if one.kind is Failure.NEVER else (8, 12, 213)
            lines = [
                msgspec.json.encode(event)
                for attempt, wait_ms in enumerate(waits, 1)
                for event in wire_try(attempt, wait_ms)
            ]
            file.write_bytes(b"\n".join(lines) + b"\n{cut off")
    return folder


def wire_try(attempt: int, wait_ms: float | None) -> Iterator[WireEvent]:
    """Two streams run, a probe queues, one leaves at 200 ms; `wait_ms` later the probe starts."""

    def event(ms: float, stream: str, what: Any, **more: Any) -> WireEvent:
        t_ns = round((5_000 * attempt + ms) * 1e6)
        return WireEvent(t_ns=t_ns, attempt=attempt, stream=stream, what=what, **more)

    answered = None if wait_ms is None else 200 + wait_ms
    for place, stream in enumerate(("filler 1", "leaver 2")):
        yield event(place, stream, "connect")
        yield event(place + 1, stream, "write", bytes=180, text="POST /v1/completions HTTP/1.1")
        for step in range(3, 20 if place else 60):
            text = "data: {}" if step == 3 else ""
            yield event(step * STEP_MS, stream, "read", bytes=90, tokens=1, text=text)
    yield event(120, "probe 3", "connect")
    yield event(121, "probe 3", "write", bytes=150, text="POST /v1/completions HTTP/1.1")
    yield event(200, "leaver 2", "act", call="close()", unread=0, sent="FIN")
    yield event(150, "filler 1", "mark", text="probe queued")
    if answered is not None:
        yield event(answered, "probe 3", "read", bytes=90, tokens=1)
        yield event(answered + 1, "probe 3", "end", tokens=1, text="completed: length")
    yield event(600, "filler 1", "end", tokens=57, text="completed: length")
