"""The users, and everything else that runs inside Locust.

Importing this module imports Locust, which monkey-patches the process: sockets, sleeping and locks
become gevent's. That is why the rest of the load is plain blocking code, and why the harness runs
it as a child (`workloads/locustfile.py`).

How a load ends, all ways alike: Locust kills the users' greenlets; a killed request writes its row
(cut off) on the way out. It ends when the plan's abandons are reached, when its time is up, on
SIGTERM, or when standard input ends, if asked to listen for that.
"""

import argparse
import logging
import os
import signal
import struct
import time
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, Final

import gevent
import gevent.socket
import msgspec
from gevent import monkey
from locust import User, task
from locust.env import Environment
from locust.runners import MasterRunner

from harness.errors import ConfigError
from harness.load.abandon import plan_request, think_ns
from harness.load.client import LeaveRule, never
from harness.load.plan import AbandonLoad, LoadPlan
from harness.load.prompts import prompt
from harness.load.rows import ShardWriter
from harness.load.session import LoadSession
from harness.records import ClientSample, Outcome, RequestRow

# After a refusal or a failure a user tries again, but not in a busy loop: a dead server would
# otherwise be answered with thousands of attempts a second.
_RETRY_PAUSE_S: Final = 0.5
_TICK_NS: Final = 10_000_000
_DUE: Final = struct.Struct("=q")
_NUMBERS_PER_WORKER: Final = 1_000_000
_NOT_A_FAILURE: Final = frozenset({Outcome.COMPLETED, Outcome.ABANDONED, Outcome.CUT_OFF})


class RequestFailedError(Exception):
    """Handed to Locust, so that its pages show a failure; never raised."""


class PlannedUser(User):
    """A user who follows the plan of the load. `session` is set when a load starts."""

    abstract = True
    session: ClassVar[LoadSession]


class AbandoningUser(PlannedUser):
    """Asks, reads, leaves or stays, and asks again: a closed loop."""

    abstract = False
    _numbers: ClassVar = count()

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        # Workers number their users apart, so that no two users share a seed.
        worker = getattr(environment.runner, "worker_index", 0)
        self._number = worker * _NUMBERS_PER_WORKER + next(self._numbers)
        self._asked = 0
        self._last: Outcome | None = None

    @task
    def ask(self) -> None:
        """One request, from its plan to its row."""
        session = self.session
        assert isinstance(session.plan.load, AbandonLoad)
        n = self._asked
        self._asked += 1
        plan = plan_request(session.plan.load, seed=session.plan.seed, user=self._number, n=n)
        ticket = session.ticket(
            user=self._number, max_tokens=plan.max_tokens, planned_abandon=plan.planned_abandon
        )
        rule = self._leave_rule(session, plan.planned_abandon, plan.think_fraction)
        text = prompt(seed=session.plan.seed, user=self._number, n=n, num_bytes=plan.prompt_bytes)
        session.client.ask(ticket, text, rule, self._keep)
        if self._last not in _NOT_A_FAILURE:
            gevent.sleep(_RETRY_PAUSE_S)

    def _keep(self, row: RequestRow) -> None:
        self._last = row.outcome
        self.session.keep(row)

    @staticmethod
    def _leave_rule(session: LoadSession, planned: int | None, fraction: float) -> LeaveRule:
        if planned is None:
            return never
        load = session.plan.load
        assert isinstance(load, AbandonLoad)

        def leave_when_read(tokens_read: int) -> int | None:
            if tokens_read < planned:
                return None
            step_ns = session.client.step.median_ns()
            return think_ns(load.think, fraction=fraction, step_ns=step_ns)

        return leave_when_read


def end_load(environment: Environment) -> None:
    """Stop the users; without a web page, end the process too. Safe to call from a user."""
    runner = environment.runner
    assert runner is not None
    gevent.spawn(runner.quit if environment.web_ui is None else runner.stop)


def prepare(
    environment: Environment,
    options: argparse.Namespace,
    plan: LoadPlan,
    user_class: type[PlannedUser],
) -> None:
    """Make Locust follow the plan; called once, when the environment exists."""
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs each request
    environment.user_classes = [user_class]
    environment.process_exit_code = 0  # whoever reads the rows judges, not Locust
    if options.walkaway_plan is not None:
        options.num_users = options.spawn_rate = plan.users
        options.run_time = plan.max_seconds
    if options.walkaway_exit_with_stdin:
        gevent.spawn(_end_with_stdin)
    api_key = _api_key(plan)
    if isinstance(environment.runner, MasterRunner):
        return  # it has no users of its own
    if plan.rows_dir is not None:
        gevent.spawn(_watch_lag, Path(plan.rows_dir), user_class)

    def start_session(**_: Any) -> None:
        # The web page may have changed the server; a plan in a file names its own.
        url = plan.url if options.walkaway_plan is not None else environment.host or plan.url
        user_class.session = LoadSession(
            msgspec.structs.replace(plan, url=url),
            api_key=api_key,
            pid=os.getpid(),
            tell=lambda row: _tell_locust(environment, row),
            enough=lambda: end_load(environment),
        )

    def end_session(**_: Any) -> None:
        user_class.session.close()

    environment.events.test_start.add_listener(start_session)  # type: ignore[no-untyped-call]
    environment.events.test_stop.add_listener(end_session)  # type: ignore[no-untyped-call]


def _api_key(plan: LoadPlan) -> str | None:
    if plan.api_key_env is None:
        return None
    try:
        return os.environ[plan.api_key_env]
    except KeyError:
        raise ConfigError(
            f"the environment variable {plan.api_key_env}, which should hold the API key, is not "
            "set; export it, or leave the option out for a server without keys"
        ) from None


def _tell_locust(environment: Environment, row: RequestRow) -> None:
    environment.events.request.fire(  # type: ignore[no-untyped-call]
        request_type="STREAM",
        name=row.outcome.value,
        response_time=(row.ended_ns - row.sent_ns) / 1e6,
        response_length=row.tokens_read,
        exception=None if row.outcome in _NOT_A_FAILURE else RequestFailedError(row.error),
        context={},
    )


def _end_with_stdin() -> None:
    stdin = 0
    while True:
        gevent.socket.wait_read(stdin)
        if not os.read(stdin, 4096):
            os.kill(os.getpid(), signal.SIGTERM)
            return


def _watch_lag(rows_dir: Path, user_class: type[PlannedUser]) -> None:
    """Write down how late each tick was noticed: the floor below which our stamps mean nothing."""
    reader, writer = os.pipe()
    monkey.get_original("_thread", "start_new_thread")(_tick, (writer,))
    with ShardWriter(rows_dir, ClientSample, os.getpid()) as shard:
        while True:
            gevent.socket.wait_read(reader)
            now_ns = time.perf_counter_ns()
            (due_ns,) = _DUE.unpack(os.read(reader, _DUE.size))
            session = getattr(user_class, "session", None)
            sample = ClientSample(
                t_ns=now_ns,
                pid=os.getpid(),
                lag_ns=now_ns - due_ns,
                cpu_s=time.process_time(),
                streams=0 if session is None else session.client.open_streams,
            )
            shard.write(sample)


def _tick(writer: int) -> None:
    # A thread of the system, not of gevent: the event loop's own timers are a millisecond coarse,
    # which is more than a token waits. So a tick arrives as a token does, through a descriptor.
    sleep = monkey.get_original("time", "sleep")
    due_ns = time.perf_counter_ns()
    while True:
        due_ns += _TICK_NS
        sleep(max(0, due_ns - time.perf_counter_ns()) / 1e9)
        os.write(writer, _DUE.pack(due_ns))
