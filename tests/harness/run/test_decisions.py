"""The decisions of a run: how long to settle, what the load is told, how it ended."""

import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.errors import ConfigError, InterruptedRunError, TargetError
from harness.load.session import LoadSession
from harness.records import Outcome, StepRow
from harness.run.load_plan import prompt_salt
from harness.run.load_process import load_command
from harness.run.progress import Interruption, describe_load
from harness.run.run_config import ResolvedRun, RunConfig, make_load_plan, resolve_run
from harness.run.server import Server
from harness.run.settle import (
    is_back,
    may_be_at_work,
    may_end_early,
    settle_seconds,
    silence_seconds,
    typical_step_s,
)
from harness.run.shards import find_hopeless
from harness.store.manifest import LoadProcess, status_after
from harness.store.run_folder import RunFolder
from harness.workload.load import SlotRecoveryLoad
from harness.workload.plan import read_plan, write_plan
from harness.workload.target import Target
from harness.workload.workload import SettleSettings, load_target
from tests.made_up.rows import step_row

ENGINE_CONFIG = {"max_num_seqs": 5, "max_model_len": 4096}


def server(config: dict[str, Any] | None) -> Server:
    return Server(url="http://127.0.0.1:1", model="tiny", config=config, engine=None)


def order(*settings: str, workload: str = "demo", engine: str = "reference") -> ResolvedRun:
    url = None if engine == "reference" else "http://127.0.0.1:1"
    return resolve_run(
        RunConfig(workload=workload, settings=list(settings), engine=engine, target_url=url)
    )


def step(duration_ns: int) -> StepRow:
    return step_row(1, 100, 100 + duration_ns, {})


@pytest.mark.parametrize(
    ("step_s", "settings", "seconds"),
    [
        (None, SettleSettings(), 2.0),
        (0.02, SettleSettings(), 2.0),
        (0.5, SettleSettings(), 10.0),
        (0.5, SettleSettings(steps=2), 2.0),
        (0.02, SettleSettings(seconds=0.1), 0.4),
        (None, SettleSettings(seconds=7.0), 7.0),
    ],
)
def test_settle_time_is_seconds_or_steps_whichever_is_longer(
    step_s: float | None, settings: SettleSettings, seconds: float
) -> None:
    assert settle_seconds(load_target("reference"), settings, step_s) == pytest.approx(seconds)


def test_who_leaves_without_a_word_is_waited_for_longer() -> None:
    reference = load_target("reference")
    entry = 'load.mix=[{plan="tokens", tokens=5, way="%s"}]'
    for way, seconds in (("vanish", 11.0), ("stop_reading", 11.0), ("fin", 0.0)):
        workload = order("load.abandon_after_tokens=[]", entry % way).workload
        assert silence_seconds(reference, workload) == seconds
    chosen = order("load.abandon_after_tokens=[]", entry % "vanish", "settle.silence_seconds=3")
    assert silence_seconds(reference, chosen.workload) == 3.0


def test_nobody_knows_when_this_server_gives_up_who_is_silent() -> None:
    entry = 'load.mix=[{plan="tokens", tokens=5, way="vanish"}]'
    workload = order("load.abandon_after_tokens=[]", entry).workload
    assert silence_seconds(load_target("vllm"), workload) == 0.0


@pytest.mark.parametrize(
    ("running", "later", "is_undecided"),
    [
        (0.0, {"decode_calls": 7.0}, False),
        (1.0, {"decode_calls": 7.0, "generated_tokens": 3.0}, True),
        (1.0, {"decode_calls": 8.0, "generated_tokens": 3.0}, False),
        (1.0, {"decode_calls": 7.0, "generated_tokens": 4.0}, False),
    ],
)
def test_a_slot_in_use_and_no_sign_of_work_is_looked_at_for_a_whole_step(
    running: float, later: dict[str, float], *, is_undecided: bool
) -> None:
    after = {"running": running, "decode_calls": 7.0, "generated_tokens": 3.0}
    assert may_be_at_work({"running": 0.0}, after, later) is is_undecided


def test_a_target_without_steps_settles_in_seconds() -> None:
    assert settle_seconds(load_target("vllm"), SettleSettings(), 9.0) == 5.0


def test_the_typical_step_is_the_median() -> None:
    assert typical_step_s([]) is None
    assert typical_step_s([step(10), step(20), step(5000)]) == pytest.approx(20e-9)


@pytest.mark.parametrize(
    ("engine", "early"),
    [("reference", True), ("llamacpp", True), ("vllm", False), ("openai", False)],
)
def test_waiting_ends_early_only_where_gauges_are_believed(engine: str, early: bool) -> None:
    assert may_end_early(load_target(engine)) is early


