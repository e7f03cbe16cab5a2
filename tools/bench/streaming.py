"""A client process and the server of tokens, watched for a while once all streams are open.

Both are processes of their own, each on a core of its own where there are two: a system may well
wake the client on the core of the server that sent, where it waits until that has sent more. The
client's processor time is read from outside, at two moments; what it received between them, and
when, is in the times that it writes at its end, and the server's log has what was sent.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from threading import Event
from time import clock_gettime_ns, perf_counter_ns
from typing import IO, Any, Final, NamedTuple

import psutil

from harness.client.shards import ShardReader
from harness.records import Protocol, RequestRow
from harness.workload.abandon import StayPlan
from harness.workload.load import AbandonLoad
from harness.workload.plan import LoadPlan, write_plan
from harness.workload.target import Target
from harness.workload.workload import RunSettings, load_target
from tools.bench.ratio import UnavailableError

_ROOT: Final = Path(__file__).parents[2]
_READY_S: Final = 60
_RATE_KEPT: Final = 0.95  # by the server, within its answers
_KEPT_UP: Final = 0.98  # of what was sent must have been received, or a backlog is growing
_KEPT_ASKING: Final = 0.9  # of what could have been sent must have been asked for in time


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """`rate` tokens a second on each stream, `tokens` an answer."""

    streams: int
    rate: float = 50.0
    tokens: int = 100
    first_token_s: float = 0.0
    is_aligned: bool = False
    is_staggered: bool = True


class WatchedAnswer(NamedTuple):
    """One answer as its client saw it (`began_ns`: it asked), or its server (the request came)."""

    began_ns: int
    tokens_ns: list[int]


OURS: Final = "ours"
OURS_OVER_GRPC: Final = "ours over gRPC"
LOCUST_USER: Final = "FastHttpLines"


def _command(client: str, url: str, streams: int, folder: Path) -> list[str]:
    """Our load process as `walkaway run` starts it, Locust's user, or one of clients.py."""
    python, locust = [sys.executable, "-m"], ["locust", "--headless", "--only-summary", "-f"]
    times = str(folder / "times.json")
    if client in (OURS, OURS_OVER_GRPC):
        protocol = Protocol.HTTP if client == OURS else Protocol.GRPC
        write_plan(_plan(url, streams, folder, protocol), folder / "plan.json")
        users = str(_ROOT / "workloads" / "locustfile.py")
        return [*python, *locust, users, "--walkaway-plan", str(folder / "plan.json")]
    if client == LOCUST_USER:
        users, number = str(Path(__file__).parent / "locust_users.py"), str(streams)
        options = ["-H", url, "-u", number, "-r", number, "--times", times]
        return [*python, *locust, users, *options, client]
    return [*python, "tools.bench.clients", client, url, str(streams), times]


def _plan(url: str, streams: int, folder: Path, protocol: Protocol) -> LoadPlan:
    return LoadPlan(
        protocol=protocol,
        url=url,
        model="bench",
        target=Target(
            name="bench",
            description="",
            stream_options={"include_usage": True, "continuous_usage_stats": True},
            continuous_usage=True,
            kserve=load_target("reference").kserve,
            settle_s=0.0,
        ),
        run=RunSettings(users=streams, total_timeout_s=600.0, max_seconds=600.0),
        load=AbandonLoad(
            kind="abandon",
            mix=[StayPlan(plan="never")],
            stay_share=0.0,
            think="none",
            prompt_tokens=[64, 64],
            answer_tokens=100,
            stay_tokens=100,
        ),
        rows_dir=str(folder),
    )


def _read_answers(folder: Path) -> dict[str, WatchedAnswer]:
    """The client's traces: times, or rows."""
    file = folder / "times.json"
    if file.exists():
        times: dict[str, list[int]] = json.loads(file.read_text())
        return {
            request_id: WatchedAnswer(stamps[0], stamps[1:]) for request_id, stamps in times.items()
        }
    rows = ShardReader(folder, RequestRow).read_new()
    return {row.request_id: WatchedAnswer(row.sent_ns, row.token_times_ns) for row in rows}


