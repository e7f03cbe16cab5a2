"""An independent look at a conformance run: does the engine's own log say what the verdicts say?

    walkaway targets up vllm                        # or llamacpp; prints url, slots and log
    walkaway conform --target URL --engine vllm --out RUN
    python -m tools.engine_logs vllm RUN LOG

For each case: the clients that left by a close (wire log), how many of them the server's log names
as cancelled, and, for llama.cpp, how long after the close. vLLM's log names requests by the id that
the client sent, and seconds. llama.cpp's names no client, but its stamps can be brought to the
client's clock: a slot's release stands there by both. A close whose cancel is not in the log before
the next case began counts as not cancelled.
"""

import re
import sys
from bisect import bisect_left
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

import msgspec

from harness.store.conform_result import CONFORM_FILE, WIRE_FOLDER, read_conform

ID: Final = re.compile(r"x-request-id: (\S+)")
STAMP: Final = re.compile(r"^(\d+)\.(\d+)\.(\d+)\.(\d+) ")
RELEASE: Final = re.compile(r"release: id +(\d+) \| task")
LAST: Final = re.compile(r"id +(\d+) \| .*t_last = (\d+)")


class Close(NamedTuple):
    request_id: str
    t_ns: int


def closes(log: Path) -> Iterator[Close]:
    ids: dict[str, str] = {}
    for line in log.read_bytes().splitlines():
        event = msgspec.json.decode(line)
        if event["what"] == "write" and (found := ID.search(event.get("text", ""))):
            ids[event["stream"]] = found[1]
        elif event["what"] == "act" and event["stream"] in ids:
            yield Close(ids[event["stream"]], event["t_ns"])


def seconds(line: str) -> float | None:
    """The time since llama.cpp's server began: minutes, seconds, milliseconds, microseconds."""
    if (found := STAMP.match(line)) is None:
        return None
    minutes, whole, milli, micro = map(int, found.groups())
    return 60 * minutes + whole + milli / 1e3 + micro / 1e6


def cancels_of_llamacpp(log: Path) -> list[int]:
    """The times at which the server stopped waiting for a client, in ns of the monotonic clock."""
    released: dict[str, float] = {}
    ahead, stops = [], []
    for line in log.read_text(errors="replace").splitlines():
        if (at_s := seconds(line)) is None:
            continue
        if (found := RELEASE.search(line)) is not None:
            released[found[1]] = at_s
        elif (found := LAST.search(line)) is not None and found[1] in released:
            ahead.append(int(found[2]) / 1e6 - released.pop(found[1]))
        elif "stop: cancel task" in line:
            stops.append(at_s)
    offset_s = median(ahead)
    return [int((at_s + offset_s) * 1e9) for at_s in stops]


def delays_s(left: list[Close], stops: list[int], until_ns: int) -> list[float]:
    """The time from each close to the first cancel that is no earlier close's."""
    found, first = [], 0
    for close in sorted(left, key=lambda one: one.t_ns):
        first = max(first, bisect_left(stops, close.t_ns - 1_000_000))
        if first < len(stops) and stops[first] < until_ns:
            found.append((stops[first] - close.t_ns) / 1e9)
            first += 1
    return found


def main() -> None:
    engine, run, log = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    text = log.read_text(errors="replace")
    aborted = set(re.findall(r"Request cmpl-(\S+?)-\d+ aborted", text))
    aborted |= set(re.findall(r"Request chatcmpl-(\S+) aborted", text))
    stops = cancels_of_llamacpp(log) if engine == "llamacpp" else []
    cases = [
        (one, list(closes(run / WIRE_FOLDER / Path(one.wire_log).name)))
        for one in read_conform(run / CONFORM_FILE).cases
        if one.wire_log and (run / WIRE_FOLDER / Path(one.wire_log).name).exists()
    ]
    cases = [(one, left) for one, left in cases if left]
    ends = [following[0].t_ns for _, (_, following) in pairwise(cases)] + [sys.maxsize]
    for (one, left), until_ns in zip(cases, ends, strict=True):
        if engine == "llamacpp":
            delays = delays_s(left, stops, until_ns)
            said = f"{len(delays)} cancelled"
            if delays:
                said += f", after {median(delays):.3f} s at the median, {max(delays):.3f} s at most"
        else:
            said = f"{sum(close.request_id in aborted for close in left)} aborted"
        print(f"{one.id:24}{one.verdict:15}{len(left):5} left, {said}")  # noqa: T201


if __name__ == "__main__":
    main()
