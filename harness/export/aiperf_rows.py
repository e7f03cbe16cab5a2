"""The requests of a run as AIPerf writes them: the rows of its `profile_export.jsonl`.

So that what reads AIPerf's records reads ours. Its shape (AIPerf 0.5 and later): `metadata`,
`metrics` (each with a value and a unit, times in ms), `error`. Its formulas: request latency = last
token - sent, inter-token latency = (request latency - TTFT) / (tokens - 1). As there, an abandoned
request is an error with code 499 and has no metrics but the length of its prompt.

AIPerf's times are of the wall clock, ours of a monotonic one: they are dated from when the run was
begun, so durations are exact and dates are not.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any, Final

import pandas as pd

from harness.records import Outcome
from harness.store.frames import RunFrames

CLIENT_CLOSED: Final = 499
ERROR_TYPES: Final = {
    Outcome.ABANDONED: "RequestCancellationError",
    Outcome.TIMED_OUT: "TimeoutError",
    Outcome.REJECTED: "RejectedError",
    Outcome.FAILED: "RequestError",
    Outcome.CUT_OFF: "CutOffError",
}
_COLUMNS: Final = (
    "request_id",
    "user",
    "sent_ns",
    "first_token_ns",
    "last_token_ns",
    "abandoned_ns",
    "ended_ns",
    "token_times_ns",
    "tokens_read",
    "prompt_tokens",
    "outcome",
    "status_code",
    "error",
)

Row = dict[str, Any]


def aiperf_rows(frames: RunFrames) -> Iterator[Row]:
    """One row a request, in the order in which they were sent."""
    requests = frames.requests.sort_values("sent_ns")
    if requests.empty:
        return
    begun_ns = int(datetime.fromisoformat(frames.manifest["created_at"]).timestamp()) * 10**9
    offset_ns = begun_ns - int(requests["sent_ns"].iloc[0])
    columns = [requests[name] for name in _COLUMNS]
    for number, values in enumerate(zip(*columns, strict=True)):
        yield _row(number, dict(zip(_COLUMNS, values, strict=True)), offset_ns)


def _row(number: int, request: Mapping[str, Any], offset_ns: int) -> Row:
    left_ns = _known(request["abandoned_ns"])
    ended_ns = left_ns if left_ns is not None else int(request["ended_ns"])
    first_ns = _known(request["first_token_ns"])
    return {
        "metadata": {
            "session_num": number,
            "x_request_id": request["request_id"],
            "x_correlation_id": None,
            "conversation_id": None,
            "turn_index": 0,
            "request_start_ns": int(request["sent_ns"]) + offset_ns,
            "request_ack_ns": None if first_ns is None else first_ns + offset_ns,
            "request_end_ns": ended_ns + offset_ns,
            "worker_id": f"user_{request['user']}",
            "record_processor_id": "walkaway",
            "benchmark_phase": "profiling",
            "was_cancelled": left_ns is not None,
            "cancellation_time_ns": None if left_ns is None else left_ns + offset_ns,
        },
        "metrics": _metrics(request),
        "error": _error(request, (ended_ns - int(request["sent_ns"])) / 1e9),
    }


def _metrics(request: Mapping[str, Any]) -> Row:
    prompt = _known(request["prompt_tokens"])
    if request["outcome"] != Outcome.COMPLETED:
        return {} if prompt is None else {"error_isl": _value(prompt, "tokens")}
    found: Row = {} if prompt is None else {"input_sequence_length": _value(prompt, "tokens")}
    tokens = int(request["tokens_read"])
    found["output_token_count"] = found["output_sequence_length"] = _value(tokens, "tokens")
    first_ns, last_ns = _known(request["first_token_ns"]), _known(request["last_token_ns"])
    if first_ns is None or last_ns is None:
        return found
    sent_ns = int(request["sent_ns"])
    found["time_to_first_token"] = _value((first_ns - sent_ns) / 1e6, "ms")
    found["request_latency"] = _value((last_ns - sent_ns) / 1e6, "ms")
    found["inter_chunk_latency"] = _value(_gaps_ms(list(request["token_times_ns"])), "ms")
    if tokens > 1 and last_ns > first_ns:
        gap_ms = (last_ns - first_ns) / 1e6 / (tokens - 1)
        found["inter_token_latency"] = _value(gap_ms, "ms")
        found["output_token_throughput_per_user"] = _value(1000 / gap_ms, "tokens/sec/user")
    return found


def _error(request: Mapping[str, Any], seconds: float) -> Row | None:
    outcome = Outcome(request["outcome"])
    if outcome is Outcome.COMPLETED:
        return None
    is_abandoned = outcome is Outcome.ABANDONED
    said = request["error"] if isinstance(request["error"], str) else outcome.value
    return {
        "code": CLIENT_CLOSED if is_abandoned else _known(request["status_code"]),
        "type": ERROR_TYPES[outcome],
        "message": f"Request was cancelled after {seconds:.3f} seconds" if is_abandoned else said,
    }


def _gaps_ms(times_ns: Sequence[int]) -> list[float]:
    return [(after - before) / 1e6 for before, after in pairwise(times_ns)]


def _value(value: float | list[float], unit: str) -> Row:
    return {"value": value, "unit": unit}


def _known(value: Any) -> int | None:
    return None if pd.isna(value) else int(value)
