"""The cancel storm: all streams of a wave leave at the same moment, and the next wave comes.

A wave is complete when each of its streams has read its first tokens; then they leave together
(`harness.load.storm`) and as many come again at once. Stayers read on through all of it: what the
storm does to them is what it does to the innocent. The rows of a wave have its number as `trial`.
"""

import time
from itertools import count

import gevent
from gevent.pool import Group
from locust import task
from locust.exception import StopUser

from harness.load.abandon import LeaveRule, never
from harness.load.plan import CancelStormLoad
from harness.load.prompts import prompt_size
from harness.load.session import LoadSession
from harness.load.storm import Storm
from harness.load.ticket import Intent, Ticket
from harness.load.users import NOT_A_FAILURE, RETRY_PAUSE_S, PlannedUser, end_load
from harness.records import RequestRow, Way


class CancelStormDirector(PlannedUser):
    """The only user of a cancel storm: starts the stayers, then sends wave after wave."""

    abstract = False
    fixed_count = 1

    @task
    def direct(self) -> None:
        """All waves, once."""
        load = self.session.plan.load
        assert isinstance(load, CancelStormLoad)
        asker = Asker(self.session, load)
        stayers = Group()
        try:
            for number in range(load.stayers):
                stayers.spawn(asker.stay, load.streams + number)
            for number in range(load.storms):
                _wave(asker, load, number)
        finally:
            stayers.kill()
        end_load(self.environment)
        raise StopUser


def _wave(asker: "Asker", load: CancelStormLoad, number: int) -> None:
    """One storm, from the sending to the last one gone. A wave that is cut short is gone, too."""
    storm = Storm(streams=load.streams, tokens=load.abandon_after_tokens)
    wave = Group()
    try:
        for stream in range(load.streams):
            wave.spawn(asker.leave, stream, number, storm)
        wave.join()
    finally:
        wave.kill()


class Asker:
    """Sends the requests of both kinds."""

    def __init__(self, session: LoadSession, load: CancelStormLoad) -> None:
        self._session = session
        self._load = load

    def leave(self, stream: int, number: int, storm: Storm) -> None:
        """A stream of a wave."""
        step = self._session.client.step

        def rule(tokens_read: int) -> int | None:
            now_ns = time.perf_counter_ns()
            return storm.pause_ns(stream, tokens_read, now_ns=now_ns, step_ns=step.median_ns())

        tokens = self._load.abandon_after_tokens
        ticket = self._session.ticket(
            user=stream,
            max_tokens=self._load.answer_tokens,
            trial=number,
            intent=Intent(plan=f"storm:{tokens}", planned_abandon=tokens, way=Way.FIN),
        )
        self._ask(ticket, number, rule)

    def stay(self, user: int) -> None:
        """A stayer: ask and read until killed."""
        for n in count():
            ticket = self._session.ticket(user=user, max_tokens=self._load.stay_tokens)
            self._ask(ticket, n, never)

    def _ask(self, ticket: Ticket, n: int, rule: LeaveRule) -> None:
        session, seed = self._session, self._session.plan.seed
        size = prompt_size(self._load.prompt_tokens, seed=seed, user=ticket.user, n=n)
        text = session.prompt(user=ticket.user, n=n, tokens=size)
        session.client.ask(ticket, text, rule, self._keep)

    def _keep(self, row: RequestRow) -> None:
        self._session.keep(row)
        if row.outcome not in NOT_A_FAILURE:
            gevent.sleep(RETRY_PAUSE_S)
