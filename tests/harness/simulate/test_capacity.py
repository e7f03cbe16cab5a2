"""The search for the highest rate, against replicas whose highest rate is known."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from dashboards.capacity import write_capacity
from harness.commands.capacity import _print
from harness.commands.simulate import simulate
from harness.errors import ConfigError, InterruptedRunError
from harness.gate.limits import parse_limits
from harness.records import Metric, Remark, Summary
from harness.run.process import Interruption
from harness.run.progress import Pace, Progress
from harness.run.run_config import RunConfig
from harness.simulate import capacity as search
from harness.simulate.machine import load_machine
from harness.simulate.simulation import Shown
from harness.store.capacity_result import CapacityResult, Estimate, Need, read_capacity
from harness.workload.workload import as_plain_data, load_workload
from tools.truth.source_claims import claims

GOAL = parse_limits(["ttft_s.p99 <= 1"], source="test", arms=[])


def _summary(ttft_p99: float | None, **more: Any) -> Summary:
    seconds = Metric(unit="s", n=100, p99=ttft_p99, method="client")
    wasted = Metric(unit="tokens", n=15, mean=800.0, method="exact")
    known: dict[str, Any] = {
        "run_id": "made-up",
        "status": "complete",
        "workload": "made-up",
        "engine": "reference",
        "model": "none",
        "outcomes": {"abandoned": 15},
        "metrics": {"ttft_s": seconds, "wasted_tokens": wasted},
        "validity": [],
    }
    return Summary(**(known | more))


def test_the_number_of_processes_changes_no_rate() -> None:
    """Each treatment and seed has a highest rate of its own."""
    honoured, late, ignored = search.treatments(5.0)
    most = {honoured: 10.0, late: 9.0, ignored: 8.0}

    def attempt(treatment: search.Treatment, seed: int, rate: float) -> search.Seen:
        return Replica(most[treatment], seed)(rate)

    def rates(processes: int) -> list[list[float]]:
        found = search.highest_rates(attempt, dict.fromkeys(most, 12.0), [1, 2, 3], processes)
        return [[rate for rate, _ in each] for each in found.values()]

    assert rates(1) == rates(4)
    for each, top in zip(rates(1), most.values(), strict=True):
        for rate, seed in zip(each, (1, 2, 3), strict=True):
            own = Replica(top, seed).most
            assert own / (1 + search.PRECISION) <= rate <= own


def test_what_is_left_follows_from_the_parts_that_have_ended() -> None:
    now_s = 100.0
    pace = Pace("part", clock_s=lambda: now_s)
    pace.num = 4
    assert str(pace) == "part 1 of 4"
    now_s += 30
    pace.step()
    assert str(pace) == "part 2 of 4, about 90 s left"
    now_s += 10
    assert str(pace) == "part 2 of 4, about 80 s left"
    now_s += 100  # this part takes longer than the first
    assert str(pace) == "part 2 of 4, about 60 s left"


def test_the_simulators_own_rate_is_said_to_be_that() -> None:
    class Heard(Progress):
        text = ""

        def pace(self, text: str) -> None:
            self.text = text

    heard = Heard()
    seen = {"virtual_s": 20, "of_s": 80, "elapsed_s": 6, "requests": 1234, "tokens_per_s": 98765}
    Shown(heard).show([json.dumps(seen), '{"virtual_s": 30, "of'])
    assert heard.text == ""
    Shown(heard).show([json.dumps(seen)])
    assert heard.text == (
        "20 s of 80 s simulated, about 18 s left: 1,234 requests; the simulator's own rate, "
        "no server's: 98,765 tokens a second"
    )


@pytest.mark.parametrize("width", [40, 80])
def test_the_needs_fit_a_terminal(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without money and GPUs their columns are left out, and others where it is narrow."""
    monkeypatch.setenv("COLUMNS", str(width))
    needs = [
        Need(
            name=name,
            faults=[],
            rates=[rate],
            rate=Estimate(value=rate),
            replicas=Estimate(value=10 / rate, ci95=(9 / rate, 11 / rate)),
            more=Estimate(value=2.5, ci95=(1.25, 3.75)),
        )
        for name, rate in (("honoured", 5.0), ("ignored", 2.0))
    ]
    result = CapacityResult(
        walkaway="1",
        created_at="now",
        command="",
        workload="w",
        question="?",
        machine={"title": "A machine"},
        rate=10.0,
        goal=["ttft_s.p99 <= 1"],
        late_s=5.0,
        price_hour=None,
        needs=needs,
    )
    _print(result, Path("folder"))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    (head,) = (line for line in lines if line.startswith("cancellation"))
    assert "replicas (95 %)" in head
    assert "GPUs" not in head
    assert ("more (95 %)" in head) == (width == 80)


