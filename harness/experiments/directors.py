"""Experiments as the load of a run: the train of probes, and the count of occupied slots.

Importing this module imports Locust, which monkey-patches the process.
"""

import logging
import random

from harness.experiments.outcome import CannotDecideError
from harness.experiments.rounds import Rounds
from harness.experiments.train import Leaver, Train
from harness.load.users import Director
from harness.records import Delivery
from harness.workload.load import OccupancyLoad, SlotRecoveryLoad

logger = logging.getLogger(__name__)


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
        except CannotDecideError as error:
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
        rounds = Rounds(
            session,
            load.slots,
            random.Random(f"{session.plan.run.seed}/occupancy"),
            prompt_tokens=(low, high),
            most_tokens=load.answer_tokens,
        )
        try:
            rounds.warm_up()
            if load.capacity_prompt_tokens is not None:
                rounds.tokens.count(load.capacity_prompt_tokens, 0, slots=rounds.slots)
            for _ in range(load.rounds):
                rounds.round()
            if load.capacity_prompt_tokens is not None:
                rounds.end()
                rounds.tokens.count(load.capacity_prompt_tokens, 1, slots=rounds.slots)
        except CannotDecideError as error:
            session.give_up(str(error))
        finally:
            rounds.stop()
