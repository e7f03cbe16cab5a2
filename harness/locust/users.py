"""The users, and everything else that runs inside Locust.

Importing this module imports Locust, which monkey-patches the process: sockets, sleeping and locks
become gevent's. A load ends when the plan's abandons are reached, when its time is up, on SIGTERM,
or when a given open file ends. Locust then kills the users' greenlets, and a killed request writes
its row (cut off) on the way out.
"""

import argparse
import inspect
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, ClassVar, Final

import gevent
import gevent.socket
from locust import User, task
from locust.env import Environment
from locust.event import EventHook
from locust.exception import StopUser
from locust.runners import MasterRunner, WorkerRunner

from harness.client.fd_limit import allow_streams
from harness.client.lag import LagWatch
from harness.client.session import LoadSession, canary_prompt
from harness.client.turns import LiveTurns
from harness.errors import TargetError
from harness.http_client import read_api_key
from harness.locust.options import plan_of_the_page
from harness.locust.processes import (
    ALL_SENT,
    NO_GOING_ON,
    Master,
    ProcessRecords,
    note_workers,
    report_abandons,
)
from harness.records import Protocol, RequestRow, Role
from harness.workload.abandon import RequestSpec, never
from harness.workload.load import NOT_A_FAILURE, RETRY_PAUSE_S, AbandonLoad
from harness.workload.plan import LoadPlan
from harness.workload.session import ChatMessage

# The work before and after a request takes as long as a dozen tokens. In between comes a wait,
# however short, in which the loop stamps the tokens of other requests.
_BREATH_S: Final = 1e-4
_NUMBERS_PER_WORKER: Final = 1_000_000


class RequestFailedError(Exception):
    """A failure for Locust's pages; never raised."""


class PlannedUser(User):
    abstract = True
    session: ClassVar[LoadSession]


class Director(PlannedUser):
    """The only user of a load that is directed from one place: `run_load` sends all of it."""

    abstract = True
    fixed_count = 1

    def run_load(self) -> None:
        raise NotImplementedError

    @task
    def direct(self) -> None:
        try:
            self.run_load()
        except StopUser:
            raise
        except Exception:  # Locust logs it, and would direct the load once more
            end_load(self.environment)
            raise
        end_load(self.environment)
        raise StopUser


class AbandoningUser(PlannedUser):
    _numbers: ClassVar = count()

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        # Workers number their users apart, so that no two users share a seed.
        worker = getattr(environment.runner, "worker_index", 0)
        self._number = worker * _NUMBERS_PER_WORKER + next(self._numbers)
        self._asked = 0
        self._last: RequestRow | None = None
        self._turns: LiveTurns | None = None
        self._text = ""
        self._others: Sequence[ChatMessage] = ()

    @task
    def ask(self) -> None:
        session, load = self.session, self.session.plan.load
        assert isinstance(load, AbandonLoad)
        session.canary_barrier.wait_for_turn(self._number)
        try:
            pause_s = self._ask_once(load)
        except Exception:
            gevent.sleep(RETRY_PAUSE_S)  # a bug of ours must not make a busy loop either
            raise
        finally:
            session.canary_barrier.end_turn(self._number)
        gevent.sleep(pause_s or _BREATH_S)

    def _ask_once(self, load: AbandonLoad) -> float:
        """Returns the seconds until the next request."""
        if self._number < load.canaries:
            self._last = self._ask_as_canary(load)
        elif load.session is not None:
            self._turns = self._turns or LiveTurns(self.session, self._number)
            send = self._turns.prepare()
            gevent.sleep(_BREATH_S)
            return send()
        else:
            self._last = self._ask_as_planned(load)
        return load.pause_after(self._last.outcome)

    def _ask_as_planned(self, load: AbandonLoad) -> RequestRow:
        session, n, last = self.session, self._asked, self._last
        self._asked += 1
        spec = load.draw_request(
            seed=session.plan.run.seed, user=self._number, n=n, seen=session.seen
        )
        if last is not None and last.outcome in load.ask_again_after:
            spec = replace(spec, repeats=last.request_id)
        else:
            self._text = session.prompt(spec, n=n)
            self._others = session.other_documents(spec, n=n)
        spec = replace(spec, messages=self._others)
        spec = session.issue(spec)
        rule = spec.leave_rule(load.think, session.client.step)
        gevent.sleep(_BREATH_S)
        return session.client.ask(spec, self._text, rule, session.keep)

    def _ask_as_canary(self, load: AbandonLoad) -> RequestRow:
        session, tokens = self.session, load.prompt_tokens[1]
        text = canary_prompt(self._number, tokens=tokens, scale=session.plan.prompt_scale)
        spec = RequestSpec(
            user=self._number,
            max_tokens=load.canary_tokens,
            prompt_tokens=tokens,
            role=Role.CANARY,
        )
        return session.client.ask(session.issue(spec), text, never, session.keep)


def end_load(environment: Environment) -> None:
    runner, options = environment.runner, environment.parsed_options
    assert runner is not None
    assert options is not None
    if isinstance(runner, WorkerRunner) and plan_of_the_page(options) is not None:
        runner.send_message(ALL_SENT, {})
        return
    gevent.spawn(runner.quit if environment.web_ui is None else runner.stop)


