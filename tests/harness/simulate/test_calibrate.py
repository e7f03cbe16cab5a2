"""Calibration against runs whose machine is known."""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from harness.errors import ConfigError
from harness.simulate import calibrate as calibration
from harness.simulate import measured_lags
from harness.simulate.machine import LIVE_SIMULATED, SimulatedMachine, load_machine
from harness.simulate.measured_steps import MeasuredSteps
from harness.store.frames import RunFrames
from harness.store.manifest import TargetFacts
from tests.made_up.rows import at
from tests.made_up.run import RunBuilder, save_judged

COST_MS = {"fixed": 5.0, "prefill": 0.02, "decode": 0.1, "context": 0.001}
SEND, SIGNAL, DETECT, DELIVER = 2.0, 0.5, 1.5, 3.0  # at most, in ms: each is uniform from 0
STEP = 0.4  # at most, beyond the cost
GROWTH = 0.2  # of the delivery, with each token of the step


class PlantedRun:
    """Requests of users that ask one after the other; the engine computes chunks of 64 tokens."""

    def __init__(self, folder: Path, *, steps: int, seed: int = 1) -> None:
        self.run = RunBuilder(folder)
        self.draw = random.Random(seed)
        self.live: list[dict[str, int]] = []
        self.tokens: dict[int, list[tuple[float, int]]] = {}  # when made, tokens of that step
        self.asked = 0
        self.now = 0.0
        for _ in range(steps):
            self._let_in()
            self._step()
        assert self.run.manifest.window is not None
        self.run.manifest.window.load_ended_ns = 10**15
        self.run.manifest.window.settled_ns = 10**15

    def _let_in(self) -> None:
        while len(self.live) < 2 + self.asked % 7:
            self.asked += 1
            prompt, answer = self.draw.randint(10, 400), self.draw.randint(1, 40)
            one = {"name": self.asked, "prompt": prompt, "answer": answer, "done": 0, "said": 0}
            self.live.append(one)
            self.tokens[self.asked] = []

    def _step(self) -> None:
        start, cost = self.now, COST_MS["fixed"]
        scheduled, sampled = {}, []
        for one in self.live:
            owed = one["prompt"] + one["said"] - one["done"]
            num = min(64, owed)
            cost += COST_MS["decode"] if owed == 1 else COST_MS["prefill"] * num
            cost += COST_MS["context"] * one["done"]
            one["done"] += num
            scheduled[f"r{one['name']}"] = num
            if num == owed:
                one["said"] += 1
                sampled.append(f"r{one['name']}")
        self.now += cost + self.draw.uniform(0, STEP)
        self.run.step(start, start + cost, sampled=tuple(sampled), **scheduled)
        for one in list(self.live):
            if f"r{one['name']}" in sampled:
                self.tokens[one["name"]].append((start + cost, len(sampled)))
            if one["said"] == one["answer"]:
                self.live.remove(one)
                self._end(one)

    def _end(self, one: dict[str, int]) -> None:
        """Every request is left when its last token is read: its user can still be heard."""
        name, made = f"r{one['name']}", self.tokens[one["name"]]
        first = made[0][0]
        sent = first - 100
        arrived = sent + self.draw.uniform(0, SEND)
        read = [at + self.draw.uniform(0, DELIVER) * (1 + GROWTH * num) for at, num in made]
        left = max(read)
        seen = left + self.draw.uniform(0, DETECT)
        heard = seen + self.draw.uniform(0, SIGNAL)
        more = {"prompt_tokens": one["prompt"], "way": "fin"}
        self.run.request(
            name, sent=sent, tokens=sorted(read), outcome="abandoned", end=left, **more
        )
        self.run.events(name, generated=len(made), arrived=arrived, first_token=first)
        self.run.events(name, disconnected=seen, abort_received=heard, removed=heard + 1)
        self.run.events(name, blocks_freed=heard + 1, finished=heard + 1)

    def frames(self) -> RunFrames:
        return self.run.frames()


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> SimulatedMachine:
    frames = PlantedRun(tmp_path_factory.mktemp("planted"), steps=1500).frames()
    return calibration.calibrate({"planted": frames}, name="desk")


