"""Experiments as the load of a run: the train of probes, and the count of occupied slots.

Importing this module imports Locust, which monkey-patches the process.
"""

import logging
import math
import random
from collections.abc import Sequence
from typing import Final

from harness.experiments.beat import LeavePlan
from harness.experiments.outcome import CannotDecideError
from harness.experiments.rounds import Rounds
from harness.experiments.train import ProbeTrain
from harness.locust.users import Director
from harness.records import Delivery
from harness.workload.load import OccupancyLoad, SlotRecoveryLoad

_Z95: Final = 1.96
logger = logging.getLogger(__name__)


class SlotRecoveryDirector(Director):
    def run_load(self) -> None:
        session = self.session
        load = session.plan.load
        assert isinstance(load, SlotRecoveryLoad)
        assert load.slots is not None  # the server was asked before the load
        low, high = load.prompt_tokens
        train = ProbeTrain(
            session,
            load.slots,
            _leave_plan(load),
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


def _leave_plan(load: SlotRecoveryLoad) -> LeavePlan:
    match load.variant:
        case "decode":
            return LeavePlan(tokens=load.abandon_after_tokens)
        case "queue":
            return LeavePlan(where="queued")
        case "prefill":
            return LeavePlan(where="prefill", changes={"prompt_tokens": load.prefill_tokens})
        case "unary":
            return LeavePlan(tokens=load.abandon_after_tokens, changes={"delivery": Delivery.UNARY})


def _is_enough(train: ProbeTrain, load: SlotRecoveryLoad) -> bool:
    if load.trials is not None and len(train.recoveries_s) >= load.trials:
        return True
    width_s = None if load.width_s is None else median_width_s(train.recoveries_s)
    return width_s is not None and width_s <= (load.width_s or 0.0)


def median_width_s(recoveries_s: Sequence[float]) -> float | None:
    """The width of the median's 95 % interval, by order statistics; None: too few."""
    times = sorted(recoveries_s)
    reach = math.ceil(_Z95 * math.sqrt(len(times)) / 2) + 1  # ranks on either side of the median
    low, high = len(times) // 2 - reach, len(times) // 2 + reach
    return times[high] - times[low] if low >= 0 and high < len(times) else None


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
