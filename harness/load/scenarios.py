"""The chunk frontier: what does a long prompt cost those who decode beside it, and the other way?

Bystanders stream all along: short prompts, long answers, one after the other. Beside them a
director sends long prompts, one at a time and in pairs: one is read for a few tokens, the next is
left during its prefill. When to leave is known from those that were read: after a share, drawn
anew each time, of the median time to first token seen so far.

The rows tell the three apart: bystanders and long prompts by their role, and of the long prompts
those that were to be left by their `planned_abandon` (0: before the first token).
"""

import statistics
import time
from itertools import count

import gevent
from gevent.event import Event
from gevent.pool import Group
from locust import task
from locust.exception import StopUser

from harness.load.session import LoadSession
from harness.load.users import NOT_A_FAILURE, RETRY_PAUSE_S, PlannedUser, end_load
from harness.records import RequestRow, Role, Way
from harness.workload.abandon import STAYS, Intent, LeaveRule, Storm, Ticket, leaving_share, never
from harness.workload.plan import CancelStormLoad, ChunkFrontierLoad
from harness.workload.prompts import prompt_size

_DIRECTOR = 0  # the bystanders are numbered from 1


class ChunkFrontierDirector(PlannedUser):
    """The only user of a chunk frontier load: starts the bystanders, then sends long prompts."""

    abstract = False
    fixed_count = 1

    @task
    def direct(self) -> None:
        """All pairs, once, while the bystanders stream."""
        load = self.session.plan.load
        assert isinstance(load, ChunkFrontierLoad)
        bystanders = [Bystander(self.session, load, number=n + 1) for n in range(load.bystanders)]
        streams = Group()
        try:
            for bystander in bystanders:
                streams.spawn(bystander.stream)
            for bystander in bystanders:
                bystander.is_reading.wait()
            LongPrompts(self.session, load).send_all()
        finally:
            streams.kill()
        end_load(self.environment)
        raise StopUser


class Bystander:
    """Reads one long answer after the other; `is_reading` is set by its first token."""

    def __init__(self, session: LoadSession, load: ChunkFrontierLoad, *, number: int) -> None:
        self.is_reading = Event()
        self._session = session
        self._load = load
        self._number = number

    def stream(self) -> None:
        """Ask and read until killed."""
        seed = self._session.plan.seed
        for n in count():
            size = prompt_size(
                self._load.bystander_prompt_tokens, seed=seed, user=self._number, n=n
            )
            ticket = self._session.ticket(
                role=Role.BYSTANDER,
                user=self._number,
                max_tokens=self._load.bystander_answer_tokens,
            )
            text = self._session.prompt(user=self._number, n=n, tokens=size)
            self._session.client.ask(ticket, text, self._note_progress, self._keep)

    def _note_progress(self, tokens_read: int) -> None:
        if tokens_read:
            self.is_reading.set()

    def _keep(self, row: RequestRow) -> None:
        self._session.keep(row)
        if row.outcome not in NOT_A_FAILURE:
            gevent.sleep(RETRY_PAUSE_S)


class LongPrompts:
    """The director's requests. Its state is the times to first token that it has seen."""

    def __init__(self, session: LoadSession, load: ChunkFrontierLoad) -> None:
        self._session = session
        self._load = load
        self._numbers = count()
        self._ttfts_ns: list[int] = []

    def send_all(self) -> None:
        """Each pair: one to read and one to leave; none to leave before one could be read."""
        for _ in range(self._load.pairs):
            self._ask(max_tokens=self._load.read_tokens)
            if self._ttfts_ns:
                share = leaving_share(seed=self._session.plan.seed, n=len(self._ttfts_ns))
                self._ask(max_tokens=self._load.answer_tokens, leaves_at=share)

    def _ask(self, *, max_tokens: int, leaves_at: float | None = None) -> None:
        seed, n = self._session.plan.seed, next(self._numbers)
        size = prompt_size(self._load.prompt_tokens, seed=seed, user=_DIRECTOR, n=n)
        ticket = self._session.ticket(
            role=Role.LONG_PROMPT,
            user=_DIRECTOR,
            max_tokens=max_tokens,
            intent=STAYS if leaves_at is None else _leaving(leaves_at),
        )
        text = self._session.prompt(user=_DIRECTOR, n=n, tokens=size)
        rule = never if leaves_at is None else self._leave_at(leaves_at)
        self._session.client.ask(ticket, text, rule, self._keep)

    def _leave_at(self, share: float) -> LeaveRule:
        pause_ns = int(share * statistics.median(self._ttfts_ns))
        return lambda _tokens_read: pause_ns

    def _keep(self, row: RequestRow) -> None:
        self._session.keep(row)
        if row.planned_abandon is None and row.first_token_ns is not None:
            self._ttfts_ns.append(row.first_token_ns - row.sent_ns)
        if row.outcome not in NOT_A_FAILURE:
            gevent.sleep(RETRY_PAUSE_S)


def _leaving(share: float) -> Intent:
    return Intent(
        plan=f"prefill:{share:.2f}", planned_abandon=0, counts_from_start=True, way=Way.FIN
    )


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