def test_back_means_every_gauge_but_no_counter() -> None:
    before = {"running": 0.0, "free_blocks": 9.0, "generated_tokens": 1.0}
    assert is_back(before, {"running": 0.0, "free_blocks": 9.0, "generated_tokens": 500.0})
    assert not is_back(before, {"running": 0.0, "free_blocks": 8.0})
    assert not is_back(before, {"running": 0.0})
    assert not is_back({}, {})


def test_the_plan_says_what_workload_target_and_server_say(tmp_path: Path) -> None:
    plan = make_load_plan(order("run.users=3"), server(ENGINE_CONFIG), rows_dir=tmp_path)
    assert plan.run.users == 3
    assert plan.url == "http://127.0.0.1:1"
    assert plan.target == load_target("reference")
    assert plan.load == order().workload.load
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan


def test_no_two_runs_on_one_server_ask_the_same() -> None:
    there = Server(url="http://there", model="m", config=None, engine=None)
    salts = {
        prompt_salt(there, run_id=run_id, created_at=created_at)
        for run_id in ("1-on", "1-off", "2-on")
        for created_at in ("2026-01-01T00:00:00", "2026-01-01T00:05:00")
    }
    assert len(salts) == 6
    assert "" not in salts


def test_the_salt_of_a_plan_is_in_its_prompts(tmp_path: Path) -> None:
    plan = make_load_plan(order(), server(ENGINE_CONFIG), rows_dir=tmp_path)
    texts = {}
    for salt in ("", "1-on/", "1-off/", "1-on/ "):
        salted = plan.model_copy(update={"prompt_salt": salt.strip(), "rows_dir": None})
        session = LoadSession(
            salted,
            api_key=None,
            tell=lambda _: None,
            enough=lambda: None,
            give_up=lambda _: None,
        )
        texts[salt] = session.prompt(user=1, n=2, tokens=80)
        session.close()
    assert texts["1-on/"] == texts["1-on/ "]
    assert len(set(texts.values())) == 3
    assert {len(text) for text in texts.values()} == {80}


def test_slots_come_from_the_server_where_it_tells(tmp_path: Path) -> None:
    asked = order(workload="slot_recovery")
    plan = make_load_plan(asked, server(ENGINE_CONFIG), rows_dir=tmp_path)
    assert isinstance(plan.load, SlotRecoveryLoad)
    assert plan.load.slots == 5


def test_slots_that_the_server_tells_otherwise_are_refused(tmp_path: Path) -> None:
    told = order("load.slots=4", workload="slot_recovery")
    with pytest.raises(ConfigError, match=r"`load\.slots` is 4, but the server has 5"):
        make_load_plan(told, server(ENGINE_CONFIG), rows_dir=tmp_path)
    by_props = replace(server(None), slots_found=6)
    with pytest.raises(ConfigError, match="the server has 6"):
        make_load_plan(
            order("load.slots=4", workload="slot_recovery", engine="llamacpp"),
            by_props,
            rows_dir=tmp_path,
        )


def test_slots_come_from_the_setting_where_the_server_does_not_tell(tmp_path: Path) -> None:
    told = order("load.slots=4", workload="slot_recovery", engine="llamacpp")
    plan = make_load_plan(told, server(None), rows_dir=tmp_path)
    assert isinstance(plan.load, SlotRecoveryLoad)
    assert plan.load.slots == 4
    with pytest.raises(ConfigError, match=r"give it with --set load\.slots=N"):
        make_load_plan(
            order(workload="slot_recovery", engine="llamacpp"), server(None), rows_dir=tmp_path
        )


def test_more_tokens_than_the_context_holds_are_refused(tmp_path: Path) -> None:
    small = {**ENGINE_CONFIG, "max_model_len": 3000}
    with pytest.raises(ConfigError, match=r"go up to 3128 tokens, but .* context holds 3000"):
        make_load_plan(order(), server(small), rows_dir=tmp_path)


@pytest.mark.parametrize(
    ("workload", "key"),
    [
        ("demo", "stay_tokens"),
        ("slot_recovery", "control_answer_tokens"),
        ("slot_recovery", "probe_tokens"),
    ],
)
def test_every_kind_of_request_must_fit_the_context(
    tmp_path: Path, workload: str, key: str
) -> None:
    asked = order(f"load.{key}=4090", workload=workload)
    with pytest.raises(ConfigError, match=rf"`load\.{key}` go up to 4\d+ tokens"):
        make_load_plan(asked, server(ENGINE_CONFIG), rows_dir=tmp_path)