def test_the_terms_of_a_step_are_found(measured: SimulatedMachine) -> None:
    cost, lags = measured.cost, measured.lags
    assert lags is not None
    assert cost.prefill_token_s == pytest.approx(COST_MS["prefill"] / 1e3, rel=0.05)
    assert cost.decode_token_s == pytest.approx(COST_MS["decode"] / 1e3, rel=0.1)
    assert cost.context_token_s == pytest.approx(COST_MS["context"] / 1e3, rel=0.1)
    whole = cost.fixed_s + np.mean(lags.step_s) + np.mean(lags.between_s)
    assert whole == pytest.approx((COST_MS["fixed"] + STEP / 2) / 1e3, rel=0.03)
    error = measured.error
    assert error is not None
    assert error.n > 1400
    assert error.mape < 0.03
    assert abs(error.bias) < 0.01


def test_the_lags_are_found(measured: SimulatedMachine) -> None:
    lags = measured.lags
    assert lags is not None
    half = {"signal_s": SIGNAL, "deliver_s": DELIVER, "send_s": SEND + SIGNAL}
    for name, most in half.items():
        assert np.median(getattr(lags, name)) == pytest.approx(most / 2e3, rel=0.15)
    assert lags.detect_s["fin"][-1] == pytest.approx(DETECT / 1e3, rel=0.05)
    assert lags.growth.deliver_token == pytest.approx(GROWTH, rel=0.2)


def loads_and_lags(*, a: float, running: float, prompt: float, at: float = 0.0) -> np.ndarray:
    draw = np.random.default_rng(1)
    num, tokens = draw.integers(4, 33, 4000), draw.integers(0, 500, 4000)
    num = num if not at else np.full(4000, at)
    lag_s = (a + running * num + prompt * tokens) * draw.uniform(0.5, 1.5, 4000)
    lag_s[::500] = 1.0  # a machine that stood still
    return np.stack([num, tokens, lag_s])


def test_the_growth_of_a_lag_is_found() -> None:
    found = loads_and_lags(a=1e-3, running=1e-4, prompt=1e-6)
    lags_s, growth = measured_lags._without_growth([found])
    assert growth == pytest.approx([0.1, 0.001], rel=0.15)
    assert np.median(lags_s) == pytest.approx(1e-3, rel=0.1)


def test_a_lag_grows_within_reason() -> None:
    """Neither without a load that varied, nor from nothing."""
    _, growth = measured_lags._without_growth([loads_and_lags(a=1e-3, running=0, prompt=0, at=8)])
    assert growth == [0, pytest.approx(0, abs=1e-4)]
    lags_s, growth = measured_lags._without_growth([loads_and_lags(a=0, running=1e-4, prompt=0)])
    assert 0.1 < growth[0] < 1
    assert np.median(lags_s) > 1e-4


def test_runs_of_one_name_are_two_runs(tmp_path: Path) -> None:
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        save_judged(tmp_path / place / "run")
    runs = calibration.read_runs([tmp_path / "a" / "run", tmp_path / "b" / "run"])
    assert list(runs) == [str(tmp_path / "a" / "run"), str(tmp_path / "b" / "run")]


def test_a_user_that_asks_for_its_cancel_rests_when_the_answer_has_ended(tmp_path: Path) -> None:
    """It reads on after leaving; the frontend gets a cancel request and sees no disconnect."""
    run = RunBuilder(tmp_path)
    for number in range(measured_lags.FEWEST_LAGS):
        name, sent = f"r{number}", number * 100.0
        run.request(
            name,
            sent=sent,
            tokens=[sent + 20],
            outcome="abandoned",
            end=sent + 30,
            way="cancel",
            server_ended_ns=at(sent + 92),
        )
        run.step(sent + 5, sent + 20, sampled=(name,), **{name: 8})
        run.events(name, generated=1, arrived=sent + 1, admitted=sent + 7, first_token=sent + 20)
        run.events(name, abort_sent=sent + 34, abort_received=sent + 36, removed=sent + 40)
        run.events(name, blocks_freed=sent + 40, finished=sent + 40)
    steps = MeasuredSteps(np.ones((2, 4)), *[np.ones(2)] * 4)
    lags = measured_lags.lags_of([run.frames()], steps, np.zeros(2))
    for known, ms in ((lags.detect_s["cancel"], 4), (lags.rest_s, 8), (lags.signal_s, 2)):
        assert (known[0], known[-1]) == pytest.approx((ms / 1e3, ms / 1e3))