@pytest.mark.parametrize("flag", ["ray", "replicas", "simulated", "router", "shows_all"])
def test_a_flag_that_would_change_nothing_is_refused(flag: str) -> None:
    value: Any = {"ray": "auto", "router": "random", "shows_all": True}.get(flag, 2)
    name = "--all" if flag == "shows_all" else f"--{flag}"
    with pytest.raises(ConfigError, match=f"^{name}: is not for walkaway simulate capacity"):
        simulate(workload="capacity", of_capacity="cluster", **{flag: value})


class StopsAt(Progress):
    """Ctrl-C when rate number `number` is tried."""

    def __init__(self, number: int, interruption: Interruption) -> None:
        self.left, self.interruption = number, interruption

    def phase(self, text: str) -> None:
        self.left -= text.endswith("requests/s")
        self.interruption.requested |= not self.left


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("number", "said"), [(1, "before one rate"), (2, "after 1 simulated rates, too few to know")]
)
def test_an_interruption_says_what_is_there(tmp_path: Path, number: int, said: str) -> None:
    interruption = Interruption()
    config = RunConfig(workload="open_loop", settings=["arrivals.seconds=5", "run.max_seconds=5"])
    attempts = search.CapacitySearch(
        config=config,
        goal=GOAL,
        folder=tmp_path,
        progress=StopsAt(number, interruption),
        interruption=interruption,
    )
    with pytest.raises(InterruptedRunError, match=said):
        search.capacity(config, search.Question(seeds=1), attempts)
    assert len(attempts.done) == number - 1


def test_an_extrapolation_is_said_once_for_each_quantity() -> None:
    said = [
        "extrapolated: running 1 to 300, where the cost model covers 1 to 256",
        "extrapolated: context_tokens 1 to 9, where the cost model covers 1 to 2",
        "something else",
    ]
    runs = [
        search.Seen(
            True,
            _summary(0.5, validity=[Remark(level="warning", text=one) for one in said]),
            Path("made-up"),
        )
        for _ in range(2)
    ]
    assert sorted(search._extrapolated(runs)) == sorted(said[:2])


class Replica:
    """Takes `most` requests a second, by a seed up to a tenth more; `tried`: the rates it saw."""

    def __init__(self, most: float, seed: int = 0) -> None:
        self.most = most * (1 + random.Random(seed).random() / 10)
        self.tried: list[float] = []

    def __call__(self, rate: float) -> search.Seen:
        self.tried.append(rate)
        summary = _summary(0.5 if rate <= self.most else 3.0)
        return search.Seen(search.holds(summary, GOAL), summary, Path("made-up"))


@pytest.mark.parametrize("guess", [0.3, 9.0, 11.0, 12.0, 40.0])
def test_the_highest_rate_is_found_from_any_guess(guess: float) -> None:
    replica = Replica(10.0)
    rate, seen = search.highest_rate(replica, guess)
    assert replica.most / (1 + search.PRECISION) <= rate <= replica.most
    assert seen.holds
    assert len(replica.tried) < 20


def test_a_goal_that_nothing_holds_or_breaks_is_refused() -> None:
    with pytest.raises(ConfigError, match="no rate holds the goal"):
        search.highest_rate(Replica(1e-9), 10.0)
    with pytest.raises(ConfigError, match="the goal is no limit"):
        search.highest_rate(Replica(1e9), 10.0)


def test_a_replica_that_falls_behind_does_not_hold() -> None:
    assert search.holds(_summary(0.5), GOAL)
    assert not search.holds(_summary(None), GOAL)
    assert not search.holds(_summary(0.5, arrivals={"planned": 10, "sent": 9}), GOAL)


def test_the_interval_covers_the_rate_and_is_no_narrower_than_the_search() -> None:
    spread = search.estimate([9.0, 10.0, 11.0])
    assert spread.ci95 is not None
    assert spread.ci95[0] < 9.5 < 10.5 < spread.ci95[1]
    alike = search.estimate([10.0, 10.0])
    assert alike.ci95 is not None
    assert alike.ci95[1] / alike.ci95[0] == pytest.approx(1 + search.PRECISION, rel=0.001)
    assert search.estimate([10.0]).ci95 is None


def _needs() -> list[Need]:
    machine = load_machine("h100-70b-published")
    return [
        search.need_of(
            treatment,
            [search.highest_rate(Replica(most, seed), most) for seed in range(3)],
            10_000,
            2.0,
            machine,
        )
        for treatment, most in zip(search.treatments(5.0), (10.0, 9.5, 8.5), strict=True)
    ]


