"""What users of a simulation ask for: the requests of a live run, and each replica's share."""

from collections.abc import Iterator

import pytest

from harness.errors import ConfigError
from harness.records import Outcome
from harness.run.run_config import RunConfig, resolve_run
from harness.simulate.asking import Asking, SimulatedRequest
from harness.simulate.frontend import known_answer
from harness.simulate.plan import Plan, read_plan
from harness.simulate.simulation import prepare, resolve_simulation
from harness.workload.observed_latency import ObservedLatency
from harness.workload.schedule import Arrival
from reference_engine.model.tokenizer import FIRST_WORD
from tests.made_up.rows import request_row


def plan_of(name: str, *settings: str) -> Plan:
    resolved = resolve_run(RunConfig(workload=name, settings=list(settings)), simulates=True)
    return prepare(resolved.workload, resolved)


def arrivals(plan: Plan, cell: int = 0) -> list[Arrival]:
    assert plan.arrivals is not None
    return list(Asking(plan, cell).arrivals(plan.arrivals))


def asked(plan: Plan) -> Iterator[SimulatedRequest]:
    asking, seen = Asking(plan, 0), ObservedLatency()
    return (asking.on_arrival(one, seen=seen) for one in arrivals(plan))


def test_an_open_loop_asks_as_it_does_live() -> None:
    plan = plan_of("open_loop")
    resolved = resolve_run(RunConfig(workload="open_loop"))
    load, seed = resolved.workload.load, resolved.workload.run.seed
    assert load.kind == "abandon"
    own = list(asked(plan))
    for one in own[:50]:
        live = load.draw_request(seed=seed, user=one.number, seen=ObservedLatency())
        assert one.spec == live
    offsets = [one.offset_s for one in arrivals(plan)]
    assert offsets == sorted(offsets)
    assert 250 < len(offsets) < 350  # 30 s of 10 a second


def test_replicas_that_are_not_simulated_lose_their_share() -> None:
    share = ["simulate.replicas=10", "simulate.simulated=3", "arrivals.rate=100"]
    for router in ("random", "round_robin"):
        some = plan_of("open_loop", *share, f"simulate.router={router}")
        by_cell = [arrivals(some, cell) for cell in range(3)]
        assert some.num_cells == 3
        assert all(abs(len(own) - 300) < 60 for own in by_cell)
        if router == "round_robin":
            turns = [{one.number % 10 for one in own} for own in by_cell]
            assert turns == [{0}, {1}, {2}]
    at_once = plan_of("open_loop", *share, "simulate.router=least_loaded")
    assert at_once.num_cells == 1
    assert abs(len(arrivals(at_once)) - 900) < 100


def test_all_of_several_replicas_get_all_arrivals() -> None:
    alone = arrivals(plan_of("open_loop"))
    shared = plan_of("open_loop", "simulate.replicas=4")
    assert shared.num_cells == 4
    in_all = [one for cell in range(4) for one in arrivals(shared, cell)]
    assert sorted(in_all, key=lambda one: one.number) == alone


def test_an_end_after_so_many_abandons_ties_replicas_together() -> None:
    plan = plan_of("open_loop", "simulate.replicas=4", "load.stop_after_abandons=21")
    assert (plan.num_cells, plan.replicas_of_cell) == (1, 4)
    assert plan.stop_after_abandons == 21


def test_a_turn_begins_with_the_tokens_of_the_turn_before_and_of_its_answer() -> None:
    asking, seen = Asking(plan_of("agent_stop", "arms=[]", "run.rounds=1"), 0), ObservedLatency()
    first, other = (asking.of_user(user, 0, number=user, seen=seen) for user in (0, 1))
    words = 5 if first.spec.planned_abandon is None else first.spec.planned_abandon
    times = list(range(words))
    row = request_row(
        "r", sent_ns=0, ended_ns=9, outcome=Outcome.ABANDONED, token_times_ns=times, user=0
    )
    asking.session_of(0).over(row)
    second = asking.of_user(0, 1, number=2, seen=seen)
    said = [*first.prompt(), *[FIRST_WORD] * words]
    assert second.prompt()[: len(said)] == said
    assert len(second.prompt()) == second.spec.prompt_tokens > len(said)
    shared = 1000  # system prompt and tools, of every session
    assert first.prompt()[:shared] == other.prompt()[:shared]
    assert first.prompt()[shared] != other.prompt()[shared]


def test_a_share_of_the_users_is_simulated() -> None:
    closed = plan_of(
        *("regenerate", "arms=[]", "run.rounds=1", "engine.runner=simulated", "run.users=40"),
        *("simulate.replicas=4", "simulate.simulated=1", "simulate.router=least_loaded"),
    )
    assert len(Asking(closed, 0).users()) == 10


def test_known_texts_are_asked_for_with_what_ends_them() -> None:
    plan = plan_of("early_stopping", "arms=[]", "run.rounds=1")
    assert len(plan.texts) == 5 * 20
    for text in plan.texts:
        known = known_answer(plan, text)
        assert len(known.prompt) == text.prompt_tokens(plan.load.prompt_tokens)
        assert (known.stop == ("```",)) is (text.task == "code")
        stops_itself = text.task in ("summarization", "classification", "extraction")
        assert (known.early_stop is not None) is stops_itself


@pytest.mark.parametrize(
    "name", ["open_loop", "retry_outage", "trace_replay", "prefill_abandon", "early_stopping"]
)
def test_a_cell_reads_the_plan_as_it_was_written(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("plan")
    settings = ["arms=[]", "run.rounds=1", "engine.runner=simulated"]
    resolved = resolve_simulation(RunConfig(workload=name, settings=settings))
    plan = prepare(resolved.workload, resolved)
    plan.write(folder)
    assert read_plan(folder) == plan


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
        ("open_loop", ["engine.faults=['compute-refused']"], "a simulation does not have"),
        ("open_loop", ["engine.enable_chunked_prefill=false"], "the engine refuses its settings"),
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
