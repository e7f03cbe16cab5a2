"""Shipped workloads on the real engine, scaled down to a second or two a run."""

import json
from importlib.resources import files
from pathlib import Path

import pytest

from tests.e2e.running import ROOT, Log, Run, measure, set_flags

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TRACE = ROOT / "workloads" / "made_up_trace.jsonl"


def test_a_storm_passes_over_and_leaves_nothing_behind(tmp_path: Path) -> None:
    run = measure("cancel_storm", tmp_path / "run", *set_flags("load.storms=4"))
    metrics = run.metrics
    left = [row for row in run.rows("requests") if row["outcome"] == "abandoned"]
    assert len(left) == 4 * 28
    assert metrics["storm_clear_s"]["n"] == metrics["storm_spread_s"]["n"] == 4
    assert metrics["storm_clear_s"]["n_censored"] == 0
    assert metrics["ghost_rate"]["mean"] == 0
    assert metrics["leaked_slots"]["mean"] == metrics["leaked_blocks"]["mean"] == 0


def test_what_is_asked_again_is_found_again_where_it_was_retained(tmp_path: Path) -> None:
    settings = ("run.max_seconds=30", "load.stop_after_abandons=16", "run.rounds=1")
    arms = 'arms=[{name="retain"}, {name="immediate", engine={reclaim="immediate"}}]'
    run = measure("regenerate", tmp_path / "run", *set_flags(*settings, arms))
    found = {
        name: arm["metrics"]["cached_again"]["mean"] for name, arm in run.summary["arms"].items()
    }
    assert found["retain"] > 0.9
    assert found["immediate"] < 0.1


def test_the_turn_after_a_stop_finds_its_session_again(tmp_path: Path) -> None:
    lengths = "first_tokens=[2000], turn_tokens=[20], correction_tokens=[20], answer_tokens=[8]"
    run = measure(
        "agent_stop",
        tmp_path / "run",
        *set_flags(
            *("run.max_seconds=30", "load.stop_after_abandons=16", "run.rounds=1", "arms=[]"),
            f'load.session={{dialect="chat", turns=[4], {lengths}, think_s=0}}',
            'load.mix=[{plan="tokens", tokens=4}, {plan="tool_call", tokens=4}]',
        ),
    )
    assert {row["outcome"] for row in run.rows("requests")} <= {"abandoned", "completed", "cut_off"}
    assert {row["plan"] for row in run.rows("requests")} >= {"tokens:4", "tool_call:4"}
    stop, answer = (run.metrics[f"recomputed_after_{what}"] for what in ("stop", "answer"))
    assert stop["n"] > 8
    for found in (stop, answer):  # an answer of 8 tokens, and what whole blocks leave over
        assert 0 < found["mean"] <= 8 + 16


def test_the_value_of_cancellation_is_told_in_both_tables(tmp_path: Path) -> None:
    settings = set_flags(
        *("run.max_seconds=30", "load.stop_after_abandons=20", "run.rounds=1"),
        *("load.abandon_after_tokens=[50]", "load.answer_tokens=250", "load.stay_tokens=64"),
        *("engine.sim_fixed_ms=5", "engine.max_num_seqs=16", "run.users=24", "settle.seconds=3"),
    )
    run = measure("value_of_cancellation", tmp_path / "run", *settings)
    found = run.summary["value"]["rows"]
    rows = {row["name"]: (row["ignored"], row["honoured"]) for row in found}
    ignored, honoured = rows["tokens wasted per cancel"]
    assert ignored > 150
    assert honoured < 5
    held_ignored, held_honoured = rows["blocks held by abandoned requests"]
    assert held_ignored > 10 * held_honoured
    estimate, _ = rows["... as the source estimates it"]
    measured, _ = rows["engine seconds wasted an hour"]
    assert estimate > 4 * measured, "a step is shared"
    p50 = {stage["name"]: stage["p50"] for stage in run.summary["value"]["stages"]}
    assert 0 < p50["set_s"] < p50["signal_s"]
    assert 0 < p50["removal_s"] < p50["boundary_s"] < p50["wait_s"]
    assert "Value of cancellation" in (run.folder / "report.html").read_text()


