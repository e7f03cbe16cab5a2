"""The plan of a simulation: the requests of a live run, and each replica's share of them."""

from collections import Counter
from pathlib import Path

import pytest

from harness.errors import ConfigError
from harness.run.run_config import RunConfig, resolve_run
from harness.simulate import cells
from harness.simulate.planner import Planner
from harness.simulate.simulation import plan_of, prepare, resolve_simulation
from harness.workload.observed_latency import ObservedLatency
from reference_engine.simulate import plan as engine_plan

OPEN = ["engine.sim_fixed_ms=10"]
NO_MODEL = ["engine.runner=simulated"]


def planner(name: str, *settings: str) -> Planner:
    resolved = resolve_run(RunConfig(workload=name, settings=list(settings)), simulates=True)
    return prepare(resolved.workload, resolved).planner


def test_an_open_loop_is_planned_as_it_is_drawn_live() -> None:
    planned = list(planner("open_loop").rows())
    resolved = resolve_run(RunConfig(workload="open_loop"))
    load, seed = resolved.workload.load, resolved.workload.run.seed
    assert load.kind == "abandon"
    for row in planned[:50]:
        spec = load.draw_request(seed=seed, user=row["number"], seen=ObservedLatency())
        live = (spec.prompt_tokens, spec.max_tokens, spec.planned_abandon, spec.think_fraction)
        keys = ("prompt_tokens", "max_tokens", "leave_after_tokens", "think_fraction")
        assert tuple(row[key] for key in keys) == live
        assert row["way"] == (spec.way or "")
    offsets = [row["offset_s"] for row in planned]
    assert offsets == sorted(offsets)
    assert 250 < len(planned) < 350  # 30 s of 10 a second


def test_replicas_that_are_not_simulated_lose_their_share() -> None:
    share = ["simulate.replicas=10", "simulate.simulated=3", "arrivals.rate=100"]
    for router in ("random", "round_robin"):
        some = planner("open_loop", *share, f"simulate.router={router}")
        by_cell = Counter(row["cell"] for row in some.rows())
        assert sorted(by_cell) == [0, 1, 2]
        assert all(abs(n - 300) < 60 for n in by_cell.values())
        if router == "round_robin":
            assert all(row["number"] % 10 == row["cell"] for row in some.rows())
    at_once = planner("open_loop", *share, "simulate.router=least_loaded")
    assert at_once.num_cells == 1
    assert abs(sum(1 for _ in at_once.rows()) - 900) < 100


def test_all_of_several_replicas_get_all_arrivals() -> None:
    alone = [row["offset_s"] for row in planner("open_loop").rows()]
    shared = planner("open_loop", "simulate.replicas=4")
    assert [row["offset_s"] for row in shared.rows()] == alone
    assert shared.num_cells == 4


def test_an_end_after_so_many_abandons_ties_replicas_together() -> None:
    of_all = [*OPEN, "simulate.replicas=4", "load.stop_after_abandons=21"]
    resolved = resolve_simulation(RunConfig(workload="open_loop", settings=of_all))
    plan = plan_of(prepare(resolved.workload, resolved))
    assert [cell["simulated"] for cell in plan["cells"]] == [4]
    assert plan["stop_after_abandons"] == 21


def test_a_user_of_a_closed_loop_has_requests_for_the_whole_load() -> None:
    closed = planner("regenerate", "arms=[]", "run.rounds=1", "engine.runner=simulated")
    longest = closed.workload.run.max_seconds
    step_s = closed.machine.cost.fixed_s
    by_user: Counter[int] = Counter()
    for row in closed.rows():
        tokens = row["leave_after_tokens"]
        by_user[row["user"]] += max(1, row["max_tokens"] if tokens is None else tokens)
    assert len(by_user) == closed.workload.run.users
    assert all(tokens * step_s >= longest * 0.5 for tokens in by_user.values())


def test_users_whose_requests_may_fail_or_time_out_have_more_of_them() -> None:
    def most_rows(*settings: str) -> int:
        closed = planner("regenerate", "arms=[]", "run.rounds=1", *NO_MODEL, *settings)
        return max(Counter(row["user"] for row in closed.rows()).values())

    long = ["load.answer_tokens=4000", "load.stay_tokens=4000", "load.stay_share=1"]
    assert most_rows(*long, "run.max_seconds=30") < 5
    dies = "simulate.outages=[{at_s=1, kind='die', share=1}]"
    assert most_rows(*long, "run.max_seconds=30", dies) >= 60  # each fails, and waits for 0.5 s
    assert most_rows(*long, "run.max_seconds=30", "run.first_token_timeout_s=1") >= 20


