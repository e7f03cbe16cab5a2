"""Streams fed by hand: a machine whose answer has begun, and chunks of completions."""

import json
from typing import Any

from harness.load.stream import StreamMachine
from harness.records import Way
from harness.workload.abandon import RequestSpec

SPEC = RequestSpec(
    request_id="r1",
    arm="main",
    user=3,
    max_tokens=9,
    prompt_tokens=7,
    intended_start_ns=5,
    plan="tokens:2",
    planned_abandon=2,
    way=Way.RST,
)


def machine(*, status: int = 200, continuous_usage: bool = True) -> StreamMachine:
    stream = StreamMachine(SPEC, sent_ns=10, continuous_usage=continuous_usage)
    stream.headers(status)
    return stream


def completion(
    text: str | None, *, usage: int | None = None, finish_reason: str | None = None
) -> bytes:
    chunk: dict[str, Any] = {"choices": [{"text": text, "finish_reason": finish_reason}]}
    if usage is not None:
        chunk["usage"] = {"prompt_tokens": 7, "completion_tokens": usage}
    return json.dumps(chunk).encode()