def _read_log(file: Path) -> dict[str, WatchedAnswer]:
    answers = map(json.loads, file.read_text().splitlines())
    return {one["request_id"]: WatchedAnswer(one["received_ns"], one["sent_ns"]) for one in answers}


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedLoad:
    """A client's figures between `start_ns` and `end_ns`."""

    traffic: Traffic
    start_ns: int
    end_ns: int
    cpu_ns: int
    rss_before_bytes: int
    rss_bytes: int
    sent: Mapping[str, WatchedAnswer]
    got: Mapping[str, WatchedAnswer]

    @property
    def tokens_received(self) -> int:
        return sum(self._in_window(got.tokens_ns) for got in self.got.values())

    @property
    def tokens_sent(self) -> int:
        return sum(self._in_window(sent.tokens_ns) for sent in self.sent.values())

    @property
    def server_rate(self) -> float:
        """Tokens a second that the server sent within an answer: the median of the answers."""
        times = [sent.tokens_ns for sent in self.sent.values() if len(sent.tokens_ns) > 1]
        return median((len(sent) - 1) * 1e9 / (sent[-1] - sent[0]) for sent in times)

    @property
    def kept_up(self) -> bool:
        """Whether it asked for and received tokens as fast as the server could send them."""
        possible = self.traffic.streams * self.traffic.rate * (self.end_ns - self.start_ns) / 1e9
        return (
            self.tokens_received >= _KEPT_UP * self.tokens_sent
            and self.tokens_sent >= _KEPT_ASKING * possible
        )

    @property
    def cpu_us_per_token(self) -> float:
        """Processor time, user and system, for each token received, in microseconds."""
        return self.cpu_ns / 1e3 / self.tokens_received

    def lags_ns(self) -> list[int]:
        """The time from send to stamp of each token sent in the window that was received."""
        return [
            got_ns - sent_ns
            for request_id, sent in self.sent.items()
            if request_id in self.got
            for sent_ns, got_ns in zip(sent.tokens_ns, self.got[request_id].tokens_ns, strict=False)
            if self.start_ns <= sent_ns < self.end_ns
        ]

    def _in_window(self, times_ns: list[int]) -> int:
        return sum(self.start_ns <= t_ns < self.end_ns for t_ns in times_ns)


def watch(client_name: str, traffic: Traffic, *, warm_s: float, window_s: float) -> WatchedLoad:
    """Start both, wait until all streams are open and warm, and watch the client for a while.

    Raises UnavailableError if the streams do not open, the server cannot keep its rate, or the
    system lacks what this rests on.
    """
    if not hasattr(select, "epoll"):
        raise UnavailableError("the server of tokens, and reading a process's clock, need Linux")
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        is_grpc = client_name == OURS_OVER_GRPC
        server = stack.enter_context(_server(traffic, folder, is_grpc=is_grpc))
        assert server.stdout is not None
        scheme = "grpc" if is_grpc else "http"
        url = f"{scheme}://127.0.0.1:{_line(server.stdout)}"
        command = _command(client_name, url, traffic.streams, folder)
        client = stack.enter_context(_process(command, _core(1)))
        if _line(server.stdout) != "open":
            client.kill()
            _, log = client.communicate()
            raise UnavailableError(
                f"{traffic.streams} streams of {client_name} did not open: {log[-500:]}"
            )
        Event().wait(warm_s)
        rss_before_bytes = _rss_bytes(client.pid)
        start_ns, cpu_ns = perf_counter_ns(), _cpu_ns(client.pid)
        Event().wait(window_s)
        cpu_ns = _cpu_ns(client.pid) - cpu_ns
        end_ns = perf_counter_ns()
        rss_bytes = _rss_bytes(client.pid)
        client.send_signal(signal.SIGTERM)
        client.communicate(timeout=_READY_S)
        server.communicate(timeout=_READY_S)  # closes its standard input
        watched = WatchedLoad(
            traffic=traffic,
            start_ns=start_ns,
            end_ns=end_ns,
            cpu_ns=cpu_ns,
            rss_before_bytes=rss_before_bytes,
            rss_bytes=rss_bytes,
            sent=_read_log(folder / "sent.ndjson"),
            got=_read_answers(folder),
        )
    if not watched.tokens_received:
        raise UnavailableError(
            f"{client_name} received nothing in {window_s:g} s: is the machine too busy?"
        )
    if watched.server_rate < _RATE_KEPT * traffic.rate:
        raise UnavailableError(
            f"the server sent {watched.server_rate:.1f} tokens/s a stream, not {traffic.rate:g}"
        )
    return watched


def _core(number: int) -> set[int]:
    """One of the cores that this process may use, or all of them where there is one only."""
    cores = sorted(os.sched_getaffinity(0))
    return {cores[number]} if len(cores) > 1 else set(cores)


def _server(
    traffic: Traffic, folder: Path, *, is_grpc: bool
) -> contextlib.AbstractContextManager[Any]:
    options = json.dumps({**asdict(traffic), "log": str(folder / "sent.ndjson")})
    module = "tools.bench.kserve_token_server" if is_grpc else "tools.bench.token_server"
    return _process([sys.executable, "-m", module, options], _core(0))


@contextlib.contextmanager
def _process(command: list[str], cores: set[int]) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=_ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as process:
        os.sched_setaffinity(process.pid, cores)  # before it has any thread
        try:
            yield process
        finally:
            process.kill()


def _line(stdout: IO[str]) -> str:
    """The next line; an empty one if it does not come."""
    return stdout.readline().strip() if select.select([stdout], [], [], _READY_S)[0] else ""


def _rss_bytes(pid: int) -> int:
    return int(psutil.Process(pid).memory_info().rss)


def _cpu_ns(pid: int) -> int:
    """Processor time of another process so far. The clock's number is made as Linux's
    clock_getcpuclockid(3) makes it, which Python does not offer."""
    return clock_gettime_ns((~pid << 3) | 2)