def test_the_need_is_the_load_over_the_rate_in_gpus_and_money() -> None:
    honoured, _, ignored = _needs()
    assert honoured.replicas.value == pytest.approx(10_000 / honoured.rate.value)
    assert honoured.gpus is not None
    assert honoured.gpus.value == pytest.approx(4 * honoured.replicas.value)
    assert honoured.money_a_month is not None
    assert honoured.money_a_month.value == pytest.approx(honoured.gpus.value * 2 * 730)
    assert ignored.faults == ["ignore-disconnect"]
    assert ignored.replicas.value > honoured.replicas.value


def test_what_is_needed_more_is_compared_seed_by_seed() -> None:
    honoured, _, ignored = _needs()
    more = search.more_than(honoured, ignored)
    assert more.value == pytest.approx(10.0 / 8.5 - 1, abs=0.03)
    assert more.ci95 is not None
    assert honoured.replicas.ci95 is not None
    width = honoured.replicas.ci95[1] / honoured.replicas.ci95[0] - 1
    assert more.ci95[1] - more.ci95[0] < width  # the seeds' own spread is in both


def _result() -> CapacityResult:
    workload, machine = load_workload("cluster"), load_machine("h100-70b-published")
    return CapacityResult(
        walkaway="0",
        created_at="2026-01-01T00:00:00+00:00",
        command="walkaway simulate capacity cluster",
        workload=workload.name,
        question=workload.question,
        machine=machine.model_dump(exclude={"lags"}),
        rate=10_000,
        goal=["ttft_s.p99 <= 1"],
        late_s=5.0,
        price_hour=2.0,
        needs=_needs(),
        assumptions=["a month has 730 hours"],
        remarks=["a remark"],
    )


def test_the_sources_claims_are_compared_with_what_was_found() -> None:
    workload = as_plain_data(load_workload("cluster"))
    workload["engine"] |= {"max_num_seqs": 256, "num_blocks": 28_017}
    found = {what: one for what, _, one in claims(_result(), workload)}
    saved = float(found["GPUs saved"].replace(",", ""))
    assert 400 < saved < 1000  # neither 24,000 nor 6.7
    assert found["throughput lost"].endswith("%")


def test_the_page_shows_needs_and_cost_model(tmp_path: Path) -> None:
    result = _result()
    result.write(tmp_path)
    assert read_capacity(tmp_path) == result
    write_capacity(tmp_path, tmp_path / "index.html")
    page = (tmp_path / "index.html").read_text()
    for text in (
        "simulated (cost model h100-70b-published)",
        '<span class="kind">assumed</span> a month has 730 hours',
        '<span class="kind">remark</span> a remark',
        "5 s late",
    ):
        assert text in page


def test_the_goal_is_the_workloads_or_assumed() -> None:
    limits, assumed = search.goal_of(load_workload("cluster"))
    assert [one.text for one in limits] == ["ttft_s.p99 <= 1"]
    assert assumed is None
    _, assumed = search.goal_of(load_workload("open_loop"))
    assert assumed is not None


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_ignored_cancels_need_more_replicas(tmp_path: Path) -> None:
    """Half of the users leave after 10 of 100 tokens. Ignored, each holds its slot to the end, so
    a request takes 100 tokens instead of 55 on average: nearly twice the replicas."""
    settings = (
        *("arrivals.seconds=100", "run.max_seconds=100", "load.stay_share=0.5", "settle.seconds=2"),
        *("load.abandon_after_tokens=[10]", "load.answer_tokens=100", "load.stay_tokens=100"),
        *("engine.max_num_seqs=8", "engine.num_blocks=4096", "engine.sim_fixed_ms=20"),
        *("load.prompt_tokens=[16, 32]", 'gate.limits=["ttft_s.p99 <= 1"]'),
    )
    config = RunConfig(workload="open_loop", settings=list(settings), out=tmp_path)
    with Interruption() as interruption:
        result = search.capacity(
            config,
            search.Question(rate=100, late_s=0.5, seeds=1),
            search.CapacitySearch(
                config=config,
                goal=GOAL,
                folder=tmp_path,
                progress=Progress(),
                interruption=interruption,
                processes=2,
            ),
        )
    honoured, late, ignored = (need.replicas.value for need in result.needs)
    assert honoured < late < ignored
    assert 1.4 < ignored / honoured < 2.2
    wasted = [need.figures["wasted_tokens"] for need in result.needs]
    assert wasted[0] < 3
    assert wasted[2] == pytest.approx(90, abs=1)
    assert result.needs[0].figures["gpu_seconds_sum"] < result.needs[2].figures["gpu_seconds_sum"]