@pytest.mark.parametrize(
    ("engine", "scrapes", "urls", "interval"),
    [
        ("reference", True, [], 0.05),
        ("reference", False, [], None),
        ("openai", True, [], None),
        ("openai", True, ["http://127.0.0.1:2/metrics"], 1.0),
        ("openai", False, ["http://127.0.0.1:2/metrics"], None),
    ],
)
def test_how_often_metrics_are_read(
    engine: str, scrapes: bool, urls: list[str], interval: float | None
) -> None:
    resolved = resolve_run(
        RunConfig(
            workload="demo",
            engine=engine,
            target_url="http://127.0.0.1:1",
            has_scraping=scrapes,
            metrics_urls=urls,
        )
    )
    assert resolved.scrape_interval_s == interval


def test_the_scrape_interval_is_a_setting() -> None:
    asked = order("collect.scrape_interval_s=0.25", engine="openai")
    assert asked.scrape_interval_s == 0.25
    assert order("collect.scrape_interval_s=0.25").scrape_interval_s == 0.25
    quiet = RunConfig(
        workload="demo", settings=["collect.scrape_interval_s=0.25"], has_scraping=False
    )
    assert resolve_run(quiet).scrape_interval_s is None


def test_only_the_bundled_engine_is_started_for_the_user() -> None:
    with pytest.raises(ConfigError, match="--engine vllm needs --target URL"):
        resolve_run(RunConfig(workload="demo", engine="vllm"))


def test_how_a_run_ended() -> None:
    assert status_after(None) == "complete"
    assert status_after(InterruptedRunError("x")) == "interrupted"
    assert status_after(TargetError("x")) == "target_failed"


def a_process(*, ended_ns: int | None) -> LoadProcess:
    return LoadProcess(
        worker=0,
        host="here",
        pid=1,
        clock="boot",
        began_ns=1,
        ended_ns=ended_ns,
        last_seen_ns=5,
        requests=3,
        open_streams=2,
    )


def test_a_load_in_which_nothing_worked_is_a_failure() -> None:
    def error(tokens_read: int = 1, **outcomes: int) -> str:
        counts = Counter({Outcome(name): n for name, n in outcomes.items()})
        first = "HTTP 404: no such model"
        return str(find_hopeless(counts, first, [], tokens_read=tokens_read))

    assert "made no request" in error()
    assert error(failed=2).startswith("all 2 requests failed, and none was answered; the first: H")
    assert error(timed_out=1, cut_off=1).startswith("1 of 2 requests failed")
    for fine in ({"failed": 1, "abandoned": 1}, {"failed": 9, "completed": 1}, {"cut_off": 3}):
        assert error(**fine) == "None"
    assert error(tokens_read=0, abandoned=1, cut_off=1) == "None"  # left before the first token
    silent = error(tokens_read=0, cut_off=3)
    assert silent.startswith(
        "all 3 requests were waiting for their first token when the load ended"
    )
    assert "`run.first_token_timeout_s`" in silent


def test_a_load_whose_processes_all_died_is_a_failure() -> None:
    counts = Counter({Outcome.ABANDONED: 5})
    dead, alive = a_process(ended_ns=None), a_process(ended_ns=9)
    assert "every load process died" in str(
        find_hopeless(counts, None, [dead, dead], tokens_read=9)
    )
    assert find_hopeless(counts, None, [dead, alive], tokens_read=9) is None


def test_the_load_is_described(tmp_path: Path) -> None:
    plan = make_load_plan(order(), server(ENGINE_CONFIG), rows_dir=tmp_path)
    assert describe_load(plan) == "load: 12 users until 600 have walked away, at most 60 s"
    endless = order("run.users=1", "run.max_seconds=86400", "run.processes=1")
    load = endless.workload.load.model_copy(update={"stop_after_abandons": None})
    plan = make_load_plan(endless, server(ENGINE_CONFIG), rows_dir=tmp_path)
    plan = plan.model_copy(update={"load": load})
    assert describe_load(plan) == "load: 1 user for 24 h"
    many = make_load_plan(order("run.processes=4"), server(ENGINE_CONFIG), rows_dir=tmp_path)
    assert describe_load(many).endswith("at most 60 s, in 4 processes")


def test_several_processes_talk_on_a_port_of_their_own(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    alone = load_command(folder, 1)
    assert "--processes" not in alone
    assert alone[alone.index("--walkaway-plan") + 1] == "-"
    one = load_command(folder, 3)
    assert one[one.index("--processes") + 1] == "3"
    assert one[one.index("--master-bind-host") + 1] == "127.0.0.1"
    port = one[one.index("--master-port") + 1]
    assert one[one.index("--master-bind-port") + 1] == port
    assert int(port) > 1024


def test_the_first_signal_asks_and_the_second_insists() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interruption() as interruption:
        signal.raise_signal(signal.SIGTERM)
        assert interruption.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_every_target_explains_its_metrics() -> None:
    for name in ("reference", "vllm", "llamacpp"):
        target: Target = load_target(name)
        assert all(source.refresh for source in target.metrics.values())
