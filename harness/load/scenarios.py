"""Two loads directed from one place: the chunk frontier and the cancel storm.

Chunk frontier: what does a long prompt cost the streams that decode beside it, and they it?
Bystanders stream all along: short prompts, long answers, one after the other. Beside them a
director sends long prompts, one at a time and in pairs: it reads a few tokens of the first, and
leaves the second during its prefill, after a share, drawn anew each time, of the median time to
first token of those read. In the rows a role tells bystanders from long prompts, and
`planned_abandon` is 0 for the long prompts that were to be left.

Cancel storm: many streams leave at one moment, wave after wave, beside stayers.
"""

import statistics
import time
from collections.abc import Sequence
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


class _Sender:
    """Sends the requests of one session; waits after a failure."""

    def __init__(self, session: LoadSession) -> None:
        self._session = session

    def _ask(self, spec: RequestSpec, n: int, rule: LeaveRule) -> None:
        session = self._session
        text = session.prompt(user=spec.user, n=n, tokens=spec.prompt_tokens)
        session.client.ask(session.issue(spec), text, rule, self._keep)

    def _prompt_tokens(self, limits: Sequence[int], user: int, n: int) -> int:
        return prompt_size(limits, seed=self._session.plan.run.seed, user=user, n=n)

    def _keep(self, row: RequestRow) -> None:
        self._session.keep(row)
        if row.outcome not in NOT_A_FAILURE:
            gevent.sleep(RETRY_PAUSE_S)


class ChunkFrontierDirector(PlannedUser):
    """The only user of a chunk frontier load: starts the bystanders, then sends long prompts."""

    abstract = False
    fixed_count = 1

    @task
    def direct(self) -> None:
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


class Bystander(_Sender):
    """Reads one long answer after the other; `is_reading` is set by its first token."""

    def __init__(self, session: LoadSession, load: ChunkFrontierLoad, *, number: int) -> None:
        super().__init__(session)
        self.is_reading = Event()
        self._load = load
        self._number = number

    def stream(self) -> None:
        """Ask and read until killed."""
        limits = self._load.bystander_prompt_tokens
        for n in count():
            spec = RequestSpec(
                role=Role.BYSTANDER,
                user=self._number,
                max_tokens=self._load.bystander_answer_tokens,
                prompt_tokens=self._prompt_tokens(limits, self._number, n),
            )
            self._ask(spec, n, self._note_progress)

    def _note_progress(self, tokens_read: int) -> None:
        if tokens_read:
            self.is_reading.set()


class LongPrompts(_Sender):
    """The director's requests."""

    def __init__(self, session: LoadSession, load: ChunkFrontierLoad) -> None:
        super().__init__(session)
        self._load = load
        self._number = 0
        self._ttfts_ns: list[int] = []

    def send_all(self) -> None:
        """Each pair: one to read and one to leave; none is left before one has been read."""
        for _ in range(self._load.pairs):
            self._send(self._spec(self._load.read_tokens))
            if self._ttfts_ns:
                share = leaving_share(seed=self._session.plan.run.seed, n=len(self._ttfts_ns))
                left = replace(
                    self._spec(self._load.answer_tokens),
                    plan=f"prefill:{share:.2f}",
                    planned_abandon=0,
                    way=Way.FIN,
                    pause=int(share * statistics.median(self._ttfts_ns)),
                )
                self._send(left)

    def _spec(self, max_tokens: int) -> RequestSpec:
        return RequestSpec(
            role=Role.LONG_PROMPT,
            user=_DIRECTOR,
            max_tokens=max_tokens,
            prompt_tokens=self._prompt_tokens(self._load.prompt_tokens, _DIRECTOR, self._number),
        )

    def _send(self, spec: RequestSpec) -> None:
        n = self._number
        self._number += 1
        self._ask(spec, n, spec.leave_rule("none", self._session.client.step))

    def _keep(self, row: RequestRow) -> None:
        if row.planned_abandon is None and row.first_token_ns is not None:
            self._ttfts_ns.append(row.first_token_ns - row.sent_ns)
        super()._keep(row)


class CancelStormDirector(PlannedUser):
    """The only user of a cancel storm: starts the stayers, then sends wave after wave."""

    abstract = False
    fixed_count = 1

    @task
    def direct(self) -> None:
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
    """One storm, from the sending until all streams have left, or the load ends."""
    storm = Storm(streams=load.streams, tokens=load.abandon_after_tokens)
    wave = Group()
    try:
        for stream in range(load.streams):
            wave.spawn(asker.leave, stream, number, storm)
        wave.join()
    finally:
        wave.kill()


class Asker(_Sender):
    """Sends the requests of the waves and of the stayers."""

    def __init__(self, session: LoadSession, load: CancelStormLoad) -> None:
        super().__init__(session)
        self._load = load

    def leave(self, stream: int, number: int, storm: Storm) -> None:
        step = self._session.client.step

        def rule(tokens_read: int) -> int | None:
            now_ns = time.perf_counter_ns()
            return storm.pause_ns(stream, tokens_read, now_ns=now_ns, step_ns=step.median_ns())

        tokens = self._load.abandon_after_tokens
        self._ask(
            RequestSpec(
                user=stream,
                max_tokens=self._load.answer_tokens,
                prompt_tokens=self._prompt_tokens(self._load.prompt_tokens, stream, number),
                trial=number,
                plan=f"storm:{tokens}",
                planned_abandon=tokens,
                way=Way.FIN,
            ),
            number,
            rule,
        )

    def stay(self, user: int) -> None:
        """Ask and read until killed."""
        for n in count():
            size = self._prompt_tokens(self._load.prompt_tokens, user, n)
            spec = RequestSpec(user=user, max_tokens=self._load.stay_tokens, prompt_tokens=size)
            self._ask(spec, n, never)
