"""A load is written out for its server, or refused before anything is sent.

`test_drawn_plans` holds what each plan of a mix becomes.
"""

import sys
from pathlib import Path

import pandas as pd
import pytest

from harness.commands.run_and_show import cancellation_settings
from harness.errors import ConfigError
from harness.records import Protocol
from harness.run.load_plan import load_notes, make_load, read_token_counts
from harness.workload.abandon import TimePlan
from harness.workload.load import AbandonLoad
from harness.workload.workload import Workload, choose_protocol, load_target, load_workload
from tests.harness.plans import server
from tests.harness.workload.mixes import STAY
from tests.harness.workload.test_refused import GOOD


def workload(folder: Path, mix: str, *settings: str) -> Workload:
    path = folder / "mine.toml"
    path.write_text(GOOD)
    sole = ("run.users=4", "load.abandon_after_tokens=[]", "load.stay_share=0")
    return load_workload(str(path), [*sole, f"load.mix=[{mix}]", *settings])


QUEUED = '{plan="queued"}'
RACE = 'load.mix=[{plan="last_token", n=3}]'


@pytest.mark.parametrize(
    ("name", "settings", "slots"),
    [
        ("mix", [], 3),
        ("mix", [RACE, "load.stay_tokens=3"], None),
        ("chunk_frontier", [], 5),
        ("cancel_storm", [], 32),
    ],
)
def test_a_load_that_just_fits_its_server_is_taken(
    tmp_path: Path, name: str, settings: list[str], slots: int | None
) -> None:
    is_mine = name == "mix"
    asked = workload(tmp_path, QUEUED, *settings) if is_mine else load_workload(name, settings)
    config = None if slots is None else {"max_num_seqs": slots}
    taken = make_load(asked, load_target("reference"), server(config), tmp_path)
    assert taken == asked.load


def test_slots_that_were_found_count_as_published_ones(tmp_path: Path) -> None:
    asked, target = workload(tmp_path, QUEUED), load_target("llamacpp")
    for config in (None, {"max_num_seqs": None}):
        with pytest.raises(ConfigError, match="is 4 and the server has 4 slots"):
            make_load(asked, target, server(config, slots_found=4), tmp_path)


def test_notes_name_what_the_server_does_not_show(tmp_path: Path) -> None:
    mix = '{plan="tokens", tokens=3, way="vanish"}'
    (note,) = load_notes(workload(tmp_path, mix), load_target("vllm"), server())
    assert "it is watched for the settle time, 5 s, and a request that is still running" in note
    chosen = workload(tmp_path, mix, "settle.silence_seconds=9")
    assert load_notes(chosen, load_target("vllm"), server()) == []
    asked = workload(tmp_path, QUEUED)
    (queue, ends) = load_notes(asked, load_target("openai"), server())
    assert "shows no queue" in queue
    assert "not known to honour `ignore_eos`" in ends
    assert load_notes(asked, load_target("reference"), server({"max_num_seqs": 2})) == []


def test_priorities_that_are_not_sent_are_named(tmp_path: Path) -> None:
    asked = workload(tmp_path, '{plan="tokens", tokens=3, priority=-1}')
    assert load_notes(asked, load_target("vllm"), server()) == []
    (note,) = load_notes(asked, load_target("llamacpp"), server())
    assert note.startswith(
        "a server of kind llamacpp takes no priority: those of the `mix` are not"
    )
    over_grpc = workload(tmp_path, '{plan="tokens", tokens=3, priority=-1}', "load.protocol=grpc")
    (note,) = load_notes(over_grpc, load_target("reference"), server())
    assert note.startswith("no request over gRPC has a priority")


def test_token_counts_are_a_column_of_csv_or_parquet(tmp_path: Path) -> None:
    table = pd.DataFrame({"who": ["a", "b"], "tokens": [7, 9]})
    table.to_csv(tmp_path / "t.csv", index=False)
    table.to_parquet(tmp_path / "t.parquet")
    for name in ("t.csv", "t.parquet"):
        assert read_token_counts(tmp_path / name, "tokens") == [7, 9]


@pytest.mark.parametrize(
    ("name", "rate", "delay", "message"),
    [
        ("demo", None, 1.0, "needs --request-cancellation-rate"),
        ("demo", 101, None, "must be a percentage"),
        ("demo", -1, None, "must be a percentage"),
        ("demo", float("nan"), None, "must be a percentage"),
        ("demo", 5, -1, "must be seconds"),
        ("slot_recovery", 10, None, "slot_recovery has a fixed plan of which users leave"),
        ("innocent_bystanders", 10, None, "^--request-cancellation-rate: arm `0` of workload inn"),
    ],
)
def test_aiperf_flags_that_make_no_sense_are_refused(
    name: str, rate: float | None, delay: float | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        cancellation_settings(name, rate=rate, delay_s=delay)


def test_aiperf_flags_are_a_plan_of_leaving() -> None:
    assert cancellation_settings("slot_recovery", rate=None, delay_s=None) == []
    for rate, delay_s in ((40, 0.25), (100, None)):
        settings = cancellation_settings("demo", rate=rate, delay_s=delay_s)
        load = make_load(
            load_workload("demo", settings), load_target("reference"), server(), Path()
        )
        assert isinstance(load, AbandonLoad)
        found = load.shares
        leave = TimePlan(plan="time", seconds=[delay_s or 0.0, delay_s or 0.0])
        assert [plan for plan, _ in found] == [leave, STAY][: 2 if rate < 100 else 1]
        assert found[0][1] == pytest.approx(rate / 100)


def test_a_package_that_grpc_needs_and_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "tritonclient", None)
    assert choose_protocol(load_workload("demo"), load_target("reference")) is Protocol.HTTP
    with pytest.raises(ConfigError) as refused:
        choose_protocol(load_workload("kserve"), load_target("reference"))
    assert str(refused.value) == (
        "workload kserve, over grpc: the package tritonclient is not installed; install it with: "
        "pip install 'walkaway[grpc]'"
    )
