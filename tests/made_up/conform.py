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
EXPLANATIONS: Final = """
[[explanation]]
engine = "vllm"
case = "unary/leave"
sentence = "It looks for a disconnect only when it writes."
link = "https://github.com/an/engine/issues/8"

[[explanation]]
engine = "llamacpp"
case = "leak/slots"
sentence = "It passes by now."
"""


def _case(
    name: str,
    verdict: Verdict,
    how: Failure | Level | None,
    left: Any,
    reason: str,
    **evidence: Any,
) -> CaseResult:
    """`how`: it failed, or the level if that is no must."""
    return CaseResult(
        id=name,
        level=how if isinstance(how, Level) else Level.MUST,
        verdict=verdict,
        requirement=f"What {name} demands holds for each request.",
        reason=reason,
        kind=how if isinstance(how, Failure) else None,
        aftermath=left,
        evidence=evidence,
        took_s=3.1,
        repeat=f"walkaway conform {name} --target http://127.0.0.1:8000 --engine vllm",
        wire_log=wire_log_name(name),
        wire="Read 16 tokens, drain, close().",
        passes="At most 4 steps at the median of 8 tries, 12 in each.",
        why="A slot that serves a user who left is lost to the users who wait.",
        caught=("https://github.com/an/engine/issues/7", "javascript:alert(1)"),
        expected="listed" if name == "unary/leave" else None,
    )


def conform_cases() -> list[CaseResult]:
    served = "The slot served the next request {} steps after t0; 4 are allowed."
    late, never, harm = Failure
    fail, clean = Verdict.FAIL, Aftermath.CLEAN
    return [
        _case("stream/fin-decode", fail, late, clean, served.format(21.3), median_steps=21.3),
        _case(
            *("stream/rst-decode", Verdict.PASS, None, clean, served.format(0.7)),
            median_steps=0.7,
            worst_steps=1.9,
        ),
        _case("unary/leave", fail, never, Aftermath.SLOW, "No probe was served.", settle_s=2.0),
        _case("queue/mass", fail, harm, Aftermath.DEAD, "The server closed all.", queued=64.0),
        _case("queue/leave", Verdict.CANNOT_DECIDE, None, None, "The server was gone."),
        _case("api/cancel", Verdict.NOT_SUPPORTED, None, clean, "There is none: 404.", path=None),
        _case("bystander/pace", fail, Level.SHOULD, Aftermath.WRONG_TEXT, "Slow.", gap_ratio=2.2),
        _case("prefix/survives", Verdict.INFO, Level.INFO, clean, "Kept.", cached=61.0),
        _case("next/text", Verdict.HARNESS, None, clean, "This client was 40 ms late."),
        _case("leak/slots", Verdict.PASS, None, clean, "None was held.", held=0.0, leaves=160.0),
    ]


def conform_result(**changed: Any) -> ConformResult:
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
        "cases": conform_cases(),
        "not_run": {"leak/process": "it needs --pid", "hop/tax": "it needs --direct URL"},
        "notes": ["the server's clock was not asked for"],
        "sentence": "2 of 8 cases passed and 4 failed: to mend the server, stop.",
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
                for number, wait_ms in enumerate(waits, 1)
                for event in wire_try(number, wait_ms)
            ]
            file.write_bytes(b"\n".join(lines) + b"\n{cut off")
    return folder


def save_engines(folder: Path) -> list[Path]:
    """Two results for a matrix, the second of another suite; explanations of two cells, of which
    one is not red."""
    cases = [one for one in conform_cases() if one.id != "api/cancel"]
    target = msgspec.structs.replace(conform_result().target, engine="llamacpp")
    save_conform(folder / "vllm")
    save_conform(folder / "llamacpp", cases=cases, target=target)
    (folder / "explanations.toml").write_text(EXPLANATIONS)
    return [folder / name / "conform.json" for name in ("vllm", "llamacpp")]


def wire_try(number: int, wait_ms: float | None) -> Iterator[WireEvent]:
    """Two streams run, a probe queues, one leaves at 200 ms; `wait_ms` later the probe starts."""

    def event(ms: float, stream: str, what: Any, **more: Any) -> WireEvent:
        t_ns = round((5_000 * number + ms) * 1e6)
        return WireEvent(t_ns=t_ns, attempt=number - 1, stream=stream, what=what, **more)

    filler, leaver, probe = (f"{part} {number}" for part in ("filler", "leaver", "probe"))
    answered = None if wait_ms is None else 200 + wait_ms
    for place, stream in enumerate((filler, leaver)):
        yield event(place, stream, "connect")
        yield event(place + 1, stream, "write", bytes=180, text="POST /v1/completions HTTP/1.1")
        for step in range(3, 20 if place else 60):
            text = "data: {}" if step == 3 else ""
            yield event(step * STEP_MS, stream, "read", bytes=90, tokens=1, text=text)
    yield event(120, probe, "connect")
    yield event(121, probe, "write", bytes=150, text="POST /v1/completions HTTP/1.1")
    yield event(200, leaver, "act", call="close()", unread=0, sent="FIN")
    yield event(150, filler, "mark", text="probe queued")
    if answered is not None:
        yield event(answered, probe, "read", bytes=90, tokens=1)
        yield event(answered + 1, probe, "end", tokens=1, text="completed: length")
    yield event(600, filler, "end", tokens=57, text="completed: length")
