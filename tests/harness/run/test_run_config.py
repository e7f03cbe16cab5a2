"""The configuration of a run, and the load plan made from it for a server."""

import re
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from harness.client.session import LoadSession
from harness.errors import ConfigError
from harness.run.load_plan import prompt_salt
from harness.run.load_process import load_command
from harness.run.progress import describe_load
from harness.run.run_config import (
    ResolvedRun,
    RunConfig,
    make_load_plan,
    repeat_command,
    resolve_run,
)
from harness.run.server import Server
from harness.store.run_folder import RunFolder
from harness.workload.abandon import RequestSpec
from harness.workload.load import SlotRecoveryLoad
from harness.workload.plan import LoadPlan
from tests.harness.plans import server

ENGINE_CONFIG = {"max_num_seqs": 5, "max_model_len": 4096}


def resolved(*settings: str, workload: str = "demo", engine: str = "reference") -> ResolvedRun:
    url = None if engine == "reference" else "http://127.0.0.1:1"
    return resolve_run(
        RunConfig(workload=workload, settings=list(settings), engine=engine, target_url=url)
    )


def planned(
    *settings: str, workload: str = "demo", engine: str = "reference", on: Server | None = None
) -> LoadPlan:
    run = resolved(*settings, workload=workload, engine=engine)
    return make_load_plan(run, on or server(ENGINE_CONFIG), rows_dir=Path("rows"))


def test_prompts_differ_between_runs_on_one_server() -> None:
    salts = {
        prompt_salt(server(ENGINE_CONFIG), run_id=run_id, created_at=created_at)
        for run_id in ("1-on", "1-off", "2-on")
        for created_at in ("2026-01-01T00:00:00", "2026-01-01T00:05:00")
    }
    assert len(salts) == 6
    assert "" not in salts
    texts = [prompt_of(salt) for salt in ("", "1-on/", "1-off/")]
    assert prompt_of("1-on/") == texts[1]
    assert len(set(texts)) == 3
    assert {len(text) for text in texts} == {80}


def prompt_of(salt: str) -> str:
    salted = planned().model_copy(update={"prompt_salt": salt, "rows_dir": None})
    session = LoadSession(
        salted, api_key=None, tell=lambda _: None, enough=lambda: None, give_up=lambda _: None
    )
    text = session.prompt(RequestSpec(user=1, max_tokens=1, prompt_tokens=80), n=2)
    session.close()
    return text


def test_slots_come_from_the_server_or_from_the_setting() -> None:
    def slots(*settings: str, engine: str, on: Server) -> int:
        plan = planned(*settings, workload="slot_recovery", engine=engine, on=on)
        assert isinstance(plan.load, SlotRecoveryLoad)
        assert plan.load.slots is not None
        return plan.load.slots

    assert slots(engine="reference", on=server(ENGINE_CONFIG)) == 5
    assert slots("load.slots=4", engine="llamacpp", on=server()) == 4
    with pytest.raises(ConfigError, match="the server has 6"):
        slots("load.slots=4", engine="llamacpp", on=server(slots_found=6))


PAGE = ["http://127.0.0.1:2/metrics"]
QUARTER = ["collect.scrape_interval_s=0.25"]


@pytest.mark.parametrize(
    ("engine", "more", "interval"),
    [
        ("reference", {}, 0.05),
        ("reference", {"settings": ["collect.scrape=false"]}, None),
        ("reference", {"settings": QUARTER}, 0.25),
        ("reference", {"settings": QUARTER, "has_scraping": False}, None),
        ("openai", {}, None),
        ("openai", {"metrics_urls": PAGE}, 1.0),
        ("openai", {"metrics_urls": PAGE, "has_scraping": False}, None),
        ("openai", {"settings": QUARTER}, 0.25),
    ],
)
def test_the_scrape_interval_is_the_targets_or_a_setting(
    engine: str, more: dict[str, Any], interval: float | None
) -> None:
    config = RunConfig(workload="demo", engine=engine, target_url="http://127.0.0.1:1", **more)
    assert resolve_run(config).scrape_interval_s == interval


SCHEDULE = 'arrivals={kind="constant", rate=3, seconds=4, max_streams=5}'


@pytest.mark.parametrize(
    ("workload", "settings", "text"),
    [
        ("demo", [], "12 users until 600 have walked away, at most 60 s"),
        ("demo", ["run.processes=4"], "12 users until 600 .* at most 60 s, in 4 processes"),
        ("slot_recovery", [], "a train of probes behind 5 full slots, at most 60 s"),
        (
            "slot_recovery",
            ["load.trials=9", "load.width_s=0.005"],
            ".* slots, for 9 samples or until the median is known to 5 ms or at most 60 s",
        ),
        (
            "cancel_storm",
            ["load.streams=2", "load.stayers=1"],
            ".* each abandons 2 streams at once",
        ),
        (
            "open_loop",
            ["arrivals={kind='closed'}", "run.users=1", "run.max_seconds=86400"],
            "1 user for 24 h",
        ),
        ("demo", [SCHEDULE], "about 12 arrivals in 4 s, at most 5 streams at once"),
    ],
)
def test_the_load_is_described(workload: str, settings: list[str], text: str) -> None:
    assert re.fullmatch(f"load: {text}", describe_load(planned(*settings, workload=workload)))


def test_several_processes_talk_on_a_port_of_their_own(tmp_path: Path) -> None:
    alone, many = (load_command(RunFolder(tmp_path), processes) for processes in (1, 3))
    assert "--processes" not in alone
    assert alone[alone.index("--walkaway-plan") + 1] == "-"
    options = dict(pairwise(many))
    assert options["--processes"] == "3"
    assert options["--master-bind-host"] == "127.0.0.1"
    assert int(options["--master-port"]) > 1024
    assert options["--master-port"] == options["--master-bind-port"]


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("walkaway demo", "walkaway demo --set run.seed=7"),
        ("walkaway run demo --set run.seed=3", "walkaway run demo --set run.seed=3"),
        ("walkaway run demo --set=run.seed=3", "walkaway run demo --set=run.seed=3"),
        ("walkaway run a.toml --out x --json", "walkaway run a.toml --json --set run.seed=7"),
        ("walkaway run demo --out=x", "walkaway run demo --set run.seed=7"),
        (
            "walkaway run 'my load.toml' --header X-Key=***",
            "walkaway run 'my load.toml' --header 'X-Key=***' --set run.seed=7",
        ),
        ("", ""),
    ],
)
def test_the_line_that_repeats_a_run(typed: str, line: str) -> None:
    assert repeat_command(shlex.split(typed), seed=7) == line