def test_early_stopping_saves_what_comes_after_the_answers(tmp_path: Path) -> None:
    """The engine says the known texts: to their end, or until their answers are complete."""
    arms = (
        '{name="off", load={mix=[{plan="task", after_answer=0.5, early_stop=false}]}}, '
        '{name="on", load={mix=[{plan="task", after_answer=0.5}]}}'
    )
    settings = (f"arms=[{arms}]", "run.rounds=1", "run.max_seconds=4", "engine.sim_fixed_ms=2")
    run = measure("early_stopping", tmp_path / "run", *set_flags(*settings))
    off, on = (run.summary["arms"][name] for name in ("off", "on"))
    assert off["metrics"]["early_stop_saved_share"]["mean"] == 0
    assert off["metrics"]["early_stop_cut_short"]["mean"] == 0
    assert off["outcomes"]["abandoned"] == 0
    saved = {one["task"]: one for one in on["breakdown"]["early_stop_by_task"]}
    assert saved.keys() == {"chat", "summarization", "classification", "extraction", "code"}
    for task in ("chat", "extraction", "code"):
        assert saved[task]["saved"] == pytest.approx(0.5, abs=0.06), (
            "a chat's user is one step late"
        )
        assert saved[task]["cut_short"] == 0
    assert saved["classification"]["saved"] > 0.85
    assert saved["classification"]["cut_short"] > 0.9, "ten tokens, and most labels come later"
    of_on = run.rounds()["1-on"]
    stopped = {
        event["client_request_id"]: event["num_generated"]
        for event in of_on.rows("lifecycle")
        if (event["event"], event["reason"]) == ("removed", "early_stop")
    }
    for row in of_on.rows("requests"):
        task = row["plan"].split(":")[1]
        if row["outcome"] != "completed" or task == "summarization":
            continue  # a short summary may come to the text's own end
        assert (row["request_id"] in stopped) == (task in ("classification", "extraction"))
        assert stopped.get(row["request_id"], row["tokens_read"]) == row["tokens_read"]
    assert "Early stopping compared with its source" in (run.folder / "report.html").read_text()


def test_a_trace_is_replayed_and_what_it_asked_for_was_sent(tmp_path: Path) -> None:
    run = measure("trace_replay", tmp_path / "run", *set_flags("arrivals.seconds=4"), "--no-scrape")
    rows = sorted(run.rows("requests"), key=lambda row: row["user"])
    recorded = [json.loads(line) for line in TRACE.read_text().splitlines()]
    part = [one for one in recorded if one["timestamp"] < 4000]
    arrivals = run.manifest["arrivals"]
    assert (arrivals["planned"], arrivals["max_streams"]) == (len(part), 1000)
    assert arrivals["unsent"] == {"to_stay_s": [], "to_leave_s": []}
    assert len(rows) == len(part) > 3
    for row, one in zip(rows, part, strict=True):
        at_ms = (row["intended_start_ns"] - rows[0]["intended_start_ns"]) / 1e6
        assert at_ms == pytest.approx(one["timestamp"] / 2, abs=0.001)
        if row["outcome"] == "completed":
            told = (row["prompt_tokens"], row["completion_tokens"])
            assert told == (one["input_length"], one["output_length"])
    assert run.metrics["ttft_from_intended_s"]["n"] == run.metrics["ttft_s"]["n"]


def test_a_deadline_that_passed_on_the_server_is_a_time_out(tmp_path: Path) -> None:
    """The engine ends requests of its own accord: to the harness that is never a completion."""
    target, before = (files("harness.targets") / "reference.toml").read_text(), "ignore_eos = true"
    assert before in target
    engine = tmp_path / "hasty.toml"
    engine.write_text(target.replace(before, f"{before}, deadline_s = 0.3"))
    settings = ("load.stop_after_abandons=60", "load.abandon_after_tokens=[1]")
    stay = ("load.stay_share=0.5", "load.stay_tokens=3000")
    flags = set_flags(*settings, *stay)
    run = measure("cancel_steps", tmp_path / "run", "--engine", str(engine), *flags)
    timed_out = [row for row in run.rows("requests") if row["outcome"] == "timed_out"]
    assert run.summary["outcomes"]["timed_out"] == len(timed_out) > 0
    assert run.summary["outcomes"]["completed"] == 0, "3,000 tokens take a minute"
    assert {row["error"] for row in timed_out} == {"the server aborted the request: client_timeout"}
    assert {row["finish_reason"] for row in timed_out} == {"abort"}
    assert run.metrics["ghost_rate"]["mean"] == 0


# The chunk frontier: the roles in the rows, and the effect of chunk size...

PAIRS = 8


@pytest.fixture(scope="module")
def frontier(tmp_path_factory: pytest.TempPathFactory) -> Run:
    arms = 'arms=[{name="64", engine={max_num_batched_tokens=64}},{name="1024", engine={}}]'
    sizes = ("load.prompt_tokens=[2800,3000]", "engine.sim_prefill_token_ms=0.05")
    budget = "engine.max_num_batched_tokens=1024"
    settings = (f"load.pairs={PAIRS}", "run.rounds=1", budget, *sizes, arms)
    return measure(
        "chunk_frontier", tmp_path_factory.mktemp("frontier") / "run", *set_flags(*settings)
    )


