"""What a workload says about leaving is written out, or refused before anything is sent."""

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from harness.commands.run import cancellation_settings
from harness.errors import ConfigError
from harness.records import Delivery, Way
from harness.run.load_plan import check_files, load_notes, make_load, read_token_counts
from harness.run.server import Server
from harness.workload.plan import AbandonLoad, AfterTime, AfterTokens, DuringPrefill, Never, Slice
from harness.workload.workload import Workload, load_target, load_workload

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


def slices(folder: Path, mix: str, *settings: str, stay_share: float = 0.0) -> list[Slice]:
    asked = workload(folder, mix, *settings, stay_share=stay_share)
    load = make_load(asked, load_target("reference"), server(), folder)
    assert isinstance(load, AbandonLoad)
    return load.mix


class TestWrittenOut:
    def test_weights_and_those_who_stay(self, tmp_path: Path) -> None:
        mix = '{plan="tokens", tokens=3, weight=3}, {plan="prefill", way="rst", delivery="unary"}'
        first, second, stay = slices(tmp_path, mix, stay_share=0.2)
        assert [s.weight for s in (first, second, stay)] == pytest.approx([0.6, 0.2, 0.2])
        assert (first.leave, first.way, first.n) == (AfterTokens(tokens=[3]), Way.FIN, 1)
        assert second.leave == DuringPrefill(share=(0.1, 0.9))
        assert (second.way, second.delivery) == (Way.RST, Delivery.UNARY)
        assert stay.leave == Never()

    def test_an_entry_without_weight_is_not_there(self, tmp_path: Path) -> None:
        mix = '{plan="tokens", tokens=3}, {plan="tokens_from_file", file="no", weight=0}'
        assert len(slices(tmp_path, mix)) == 1

    def test_one_number_is_a_range(self, tmp_path: Path) -> None:
        (only,) = slices(tmp_path, '{plan="time", seconds=2, since="first_token"}')
        assert only.leave == AfterTime(seconds=(2.0, 2.0), since="first_token")

    def test_numbers_of_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "seen").write_text("3\n5\n\n3\n")
        (only,) = slices(tmp_path, '{plan="tokens_from_file", file="seen"}')
        assert only.leave == AfterTokens(tokens=[3, 5, 3])

    def test_aiperf_flags(self, tmp_path: Path) -> None:
        settings = cancellation_settings("demo", rate=40, delay_s=0.25)
        leave, stay = slices(tmp_path, '{plan="queued"}', *settings)
        assert (leave.leave, stay.leave) == (
            AfterTime(seconds=(0.25, 0.25), since="sent"),
            Never(),
        )
        assert (leave.weight, stay.weight) == pytest.approx((0.4, 0.6))

    def test_aiperf_flags_over_the_short_form(self) -> None:
        asked = load_workload("demo", cancellation_settings("demo", rate=100, delay_s=None))
        load = make_load(asked, load_target("reference"), server(), Path())
        assert isinstance(load, AbandonLoad)
        assert [one.leave for one in load.mix] == [AfterTime(seconds=(0.0, 0.0), since="sent")]


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        ("", "needs either `abandon_after_tokens` or a `mix`"),
        ('{plan="tokens", tokens=100}', "entry 1 of the `mix` (tokens): 100 tokens, but"),
        ('{plan="tokens", tokens=[1, 200], n=2}', "200 tokens, but `answer_tokens` allow 200"),
        ('{plan="tokens", tokens=-1}', "must be a number of tokens from 0"),
        ('{plan="tokens", tokens=[]}', "must be a number of tokens from 0"),
        ('{plan="tokens", tokens=true}', "must be a number of tokens from 0"),
        ('{plan="tokens_uniform", lowest=5, highest=4}', "`lowest` is 5, more than `highest`, 4"),
        ('{plan="tokens_uniform", lowest=5, highest=100}', "100 tokens, but"),
        ('{plan="tokens_geometric", mean=0.5}', "`load.mix.0.mean` must be at least 1"),
        ('{plan="tokens_geometric", mean=100}', "100 tokens, but"),
        ('{plan="tokens_lognormal", median=100, sigma=1}', "100 tokens, but"),
        ('{plan="tokens_lognormal", median=9, sigma=-1}', "`load.mix.0.sigma` must be at least 0"),
        ('{plan="answer_share", share=1.1}', "must be a share from 0 to 1"),
        ('{plan="prefill", share=[0.9, 0.1]}', "must be a share from 0 to 1"),
        ('{plan="time", seconds=-1}', "must be seconds from 0"),
        ('{plan="time", seconds=inf}', "must be seconds from 0"),
        ('{plan="queued", weight=-1}', "`load.mix.0.weight` must be at least 0"),
        ('{plan="queued", weight=0}', "the weights of the `mix` sum to nothing"),
        ('{plan="queued", way="sulk"}', "`load.mix.0.way` must be one of"),
        ('{plan="queued", n=0}', "`load.mix.0.n` must be at least 1"),
        ('{plan="sulk"}', "`load.mix.0.plan` must be one of"),
        ('{way="rst"}', "`load.mix.0.plan` is missing"),
        ('{plan="tokens", tokens=3, delivery="unary"}', "a unary answer shows no tokens"),
        ('{plan="last_token", delivery="unary"}', "a unary answer shows no tokens"),
        ('{plan="time", seconds=1, since="first_token", delivery="unary"}', "a unary answer"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(tmp_path: Path, mix: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        workload(tmp_path, mix)
    assert message in str(caught.value)
    assert "mine.toml" in str(caught.value)


@pytest.mark.parametrize("plan", ['{plan="last_token"}', '{plan="last_token", n=3}'])
def test_two_tokens_leave_no_time_to_race_for_the_last(tmp_path: Path, plan: str) -> None:
    with pytest.raises(ConfigError, match="`stay_tokens` must be 3 or more"):
        workload(tmp_path, plan, "load.stay_tokens=2")
    workload(tmp_path, plan, "load.stay_tokens=3")


def test_the_short_form_and_a_mix_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="and not both"):
        workload(tmp_path, '{plan="queued"}', "load.abandon_after_tokens=[1]")


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
        with pytest.raises(ConfigError, match="is 4 and the server has 4 slots"):
            make_load(asked, target, found, tmp_path)
        with pytest.raises(ConfigError, match="are 32, but the server has 4 slots"):
            make_load(load_workload("cancel_storm"), target, found, tmp_path)

    def test_bystanders_who_take_every_slot(self, tmp_path: Path) -> None:
        asked, target = load_workload("chunk_frontier"), load_target("reference")
        with pytest.raises(ConfigError, match="but the server has 4 slots: none"):
            make_load(asked, target, server(slots=4), tmp_path)
        make_load(asked, target, server(slots=5), tmp_path)

    def test_a_silence_that_nobody_knows_the_end_of(self, tmp_path: Path) -> None:
        target, mix = load_target("vllm"), '{plan="tokens", tokens=3, way="vanish"}'
        (note,) = load_notes(workload(tmp_path, mix), target, server())
        assert "it is watched for the settle time, 5 s, and whoever is still there" in note
        chosen = workload(tmp_path, mix, "settle.silence_seconds=9")
        assert load_notes(chosen, target, server()) == []

    def test_a_queue_that_nobody_tells_of(self, tmp_path: Path) -> None:
        asked = workload(tmp_path, '{plan="queued"}')
        (queue, ends) = load_notes(asked, load_target("openai"), server())
        assert "tells nothing of its queue" in queue
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
            ("", None, "holds no numbers"),
            ("\n\n", None, "holds no numbers"),
            ("3\nfour\n", None, "entry 2 is 'four', not a number of tokens"),
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
        with pytest.raises(ConfigError, match="say with `column`"):
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
        (None, 1.0, "say with --request-cancellation-rate"),
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
    with pytest.raises(ConfigError, match="slot_recovery decides itself who leaves"):
        cancellation_settings("slot_recovery", rate=10, delay_s=None)


def test_aiperf_flags_leave_arms_alone_that_say_themselves_who_leaves() -> None:
    with pytest.raises(ConfigError) as caught:
        cancellation_settings("innocent_bystanders", rate=10, delay_s=None)
    assert str(caught.value).startswith("--request-cancellation-rate: arm `0` of workload innocent")
    assert "--set" not in str(caught.value), "nobody typed one"


def test_nobody_leaves_after_the_run() -> None:
    flags = cancellation_settings("chat_stop", rate=50, delay_s=20)
    assert load_workload("chat_stop", [*flags, "run.max_seconds=21"]).load.kind == "abandon"
    with pytest.raises(ConfigError, match=r"leaves 20 s after `sent`, but `run.max_seconds` is 20"):
        load_workload("chat_stop", [*flags, "run.max_seconds=20"])


def test_without_flags_nothing_changes() -> None:
    assert cancellation_settings("slot_recovery", rate=None, delay_s=None) == []
