"""Loads directed from one place: the chunk frontier, the cancel storm, the train of probes
(`harness.load.slot_recovery`) and the count of occupied slots (`harness.load.occupancy`).

Chunk frontier: bystanders stream all along. Beside them a director sends long prompts in pairs: it
reads a few tokens of the first, and leaves the second by the plan `prefill`, which knows the times
to first token of those read. Cancel storm: many streams leave at one moment, wave after wave,
beside stayers.
"""

import logging
import random
import time
from collections.abc import Sequence
from itertools import count
from typing import Final

import gevent
from gevent.event import Event
from gevent.pool import Group

from harness.load.occupancy import NotCountedError, Occupancy
from harness.load.slot_recovery import Leaver, Train, TrainStoppedError
from harness.load.users import NOT_A_FAILURE, RETRY_PAUSE_S, Director
from harness.records import Delivery, RequestRow, Role, Way
from harness.workload.abandon import LeaveRule, PrefillPlan, RequestSpec, Storm, never
from harness.workload.load import (
    CancelStormLoad,
    ChunkFrontierLoad,
    OccupancyLoad,
    SlotRecoveryLoad,
)
from harness.workload.observed_latency import ObservedLatency

logger = logging.getLogger(__name__)

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


class SlotRecoveryDirector(Director):
    def run_load(self) -> None:
        session = self.session
        load = session.plan.load
        assert isinstance(load, SlotRecoveryLoad)
        assert load.slots is not None  # the server was asked before the load
        low, high = load.prompt_tokens
        train = Train(
            session,
            load.slots,
            _leaver(load),
            random.Random(f"{session.plan.run.seed}/train"),
            prompt_tokens=(low, high),
            answer_tokens=load.answer_tokens,
            probe_tokens=load.probe_tokens,
        )
        try:
            train.run(lambda train: _is_enough(train, load))
        except TrainStoppedError as error:
            logger.warning("the train of probes stopped: %s", error)
            if not train.recoveries_s:
                session.give_up(f"no stream left while a probe waited: {error}")


def _leaver(load: SlotRecoveryLoad) -> Leaver:
    match load.variant:
        case "decode":
            return Leaver(tokens=load.abandon_after_tokens)
        case "queue":
            return Leaver(where="queued")
        case "prefill":
            return Leaver(where="prefill", changes={"prompt_tokens": load.prefill_tokens})
        case "unary":
            return Leaver(tokens=load.abandon_after_tokens, changes={"delivery": Delivery.UNARY})


def _is_enough(train: Train, load: SlotRecoveryLoad) -> bool:
    if load.trials is not None and len(train.recoveries_s) >= load.trials:
        return True
    width_s = None if load.width_s is None else train.median_width_s()
    return width_s is not None and width_s <= (load.width_s or 0.0)


class OccupancyDirector(Director):
    def run_load(self) -> None:
        session = self.session
        load = session.plan.load
        assert isinstance(load, OccupancyLoad)
        assert load.slots is not None  # the server was asked before the load
        low, high = load.prompt_tokens
        occupancy = Occupancy(
            session,
            load.slots,
            random.Random(f"{session.plan.run.seed}/occupancy"),
            prompt_tokens=(low, high),
            most_tokens=load.answer_tokens,
        )
        try:
            occupancy.warm_up()
            if load.capacity_prompt_tokens is not None:
                occupancy.count_tokens(load.capacity_prompt_tokens, trial=0)
            for _ in range(load.rounds):
                occupancy.round()
            if load.capacity_prompt_tokens is not None:
                occupancy.end()
                occupancy.count_tokens(load.capacity_prompt_tokens, trial=1)
        except NotCountedError as error:
            session.give_up(str(error))
        finally:
            occupancy.stop()