def test_a_share_of_the_time_to_first_token_stays_open() -> None:
    rows = list(planner("prefill_abandon", "engine.runner=simulated").rows())
    leavers = [row for row in rows if row["plan"].startswith("prefill:")]
    assert leavers
    assert all(0 < row["ttft_share"] < 1 and row["stay_tokens"] for row in leavers)


def test_known_texts_are_planned_with_what_ends_them() -> None:
    resolved = resolve_simulation(
        RunConfig(workload="early_stopping", settings=["arms=[]", "run.rounds=1"])
    )
    prepared = prepare(resolved.workload, resolved)
    texts, rows = plan_of(prepared)["texts"], list(prepared.planner.rows())
    assert len(texts) == 5 * 20
    assert {row["text"] for row in rows} == set(range(100))
    for row in rows[:50]:
        text, task = texts[row["text"]], row["plan"].split(":")[1]
        assert len(text["prompt"]) == row["prompt_tokens"]
        assert (text["stop"] == ["```"]) is (task == "code")
        assert (row["way"] == "fin") is (task == "chat")
        stops_itself = task in ("summarization", "classification", "extraction")
        assert (text["early_stop"] is not None) is stops_itself


def test_both_sides_of_the_wall_have_one_format(tmp_path: Path) -> None:
    assert cells.PLANNED_SCHEMA == engine_plan.PLANNED_SCHEMA
    assert cells.PLANNED == engine_plan.PLANNED
    assert cells.SIMULATION == engine_plan.SIMULATION
    resolved = resolve_simulation(RunConfig(workload="retry_outage"))
    prepared = prepare(resolved.workload, resolved)
    cells.write_planned(tmp_path / cells.PLANNED, prepared.planner.rows())
    cells.write_plan(tmp_path, plan_of(prepared))
    plan = engine_plan.read_simulation(tmp_path)
    engine_plan.engine_settings(plan, {})
    assert [cell.replicas for cell in plan.cells] == [10]
    assert plan.outages[0].kind == "die"
    planned = list(engine_plan.planned_rows(tmp_path, 0))
    assert [one.number for one in planned] == [row["number"] for row in prepared.planner.rows()]


def test_cells_have_row_groups_of_their_own(tmp_path: Path) -> None:
    apart = planner("open_loop", "simulate.replicas=3")
    file = tmp_path / cells.PLANNED
    written = cells.write_planned(file, apart.rows())
    found = [list(engine_plan.planned_rows(tmp_path, number)) for number in range(3)]
    assert sum(map(len, found)) == written
    assert not file.with_name(f"{file.name}.part").exists()


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("demo", [], "`engine.runner` is `auto`"),
        ("slot_recovery", ["engine.runner=simulated"], "kind `slot_recovery`"),
        ("tiers", ["engine.runner=simulated"], "`engine.workers`"),
        ("open_loop", ["load.mix=[{plan='queued', way='vanish'}]", "load.abandon_after_tokens=[]"],
         "way `vanish`"),
        ("open_loop",
         ["load.mix=[{plan='tokens', tokens=[4], n=2}]", "load.abandon_after_tokens=[]"],
         "plan `tokens`: `n` is 2, and a simulated request has one answer"),
        ("open_loop", ["simulate.machine=h300"], "unknown machine `h300`"),
        ("open_loop", ["engine.sim_fixed_ms=0"], "a step without any length"),
        ("open_loop", ["simulate.simulated=2"], "there are only 1 `replicas`"),
        ("open_loop", ["simulate.router=fastest"], "must be one of"),
        ("retry_outage", ["simulate.outages=[{at_s=1, kind='drain', share=1, rolling=true}]"],
         "needs `back_after_s`"),
    ],
)  # fmt: skip
def test_what_cannot_be_simulated_is_refused(name: str, settings: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve_simulation(RunConfig(workload=name, settings=settings))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_live_run_refuses_a_cluster() -> None:
    with pytest.raises(ConfigError, match=r"take walkaway simulate cluster"):
        resolve_run(RunConfig(workload="cluster"))
