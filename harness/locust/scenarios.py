"""Loads directed from one place: the chunk frontier and the cancel storm.

Chunk frontier: bystanders stream all along. Meanwhile a director sends long prompts in pairs: it
reads a few tokens of the first, and leaves the second by the plan `prefill`, which knows the times
to first token of the prompts read. Cancel storm: many streams leave at one moment, wave after wave,
while others stay.
"""

import random
import time
from collections.abc import Sequence
from itertools import count
from typing import Final

import gevent
from gevent.event import Event
from gevent.pool import Group

from harness.locust.users import Director
from harness.records import RequestRow, Role, Way
from harness.workload.abandon import LeaveRule, PrefillPlan, RequestSpec, Storm, never
from harness.workload.load import (
    NOT_A_FAILURE,
    RETRY_PAUSE_S,
    CancelStormLoad,
    ChunkFrontierLoad,
)
from harness.workload.observed_latency import ObservedLatency

_DIRECTOR: Final = 0  # the bystanders are numbered from 1


class _Asking(Director):
    abstract = True

    def ask(self, spec: RequestSpec, n: int, rule: LeaveRule) -> RequestRow:
        session = self.session
        text = session.prompt(spec, n=n)
        row = session.client.ask(session.issue(spec), text, rule, session.keep)
        if row.outcome not in NOT_A_FAILURE:
            gevent.sleep(RETRY_PAUSE_S)
        return row

    def prompt_tokens(self, limits: Sequence[int], user: int, n: int) -> int:
        seed = self.session.plan.run.seed
        return random.Random(f"{seed}/{user}/{n}/length").randint(*limits)


class ChunkFrontierDirector(_Asking):
    def run_load(self) -> None:
        load = self.session.plan.load
        assert isinstance(load, ChunkFrontierLoad)
        first_tokens = [Event() for _ in range(load.bystanders)]
        bystanders = Group()
        try:
            for user, first_token in enumerate(first_tokens, start=_DIRECTOR + 1):
                bystanders.spawn(self._stand_by, load, user, first_token)
            for first_token in first_tokens:
                first_token.wait()
            self._send_pairs(load)
        finally:
            bystanders.kill()

    def _stand_by(self, load: ChunkFrontierLoad, user: int, first_token: Event) -> None:
        def note_progress(tokens_read: int) -> None:
            if tokens_read:
                first_token.set()

        for n in count():
            spec = RequestSpec(
                role=Role.BYSTANDER,
                user=user,
                max_tokens=load.bystander_answer_tokens,
                prompt_tokens=self.prompt_tokens(load.bystander_prompt_tokens, user, n),
            )
            self.ask(spec, n, note_progress)

    def _send_pairs(self, load: ChunkFrontierLoad) -> None:
        plan, seen, num_seen = PrefillPlan(plan="prefill"), ObservedLatency(), 0
        numbers = count()
        for _ in range(load.pairs):
            n = next(numbers)
            read = self._ask_long(self._long_prompt(load, n, load.read_tokens), n)
            if read.first_token_ns is not None:
                seen.observe(read)
                num_seen += 1
            if num_seen:
                n = next(numbers)
                rng = random.Random(f"{self.session.plan.run.seed}/{num_seen}/leave")
                asked = self._long_prompt(load, n, load.answer_tokens)
                self._ask_long(plan.draw(rng, asked, seen), n)

    def _long_prompt(self, load: ChunkFrontierLoad, n: int, max_tokens: int) -> RequestSpec:
        return RequestSpec(
            role=Role.LONG_PROMPT,
            user=_DIRECTOR,
            max_tokens=max_tokens,
            prompt_tokens=self.prompt_tokens(load.prompt_tokens, _DIRECTOR, n),
        )

    def _ask_long(self, spec: RequestSpec, n: int) -> RequestRow:
        return self.ask(spec, n, spec.leave_rule("none", self.session.client.step))


class CancelStormDirector(_Asking):
    def run_load(self) -> None:
        load = self.session.plan.load
        assert isinstance(load, CancelStormLoad)
        stayers = Group()
        try:
            for number in range(load.stayers):
                stayers.spawn(self._stay, load, load.streams + number)
            for number in range(load.storms):
                self._send_wave(load, number)
        finally:
            stayers.kill()

    def _stay(self, load: CancelStormLoad, user: int) -> None:
        for n in count():
            size = self.prompt_tokens(load.prompt_tokens, user, n)
            spec = RequestSpec(user=user, max_tokens=load.stay_tokens, prompt_tokens=size)
            self.ask(spec, n, never)

    def _send_wave(self, load: CancelStormLoad, number: int) -> None:
        storm = Storm(streams=load.streams, tokens=load.abandon_after_tokens)
        wave = Group()
        try:
            for stream in range(load.streams):
                wave.spawn(self._leave, load, storm, stream, number)
            wave.join()
        finally:
            wave.kill()

    def _leave(self, load: CancelStormLoad, storm: Storm, stream: int, number: int) -> None:
        step = self.session.client.step

        def rule(tokens_read: int) -> int | None:
            now_ns = time.perf_counter_ns()
            return storm.pause_ns(stream, tokens_read, now_ns=now_ns, step_ns=step.median_ns())

        spec = RequestSpec(
            user=stream,
            max_tokens=load.answer_tokens,
            prompt_tokens=self.prompt_tokens(load.prompt_tokens, stream, number),
            trial=number,
            plan=f"storm:{load.abandon_after_tokens}",
            planned_abandon=load.abandon_after_tokens,
            way=Way.FIN,
        )
        self.ask(spec, number, rule)