@pytest.mark.parametrize("arm", ["64", "1024"])
def test_rows_and_figures_tell_the_three_kinds_apart(frontier: Run, arm: str) -> None:
    run, metrics = frontier.rounds()[f"1-{arm}"], frontier.summary["arms"][arm]["metrics"]
    rows = run.rows("requests")
    long = [row for row in rows if row["role"] == "long_prompt"]
    for planned, outcome in ((None, "completed"), (0, "abandoned")):
        ended = [row["outcome"] for row in long if row["planned_abandon"] == planned]
        assert ended == [outcome] * PAIRS
    read = [row for row in long if row["outcome"] == "completed"]
    assert {row["tokens_read"] for row in read} == {4}
    assert all(row["prompt_tokens"] > 2700 for row in read)
    bystanders = [row for row in rows if row["role"] == "bystander"]
    assert {row["user"] for row in bystanders} == {1, 2, 3, 4}
    assert len(rows) == len(long) + len(bystanders)
    log = Log(run)
    prefills = [log.is_in_prefill_at(t0, of) for of, t0 in log.left_ns.items()]
    assert metrics["cancel_latency_prefill_s"]["n"] == sum(prefills) > PAIRS / 2
    assert metrics["ghost_rate"]["mean"] == 0
    assert metrics["itl_s"]["of"] == "bystanders"
    assert (metrics["ttft_s"]["of"], metrics["ttft_s"]["n"]) == (
        "long prompts that were read",
        PAIRS,
    )


def test_over_grpc_every_way_to_leave_is_a_cancel_but_a_half_close(tmp_path: Path) -> None:
    settings = ("load.stop_after_abandons=15", "run.max_seconds=30", "gate.min_abandons=10")
    run = measure("kserve", tmp_path / "run", *set_flags(*settings))
    arms = run.summary["arms"]
    assert {name: arm["metrics"]["ghost_rate"]["mean"] for name, arm in arms.items()} == {
        **dict.fromkeys(("http", "cancel", "deadline", "channel_closed", "process_killed"), 0),
        "half_close": 1,
    }
    closes = {}
    for name, part in run.rounds().items():
        metrics = arms[name.partition("-")[2]]["metrics"]
        assert metrics["leaked_slots"]["max"] == metrics["leaked_blocks"]["max"] == 0
        assert metrics["ghost_rate"]["method"] == "exact"
        rows = [row for row in part.rows("requests") if row["outcome"] == "abandoned"]
        [closes[rows[0]["way"]]] = {row["wire_close"] for row in rows} - {"unopened"}
        if name != "1-http":
            assert {row["token_counting"] for row in rows if row["tokens_read"]} == {"usage"}
    assert closes == {
        "fin": "fin",
        "cancel": "rst_stream",
        "deadline": "rst_stream",
        "channel_closed": "fin",
        "process_killed": "kernel",
        "half_close": "end_stream",
    }


def test_a_cancel_counts_once_at_every_tier(tmp_path: Path) -> None:
    settings = ("run.max_seconds=60", "load.stop_after_abandons=80", "settle.seconds=2")
    run = measure("disaggregated", tmp_path / "run", *set_flags(*settings))
    metrics = run.metrics
    assert metrics["ghost_rate"]["mean"] == metrics["others_failed_rate"]["mean"] == 0
    assert metrics["leaked_slots"]["mean"] == metrics["leaked_blocks"]["mean"] == 0
    for tier in ("prefill", "decode"):
        assert metrics[f"cancel_latency_{tier}_tier_s"]["n_censored"] == 0
    counters = {one["role"]: one for one in run.summary["audit"]["counters"]}
    assert counters["frontend_cancelled"]["verdict"] == "exact"
    assert counters["worker_cancelled"]["verdict"] == "exact"
    workers = {row["worker"] for row in run.rows("steps")}
    assert workers == {"prefill-0", "prefill-1", "decode-0", "decode-1"}
    assert {row["frontend"] for row in run.rows("requests")} == {0, 1}


def test_a_kill_frees_what_it_left_and_fails_nobody_else(tmp_path: Path) -> None:
    settings = ("run.max_seconds=6", "load.stay_share=0.9")
    run = measure("worker_lost", tmp_path / "run", *set_flags(*settings))
    arms = {name: arm["metrics"] for name, arm in run.summary["arms"].items()}
    left = arms["frontend"]["freed_after_kill_s"]
    assert left["n_censored"] == 0
    assert 0 < left["max"] < 5
    assert run.summary["arms"]["frontend"]["outcomes"]["failed"] > 0
    for metrics in arms.values():
        assert metrics["others_failed_rate"]["mean"] == metrics["ghost_rate"]["mean"] == 0
    for arm in ("frontend", "worker"):
        manifest = json.loads((run.folder / "rounds" / f"1-{arm}" / "manifest.json").read_text())
        assert all(kill["back_ns"] > kill["t_ns"] for kill in manifest["kills"])
        assert len(manifest["kills"]) >= 2
