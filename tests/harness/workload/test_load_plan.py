"""What a workload says about leaving is written out, or refused before anything is sent."""

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from harness.commands.finished_run import cancellation_settings
from harness.errors import ConfigError
from harness.records import Delivery, Way
from harness.run.load_plan import check_files, load_notes, make_load, read_token_counts
from harness.run.server import Server
from harness.workload.abandon import AbandonPlan, PrefillPlan, TimePlan
from harness.workload.load import AbandonLoad, CancelStormLoad
from harness.workload.workload import Workload, load_target, load_workload
from tests.harness.workload.mixes import STAY, tokens

HEAD = """
question = "?"
[run]
users = 4
max_seconds = 5
[load]
kind = "abandon"
prompt_tokens = [8, 16]
answer_tokens = 100
stay_tokens = 10
"""


def server(url: str = "http://127.0.0.1:1", *, slots: int | None = None) -> Server:
    config = None if slots is None else {"max_num_seqs": slots}
    return Server(url=url, model="m", config=config, engine=None)


def workload(folder: Path, mix: str, *settings: str, stay_share: float = 0.0) -> Workload:
    path = folder / "mine.toml"
    path.write_text(f"{HEAD}stay_share = {stay_share}\nmix = [{mix}]\n")
    return load_workload(str(path), settings)


def shares(
    folder: Path, mix: str, *settings: str, stay_share: float = 0.0
) -> list[tuple[AbandonPlan, float]]:
    asked = workload(folder, mix, *settings, stay_share=stay_share)
    load = make_load(asked, load_target("reference"), server(), folder)
    assert isinstance(load, AbandonLoad)
    return load.shares


class TestResolved:
    def test_weights_and_those_who_stay(self, tmp_path: Path) -> None:
        mix = '{plan="tokens", tokens=3, weight=3}, {plan="prefill", way="rst", delivery="unary"}'
        found = shares(tmp_path, mix, stay_share=0.2)
        assert [share for _, share in found] == pytest.approx([0.6, 0.2, 0.2])
        first, second, stay = (plan for plan, _ in found)
        assert first == tokens(3, weight=3.0)
        assert second == PrefillPlan(
            plan="prefill", share=[0.1, 0.9], way=Way.RST, delivery=Delivery.UNARY
        )
        assert stay == STAY

    def test_an_entry_without_weight_is_not_there(self, tmp_path: Path) -> None:
        mix = '{plan="tokens", tokens=3}, {plan="tokens_from_file", file="no", weight=0}'
        assert len(shares(tmp_path, mix)) == 1

    def test_one_number_is_a_range(self, tmp_path: Path) -> None:
        ((plan, _),) = shares(tmp_path, '{plan="time", seconds=2, since="first_token"}')
        assert plan == TimePlan(plan="time", seconds=[2.0, 2.0], since="first_token")

    def test_numbers_of_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "seen").write_text("3\n5\n\n3\n")
        ((plan, _),) = shares(tmp_path, '{plan="tokens_from_file", file="seen"}')
        assert plan == tokens(3, 5, 3)

    def test_aiperf_flags(self, tmp_path: Path) -> None:
        settings = cancellation_settings("demo", rate=40, delay_s=0.25)
        leave, stay = shares(tmp_path, '{plan="queued"}', *settings)
        assert (leave[0], stay[0]) == (TimePlan(plan="time", seconds=[0.25, 0.25]), STAY)
        assert (leave[1], stay[1]) == pytest.approx((0.4, 0.6))

    def test_aiperf_flags_over_the_short_form(self) -> None:
        asked = load_workload("demo", cancellation_settings("demo", rate=100, delay_s=None))
        load = make_load(asked, load_target("reference"), server(), Path())
        assert isinstance(load, AbandonLoad)
        assert [plan for plan, _ in load.shares] == [TimePlan(plan="time", seconds=[0.0, 0.0])]

    def test_a_race_for_the_last_of_three_tokens(self, tmp_path: Path) -> None:
        workload(tmp_path, '{plan="last_token", n=3}', "load.stay_tokens=3")


