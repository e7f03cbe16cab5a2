"""The open loop: requests come by a schedule, whatever happened to earlier ones.

One director in each load process sends its share: with n processes each takes every n-th arrival.
While the largest allowed number of streams is open, the director waits: later requests start late,
and their rows say so. An arrival that was not sent when the load ends has no row. On a host with
another clock than the master's, the schedule begins when the master's message arrives.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, ClassVar, Final

import gevent
import msgspec
from gevent.pool import Pool
from gevent.queue import Queue
from locust.env import Environment
from locust.exception import StopUser
from locust.runners import MasterRunner, WorkerRunner

from harness.client.fd_limit import allow_streams
from harness.client.session import LoadSession
from harness.client.ticks import KernelTimer, kernel_can_tick
from harness.locust.users import Director
from harness.store.manifest import local_clock
from harness.workload.arrivals import OpenArrivals
from harness.workload.load import AbandonLoad
from harness.workload.schedule import Arrival

_START: Final = "walkaway_schedule"
# The time from the message to the first arrival: by then every process has it and its users.
_LEAD_NS: Final = 300_000_000
_READ: Final = 1
_READY: Final = 64  # requests prepared ahead: many may come at the same moment

Prepared = tuple[int, Callable[[], object]]  # when it is due, and what sends it


class ScheduleShare(msgspec.Struct, kw_only=True):
    """The part of the schedule that a process sends, and its beginning by the named clock."""

    begins_ns: int
    clock: str
    worker: int = 0
    workers: int = 1


class OpenLoopDirector(Director):
    fixed_count = 0  # as many as there are workers
    share: ClassVar[ScheduleShare | None] = None  # from the master; alone: None
    _directed: ClassVar[LoadSession | None] = None

    def run_load(self) -> None:
        cls, session = type(self), self.session
        if cls._directed is session:
            raise StopUser  # users of a dead process come here: its arrivals are missed
        if cls.share is None and isinstance(self.environment.runner, WorkerRunner):
            raise StopUser  # this worker connected after the shares were sent
        cls._directed = session
        share = cls.share or ScheduleShare(begins_ns=_soon_ns(), clock=local_clock())
        cls.share = None  # it holds for this load only
        _send_all(session, share)


def _send_all(session: LoadSession, share: ScheduleShare) -> None:
    schedule = session.plan.schedule
    assert schedule is not None
    streams = Pool(-(-schedule.max_streams // share.workers))
    ready: Queue[Prepared] = Queue(maxsize=_READY)
    preparing = gevent.spawn(_prepare_all, session, share, ready)
    try:
        with _alarm() as wait_until:
            for intended_start_ns, send in ready:
                wait_until(intended_start_ns)
                streams.spawn(send)
        preparing.get()  # raises what it raised
        streams.join()
    finally:
        preparing.kill()
        streams.kill()


@contextmanager
def _alarm() -> Iterator[Callable[[int], None]]:
    """Waits until a time of the monotonic clock, by the kernel's timer if possible: the event
    loop's own are a millisecond coarse, and each request would start that late."""
    if not kernel_can_tick():
        yield lambda at_ns: gevent.sleep(max(0, at_ns - time.perf_counter_ns()) / 1e9)
        return
    alarm, hub = KernelTimer(), gevent.get_hub()
    readable = hub.loop.io(alarm.descriptor, _READ)

    def wait_until(at_ns: int) -> None:
        if at_ns <= time.perf_counter_ns():
            gevent.sleep(0)
            return
        alarm.set(at_ns)
        hub.wait(readable)

    try:
        yield wait_until
    finally:
        readable.close()
        alarm.close()


def _prepare_all(session: LoadSession, share: ScheduleShare, ready: "Queue[Prepared]") -> None:
    try:
        for arrival in islice(session.plan.planned_arrivals(), share.worker, None, share.workers):
            ready.put(_prepared(session, arrival, share.begins_ns))
            gevent.sleep(0)  # a prompt takes a while to write: streams may want to read meanwhile
    except Exception:
        ready.put(StopIteration)
        raise
    ready.put(StopIteration)


def _prepared(session: LoadSession, arrival: Arrival, begins_ns: int) -> Prepared:
    load = session.plan.load
    assert isinstance(load, AbandonLoad)
    intended_start_ns = begins_ns + int(arrival.offset_s * 1e9)
    spec = arrival.draw_request(load, seed=session.plan.run.seed, seen=session.seen)
    spec = session.issue(spec, intended_start_ns=intended_start_ns)
    asked, tokens = arrival.replayed, spec.prompt_tokens
    if asked is not None and asked.pages:
        text = session.paged_prompt(asked.pages, page_tokens=asked.page_tokens, tokens=tokens)
    else:
        text = session.prompt(spec, n=0)
        spec = replace(spec, messages=session.other_documents(spec, n=0))
    rule = spec.leave_rule(load.think, session.client.step)
    return intended_start_ns, partial(session.client.ask, spec, text, rule, session.keep)


def share_out(environment: Environment, schedule: OpenArrivals) -> None:
    """Give each load process one director, and all of them one schedule. Raises ConfigError if a
    single process may not open as many streams."""
    options, runner = environment.parsed_options, environment.runner
    assert options is not None
    options.num_users = options.spawn_rate = max(1, options.expect_workers)
    deal_out(environment)
    if isinstance(runner, MasterRunner):

        def count(**_: Any) -> None:
            directors = max(options.expect_workers, runner.worker_count + 1)  # it is not in it yet
            options.num_users = options.spawn_rate = directors

        environment.events.worker_connect.add_listener(count)  # type: ignore[no-untyped-call]
    elif not isinstance(runner, WorkerRunner):
        allow_streams(schedule.max_streams)


def deal_out(environment: Environment) -> None:
    runner = environment.runner
    if isinstance(runner, MasterRunner):
        send = partial(_send_shares, runner)
        environment.events.test_start.add_listener(send)  # type: ignore[no-untyped-call]
    elif isinstance(runner, WorkerRunner):
        runner.register_message(_START, _take_share)


def _send_shares(runner: MasterRunner, **_: Any) -> None:
    clients, begins_ns = runner.clients, _soon_ns()
    ids = [one.id for one in (*clients.ready, *clients.spawning, *clients.running)]
    for number, client_id in enumerate(ids):
        share = ScheduleShare(
            begins_ns=begins_ns, clock=local_clock(), worker=number, workers=len(ids)
        )
        runner.send_message(_START, msgspec.to_builtins(share), client_id)


def _take_share(msg: Any, **_: Any) -> None:
    share = msgspec.convert(msg.data, ScheduleShare)
    if share.clock != local_clock():
        share.begins_ns = _soon_ns()
    OpenLoopDirector.share = share


def _soon_ns() -> int:
    return time.perf_counter_ns() + _LEAD_NS