def test_the_file_reads_back_as_the_machine(measured: SimulatedMachine, tmp_path: Path) -> None:
    path = tmp_path / "desk.toml"
    path.write_text(calibration.as_toml(measured))
    again = load_machine(str(path))
    assert again.lags == measured.lags
    assert again.cost.step_s(prefill=9, decode=9, context=9) == pytest.approx(
        measured.cost.step_s(prefill=9, decode=9, context=9), rel=1e-5
    )
    assert again.range.running == [2, 8]
    assert "planted" in again.sources[0]


def test_stated_costs_are_left_out(tmp_path: Path) -> None:
    """The runner that sleeps for a stated time is measured beyond it."""
    planted = PlantedRun(tmp_path, steps=600)
    assert planted.run.manifest.target is not None
    stated = {f"{name}_s": value / 1e3 for name, value in COST_MS.items() if name == "fixed"}
    stated |= {f"{n}_token_s": v / 1e3 for n, v in COST_MS.items() if n != "fixed"}
    planted.run.manifest.target.config = {"runner": "simulated", "step_cost": stated}
    machine = calibration.calibrate({"planted": planted.frames()}, name="desk")
    assert machine.adds_to_stated
    assert machine.lags is not None
    beyond_s = machine.cost.step_s(prefill=50, decode=4, context=800) + np.mean(
        machine.lags.between_s
    )
    assert beyond_s == pytest.approx(STEP / 2e3, rel=0.1)


MIXED = [
    ("engine", lambda target: setattr(target, "engine", "vllm")),
    ("runner", lambda target: setattr(target, "config", {"runner": "simulated"})),
    ("model", lambda target: setattr(target, "model", "other-70b")),
]


@pytest.mark.parametrize(("what", "change"), MIXED, ids=[what for what, _ in MIXED])
def test_a_mix_of_machines_is_refused(
    tmp_path: Path, what: str, change: Callable[[TargetFacts], None]
) -> None:
    runs = {}
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        planted = PlantedRun(tmp_path / name, steps=210)
        assert planted.run.manifest.target is not None
        planted.run.manifest.target.config = {"runner": "torch"}
        if name == "second":
            change(planted.run.manifest.target)
        runs[name] = planted.frames()
    with pytest.raises(ConfigError, match=f"first has {what} .*, and second .*: one machine"):
        calibration.calibrate(runs, name="desk")


def test_what_was_not_measured_is_said_to_be_assumed(measured: SimulatedMachine) -> None:
    assert measured.cost.swap_block_s == 0
    assert any("blocks are copied" in one for one in measured.assumptions)
    shipped = load_machine(LIVE_SIMULATED).assumptions
    assert shipped == measured.assumptions[-2:]


def test_the_last_quantile_keeps_the_mean() -> None:
    values = np.append(np.linspace(0, 1, 999), 30.0)
    found = np.array(measured_lags.quantiles(values))
    assert found[-1] < 30
    assert np.mean((found[1:] + found[:-1]) / 2) == pytest.approx(values.mean(), rel=0.002)


def test_too_few_steps_are_refused(tmp_path: Path) -> None:
    frames = PlantedRun(tmp_path, steps=50).frames()
    with pytest.raises(ConfigError, match=r"too few to calibrate: 200 are needed"):
        calibration.calibrate({"planted": frames}, name="desk")


def test_another_engine_is_refused(tmp_path: Path) -> None:
    planted = PlantedRun(tmp_path, steps=50)
    planted.run.another_engine()
    planted.run.step_log.clear()
    planted.run.lifecycle.clear()
    with pytest.raises(ConfigError, match="gave no step log"):
        calibration.calibrate({"planted": planted.frames()}, name="desk")