def give_up(environment: Environment, why: str) -> None:
    """End the load in all its processes; the last line of output is the first reason given."""
    if environment.process_exit_code:
        return
    environment.process_exit_code = TargetError.exit_code
    if isinstance(environment.runner, WorkerRunner):
        environment.runner.send_message(NO_GOING_ON, {"why": why})
        return
    _listen(environment.events.quit, lambda **_: sys.stderr.write(f"walkaway: {why}\n"))
    end_load(environment)


def prepare(
    environment: Environment,
    options: argparse.Namespace,
    plan: LoadPlan,
    *user_classes: type[PlannedUser],
) -> None:
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs each request
    _patch_grpc(plan)  # before the watch for lag: its imports block for 0.3 s
    gevent.get_hub().loop.update_now()  # Locust's timers count from here, not from before imports
    inspect.stack()  # Locust calls it as it stops the users: the first call blocks for 0.2 s
    environment.user_classes = list(user_classes)
    if options.walkaway_plan is not None:
        options.num_users = options.spawn_rate = plan.run.users
        options.run_time = plan.run.max_seconds
    if options.walkaway_exit_with is not None:
        environment.process_exit_code = 0  # the harness judges by the rows, Locust by failures
        gevent.spawn(_end_with, options.walkaway_exit_with)
    api_key, runner = _api_key(plan), environment.runner
    if isinstance(runner, MasterRunner):
        _prepare_master(environment, runner, options, plan)
        return
    give_up_here = partial(give_up, environment)
    is_worker = isinstance(runner, WorkerRunner)
    if isinstance(runner, WorkerRunner):
        report_abandons(runner, lambda: 0 if (now := _session()) is None else now.abandons)
    allow_streams(0 if is_worker else plan.run.users)  # a worker learns its number of users later
    lag = LagWatch(
        open_streams=lambda: 0 if (now := _session()) is None else now.client.open_streams,
        give_up=give_up_here,
    )
    records = ProcessRecords(lag, runner)
    records.begin(plan)
    _listen(environment.events.quit, records.end)

    def start_session(**_: Any) -> None:
        now = plan_of_the_page(options)
        if now is not None:
            most = now.run.users if now.schedule is None else now.schedule.max_streams
            allow_streams(0 if is_worker else most)
            records.begin(now)
        # The host comes from the master; a plan in a file names its own.
        url = plan.url if options.walkaway_plan is not None else environment.host or plan.url
        _patch_grpc(now or plan)
        PlannedUser.session = LoadSession(
            now or plan.model_copy(update={"url": url}),
            api_key=api_key if now is None else _api_key(now),
            tell=lambda row: _tell_locust(environment, row),
            # The master counts the abandons of all its workers.
            enough=(lambda: None) if is_worker else partial(end_load, environment),
            give_up=give_up_here,
        )

    def end_session(**_: Any) -> None:
        if (session := _session()) is not None:
            session.close()
        if plan_of_the_page(options) is not None:
            records.end()

    _listen(environment.events.test_start, start_session)
    _listen(environment.events.test_stop, end_session)


def _patch_grpc(plan: LoadPlan) -> None:
    if plan.protocol is Protocol.GRPC:
        from harness.client.kserve import use_gevent  # its packages are an extra

        use_gevent()


def _prepare_master(
    environment: Environment, runner: MasterRunner, options: argparse.Namespace, plan: LoadPlan
) -> None:
    events, end = environment.events, partial(end_load, environment)
    master = Master(runner, end=end, give_up=partial(give_up, environment))
    note_workers(runner, plan)
    _listen(events.test_start, lambda **_: master.follow(plan_of_the_page(options) or plan))
    if environment.web_ui is not None:
        return
    # Without workers Locust's master stops the test, but would wait until the time is up.
    _listen(events.test_stop, lambda **_: end())
    if options.walkaway_exit_with is None:  # else an interrupted load may know too few requests
        _listen(
            events.test_stopping, lambda **_: _listen(events.quitting, _fail_if_nothing_was_sent)
        )


def _listen(event: EventHook, listener: Callable[..., object]) -> None:
    event.add_listener(listener)  # type: ignore[no-untyped-call]


def _fail_if_nothing_was_sent(environment: Environment, **_: Any) -> None:
    if environment.process_exit_code or environment.stats.total.num_requests:
        return
    environment.process_exit_code = TargetError.exit_code
    sys.stderr.write(
        "walkaway: the load made no request: check that each worker has the same --walkaway-... "
        "options as the master and, in an open loop, the same --run-time\n"
    )


def _session() -> LoadSession | None:
    return getattr(PlannedUser, "session", None)


def _api_key(plan: LoadPlan) -> str | None:
    return read_api_key(plan.api_key_env, flag="--walkaway-api-key-env")


def _tell_locust(environment: Environment, row: RequestRow) -> None:
    environment.events.request.fire(  # type: ignore[no-untyped-call]
        request_type=row.delivery.value.upper(),
        name=row.outcome.value,
        response_time=(row.ended_ns - row.sent_ns) / 1e6,
        response_length=row.tokens_read,
        exception=None if row.outcome in NOT_A_FAILURE else RequestFailedError(row.error),
        context={},
    )


def _end_with(descriptor: int) -> None:
    while True:
        gevent.socket.wait_read(descriptor)
        if not os.read(descriptor, 4096):
            os.kill(os.getpid(), signal.SIGTERM)
            return
