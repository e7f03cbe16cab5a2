"""What all clients that we are compared with share: the request, and the times that they note.

A client asks again as soon as an answer has ended, on each of its streams, until SIGTERM; then it
writes a file: {request id: [when it was sent, when each token came]}, in nanoseconds. Tokens are
recognised by the beginning of their line; their JSON is not read.
"""

import argparse
import itertools
import json
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Final

PATH: Final = "/v1/completions"
TOKEN: Final = b"data: {"
_BODY: Final = {
    "model": "bench",
    "prompt": "the words of a prompt " * 12,
    "max_tokens": 100,
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}
BODY: Final = json.dumps(_BODY).encode()

Times = dict[str, list[int]]
_numbers = itertools.count()


def headers(times: Times, now_ns: int) -> tuple[dict[str, str], list[int]]:
    """The headers of a new request sent now, and the list that takes its tokens' times."""
    request_id = f"request-{next(_numbers)}"
    times[request_id] = [now_ns]
    return {"content-type": "application/json", "x-request-id": request_id}, times[request_id]


def raw_request(fields: dict[str, str]) -> bytes:
    """The request as it is on the wire."""
    lines = [f"POST {PATH} HTTP/1.1", "host: 127.0.0.1", f"content-length: {len(BODY)}"]
    lines += [f"{name}: {value}" for name, value in fields.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + BODY


def write(times: Times, file: Path) -> None:
    """Leave the times behind for the process that started this one."""
    file.write_text(json.dumps(times))


def arguments(names: Iterable[str]) -> argparse.Namespace:
    """`name` (of the client), `url`, `streams`, `file`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=list(names))
    parser.add_argument("url")
    parser.add_argument("streams", type=int)
    parser.add_argument("file", type=Path)
    return parser.parse_args()


def write_on_sigterm(times: Times, file: Path) -> None:
    """Write the times and end, whatever is going on."""

    def end(_signal: int, _frame: FrameType | None) -> None:
        write(times, file)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
