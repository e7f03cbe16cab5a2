"""Two loads directed from one place: the chunk frontier and the cancel storm.

The chunk frontier: what does a long prompt cost the streams that decode beside it, and they it?

Bystanders stream all along: short prompts, long answers, one after the other. Beside them a
director sends long prompts, one at a time and in pairs: one is read for a few tokens, the next is
left during its prefill. When to leave is known from those that were read: after a share, drawn
anew each time, of the median time to first token seen so far.

The rows tell the three apart: bystanders and long prompts by their role, and long prompts that were
to be left by their `planned_abandon` (0: before the first token).

A cancel storm: many streams leave at the same moment, wave after wave, beside stayers.
"""

import statistics
import time
from dataclasses import replace
from itertools import count

import gevent
from gevent.event import Event
from gevent.pool import Group
from locust import task
from locust.exception import StopUser

from harness.load.session import LoadSession
from harness.load.users import NOT_A_FAILURE, RETRY_PAUSE_S, PlannedUser, end_load
from harness.records import RequestRow, Role, Way
from harness.workload.abandon import LeaveRule, RequestSpec, never
from harness.workload.load import CancelStormLoad, ChunkFrontierLoad
from harness.workload.prompts import prompt_size
from harness.workload.storm import Storm, leaving_share

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
        seed = self._session.plan.run.seed
        for n in count():
            size = prompt_size(
                self._load.bystander_prompt_tokens, seed=seed, user=self._number, n=n
            )
            spec = RequestSpec(
                role=Role.BYSTANDER,
                user=self._number,
                max_tokens=self._load.bystander_answer_tokens,
                prompt_tokens=size,
            )
            text = self._session.prompt(user=self._number, n=n, tokens=size)
            self._session.client.ask(
                self._session.issue(spec), text, self._note_progress, self._keep
            )

    def _note_progress(self, tokens_read: int) -> None:
        if tokens_read:
            self.is_reading.set()

    def _keep(self, row: RequestRow) -> None:
        self._session.keep(row)
        if row.outcome not in NOT_A_FAILURE:
            gevent.sleep(RETRY_PAUSE_S)


class LongPrompts:
    """The director's requests. Its state: how many it has sent, and the times to first token."""

    def __init__(self, session: LoadSession, load: ChunkFrontierLoad) -> None:
        self._session = session
        self._load = load
        self._number = 0
        self._ttfts_ns: list[int] = []

    def send_all(self) -> None:
        """Each pair: one to read and one to leave; none to leave before one could be read."""
        for _ in range(self._load.pairs):
            self._ask(self._spec(self._load.read_tokens))
            if self._ttfts_ns:
                share = leaving_share(seed=self._session.plan.run.seed, n=len(self._ttfts_ns))
                left = replace(
                    self._spec(self._load.answer_tokens),
                    plan=f"prefill:{share:.2f}",
                    planned_abandon=0,
                    way=Way.FIN,
                    pause=int(share * statistics.median(self._ttfts_ns)),
                )
                self._ask(left)

    def _spec(self, max_tokens: int) -> RequestSpec:
        seed, n = self._session.plan.run.seed, self._number
        return RequestSpec(
            role=Role.LONG_PROMPT,
            user=_DIRECTOR,
            max_tokens=max_tokens,
            prompt_tokens=prompt_size(self._load.prompt_tokens, seed=seed, user=_DIRECTOR, n=n),
        )

    def _ask(self, spec: RequestSpec) -> None:
        session = self._session
        text = session.prompt(user=_DIRECTOR, n=self._number, tokens=spec.prompt_tokens)
        self._number += 1
        rule = spec.leave_rule("none", session.client.step)
        session.client.ask(session.issue(spec), text, rule, self._keep)

    def _keep(self, row: RequestRow) -> None:
        self._session.keep(row)
        if row.planned_abandon is None and row.first_token_ns is not None:
            self._ttfts_ns.append(row.first_token_ns - row.sent_ns)
        if row.outcome not in NOT_A_FAILURE:
            gevent.sleep(RETRY_PAUSE_S)


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
        self._ask(
            RequestSpec(
                user=stream,
                max_tokens=self._load.answer_tokens,
                prompt_tokens=self._prompt_tokens(stream, number),
                trial=number,
                plan=f"storm:{tokens}",
                planned_abandon=tokens,
                way=Way.FIN,
            ),
            number,
            rule,
        )

    def stay(self, user: int) -> None:
        """A stayer: ask and read until killed."""
        for n in count():
            size = self._prompt_tokens(user, n)
            spec = RequestSpec(user=user, max_tokens=self._load.stay_tokens, prompt_tokens=size)
            self._ask(spec, n, never)

    def _prompt_tokens(self, user: int, n: int) -> int:
        seed = self._session.plan.run.seed
        return prompt_size(self._load.prompt_tokens, seed=seed, user=user, n=n)

    def _ask(self, spec: RequestSpec, n: int, rule: LeaveRule) -> None:
        session = self._session
        text = session.prompt(user=spec.user, n=n, tokens=spec.prompt_tokens)
        session.client.ask(session.issue(spec), text, rule, self._keep)

    def _keep(self, row: RequestRow) -> None:
        self._session.keep(row)
        if row.outcome not in NOT_A_FAILURE:
            gevent.sleep(RETRY_PAUSE_S)