class TestOnThisServer:
    def test_no_cancel_endpoint(self, tmp_path: Path) -> None:
        asked = workload(tmp_path, '{plan="queued", way="cancel"}')
        with pytest.raises(ConfigError, match="kind vllm have no cancel endpoint"):
            make_load(asked, load_target("vllm"), server(), tmp_path)

    @pytest.mark.parametrize("slots", [4, 5])
    def test_more_slots_than_users(self, tmp_path: Path, slots: int) -> None:
        asked = workload(tmp_path, '{plan="queued"}')
        with pytest.raises(ConfigError, match=f"is 4 and the server has {slots} slots"):
            make_load(asked, load_target("reference"), server(slots=slots), tmp_path)
        make_load(asked, load_target("reference"), server(slots=3), tmp_path)

    def test_slots_that_were_found_count_as_those_that_are_told(self, tmp_path: Path) -> None:
        asked, target = workload(tmp_path, '{plan="queued"}'), load_target("llamacpp")
        found = replace(server(), slots_found=4)
        for config in (None, {"max_num_seqs": None}):
            with pytest.raises(ConfigError, match="is 4 and the server has 4 slots"):
                make_load(asked, target, replace(found, config=config), tmp_path)
        with pytest.raises(ConfigError, match="are 32, but the server has 4 slots"):
            make_load(load_workload("cancel_storm"), target, found, tmp_path)

    def test_bystanders_who_take_every_slot(self, tmp_path: Path) -> None:
        asked, target = load_workload("chunk_frontier"), load_target("reference")
        with pytest.raises(ConfigError, match="but the server has 4 slots: none"):
            make_load(asked, target, server(slots=4), tmp_path)
        make_load(asked, target, server(slots=5), tmp_path)

    def test_a_storm_must_fit_the_slots(self) -> None:
        storm, target = load_workload("cancel_storm"), load_target("reference")
        load = make_load(storm, target, server(slots=32), Path())
        assert isinstance(load, CancelStormLoad)
        assert (load.streams, load.stayers) == (28, 4)
        with pytest.raises(ConfigError, match="are 32, but the server has 31 slots"):
            make_load(storm, target, server(slots=31), Path())

    def test_canaries_must_have_company(self) -> None:
        alone = load_workload("innocent_bystanders", ["run.users=3"])
        with pytest.raises(ConfigError, match="other users are needed beside them"):
            make_load(alone, load_target("reference"), server(), Path())

    def test_a_silence_that_nobody_knows_the_end_of(self, tmp_path: Path) -> None:
        target, mix = load_target("vllm"), '{plan="tokens", tokens=3, way="vanish"}'
        (note,) = load_notes(workload(tmp_path, mix), target, server())
        assert "it is watched for the settle time, 5 s, and a request that is still running" in note
        chosen = workload(tmp_path, mix, "settle.silence_seconds=9")
        assert load_notes(chosen, target, server()) == []

    def test_a_queue_that_nobody_tells_of(self, tmp_path: Path) -> None:
        asked = workload(tmp_path, '{plan="queued"}')
        (queue, ends) = load_notes(asked, load_target("openai"), server())
        assert "shows no queue" in queue
        assert "not known to honour `ignore_eos`" in ends
        assert load_notes(asked, load_target("reference"), server(slots=2)) == []


class TestFiles:
    def test_a_column_of_csv_or_parquet(self, tmp_path: Path) -> None:
        table = pd.DataFrame({"who": ["a", "b"], "tokens": [7, 9]})
        table.to_csv(tmp_path / "t.csv", index=False)
        table.to_parquet(tmp_path / "t.parquet")
        for name in ("t.csv", "t.parquet"):
            assert read_token_counts(tmp_path / name, "tokens") == [7, 9]

    @pytest.mark.parametrize(
        ("text", "column", "message"),
        [
            ("", None, "holds no token counts"),
            ("\n\n", None, "holds no token counts"),
            ("3\nfour\n", None, "entry 2 is 'four', not a token count from 0 to 10000000"),
            ("3\n-1\n", None, "entry 2 is '-1'"),
            ("3\n1.5\n", None, "entry 2 is '1.5'"),
            ("nan\n", None, "entry 1 is 'nan'"),
            ("inf\n", None, "entry 1 is 'inf'"),
            ("a,b\n1,2\n", "c", "has no column 'c'; it has: a, b"),
            ("a,b\n1,\n", "b", "entry 1 is 'nan'"),
            ("", "b", "cannot be read"),
        ],
    )
    def test_a_mistake_in_it_is_named(
        self, tmp_path: Path, text: str, column: str | None, message: str
    ) -> None:
        path = tmp_path / "numbers"
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            read_token_counts(path, column)
        assert message in str(caught.value)
        assert str(path) in str(caught.value)

    def test_a_table_needs_its_column_named(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="name one of its columns with `column`"):
            read_token_counts(tmp_path / "t.csv", None)

    def test_one_that_is_not_there(self, tmp_path: Path) -> None:
        asked = workload(tmp_path, '{plan="tokens_from_file", file="nowhere"}')
        with pytest.raises(ConfigError, match="nowhere: cannot be read"):
            check_files(asked, tmp_path)

    def test_numbers_beyond_the_answer(self, tmp_path: Path) -> None:
        (tmp_path / "seen").write_text("3\n100\n")
        asked = workload(tmp_path, '{plan="tokens_from_file", file="seen"}')
        with pytest.raises(ConfigError, match="goes up to 100 tokens, but an answer has 100"):
            check_files(asked, tmp_path)


@pytest.mark.parametrize(
    ("rate", "delay", "message"),
    [
        (None, 1.0, "needs --request-cancellation-rate"),
        (101, None, "must be a percentage"),
        (-1, None, "must be a percentage"),
        (float("nan"), None, "must be a percentage"),
        (5, -1, "must be seconds"),
    ],
)
def test_aiperf_flags_that_make_no_sense(
    rate: float | None, delay: float | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        cancellation_settings("demo", rate=rate, delay_s=delay)


def test_aiperf_flags_are_for_users_who_leave() -> None:
    with pytest.raises(ConfigError, match="slot_recovery has a fixed plan of which users leave"):
        cancellation_settings("slot_recovery", rate=10, delay_s=None)


def test_aiperf_flags_leave_arms_alone_that_say_themselves_who_leaves() -> None:
    with pytest.raises(ConfigError) as caught:
        cancellation_settings("innocent_bystanders", rate=10, delay_s=None)
    assert str(caught.value).startswith("--request-cancellation-rate: arm `0` of workload innocent")
    assert "--set" not in str(caught.value), "nobody typed one"


def test_without_flags_nothing_changes() -> None:
    assert cancellation_settings("slot_recovery", rate=None, delay_s=None) == []
