"""The start form: what its fields become, and how a wrong or useless text is refused."""

import argparse
import re
from typing import Any

import pytest

from harness.locust.options import add_arguments, form_fields, load_plan
from harness.records import Way
from harness.workload.abandon import TimePlan, TokensPlan
from harness.workload.arrivals import ClosedArrivals, PoissonArrivals
from harness.workload.form import (
    BY_HAND,
    FIELDS,
    about_fields,
    by_flag,
    by_id,
    check_each_applies,
    check_startable,
    described_fields,
    form_settings,
    label_in,
    prefilled,
)
from harness.workload.load import AbandonLoad
from harness.workload.workload import load_workload
from tests.harness.workload.test_refused import SHOWN


def ours(**fields: str) -> dict[str, str]:
    locusts = {"user_count", "run_time"}
    return {name if name in locusts else f"walkaway_{name}": fields[name] for name in fields}


def options_of(*flags: str, host: str | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser.add_argument_group())
    options = parser.parse_args(flags)
    options.num_users, options.run_time, options.host = 3, None, host
    return options


def load_of(**fields: str) -> AbandonLoad:
    flags = [f"--{name.replace('_', '-')}={text}" for name, text in ours(**fields).items()]
    load = load_plan(options_of(*flags)).load
    assert isinstance(load, AbandonLoad)
    return load


def test_the_options_describe_the_load() -> None:
    load = load_of(tokens="2, 5", way="rst", stay_share="0.2", prompt_tokens="32-128")
    assert load.mix == [TokensPlan(plan="tokens", tokens=[2, 5], way=Way.RST)]
    assert (load.stay_share, load.prompt_tokens) == (0.2, [32, 128])
    load = load_of(leave="time", seconds="0.5-2", prompt_tokens="32")
    assert load.mix == [TimePlan(plan="time", seconds=[0.5, 2.0])]
    assert load.prompt_tokens == [32, 32]


def test_the_defaults_of_plain_locust_are_those_of_its_workload() -> None:
    workload = load_workload(BY_HAND)
    assert isinstance(workload.load, AbandonLoad)
    kept = prefilled(workload)
    kept["walkaway_tokens"] = ",".join(map(str, workload.load.abandon_after_tokens))
    of_the_file = [one for one in FIELDS.values() if one.key and one.default]
    for one in (*of_the_file, FIELDS["walkaway_tokens"]):
        assert (one.id, one.default) == (one.id, kept[one.id])


def test_an_unchanged_form_is_the_workload() -> None:
    assert form_settings({"walkaway_leave": "workload", "walkaway_stop_after": ""}) == []
    workload = load_workload("demo")
    assert load_workload("demo", form_settings(prefilled(workload))) == workload
    fields = form_fields(options_of(host="http://127.0.0.1:1"))
    assert (fields["user_count"], fields["host"]) == ("3", "http://127.0.0.1:1")
    assert "run_time" not in fields
    assert "load.stay_share=0.25" in form_settings(fields)


def test_requests_come_as_the_fields_say() -> None:
    fields = ours(arrivals="poisson", rate="2.5", run_time="20", max_streams="7")
    workload = load_workload(BY_HAND, form_settings(fields))
    expected = PoissonArrivals(kind="poisson", rate=2.5, seconds=20, max_streams=7)
    assert workload.arrivals == expected
    assert workload.run.max_seconds > 20  # the last streams may end
    closed = load_workload("open_loop", form_settings({"walkaway_arrivals": "closed"}))
    assert closed.arrivals == ClosedArrivals()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"user_count": "8", "arrivals": "constant"},
        {"user_count": "9", "arrivals": "closed"},
        {"leave": "tokens", "tokens": "2", "way": "rst"},
        {"leave": "time", "seconds": "3", "way": "cancel"},
        {"arrivals": "poisson", "rate": "5"},
    ],
)
def test_a_change_with_effect_is_taken(fields: dict[str, str]) -> None:
    check_each_applies(SHOWN | ours(**fields), SHOWN)


def test_each_option_of_the_form_says_what_it_allows() -> None:
    parser = argparse.ArgumentParser()
    group = parser.add_argument_group()
    add_arguments(group)
    shown: dict[str, Any] = {
        action.dest: action
        for action in group._group_actions
        if getattr(action, "include_in_web_ui", False)
    }
    in_table = [one.id for one in FIELDS.values() if one.is_ours and one.is_shown]
    assert list(shown) == in_table
    for name, action in shown.items():
        assert action.help.startswith(FIELDS[name].range)
        assert action.option_strings == [FIELDS[name].flag]
    for way in shown["walkaway_way"].choices:  # none that the page always refuses
        fields = ours(leave="tokens", tokens="1", way=way)
        check_startable(load_workload(BY_HAND, form_settings(fields)))


@pytest.mark.parametrize("name", ["demo", "open_loop", "trace_replay", "last_token_race"])
def test_the_page_starts_what_it_can_stop(name: str) -> None:
    check_startable(load_workload(name))


def test_labels_are_plain_words_that_locust_shows_and_sends_as_they_stand() -> None:
    """It capitalises the first letter of a name, and parts it where a capital or a digit follows a
    small letter. A label fits into its field on a phone, and names a unit in parentheses."""
    shown = [one for one in FIELDS.values() if one.is_ours and one.is_shown]
    assert len({one.label for one in shown}) == len(shown)
    for one in shown:
        assert re.fullmatch(r"[A-Z][a-z]*(,? [a-z]+)*( \([a-z ]+\))?", one.label)
        assert len(one.label) <= 30
    sent = {one.label: one.id for one in shown} | {"user_count": "user_count", "host": "host"}
    assert by_id(sent) == {name: name for name in sent.values()}


def test_a_refusal_names_the_field_and_not_the_key() -> None:
    refusal = "--set run.timeout_s: `run.timeout_s` must be more than 0.0, not 0\n`run.loops` is 2"
    said = about_fields(refusal)
    assert said == '"Timeout (seconds)" must be more than 0.0, not 0\n`run.loops` is 2'
    assert label_in(said) == "Timeout (seconds)"
    assert about_fields(refusal, by_flag).startswith("--walkaway-timeout must be more than 0.0")


@pytest.mark.parametrize(
    ("refusal", "label"),
    [
        ('"Leave after (tokens)" needs "When users leave" = tokens', "Leave after (tokens)"),
        ('cannot reach http://h (from "Host"): it refuses', "Host"),
        ('"Ramp up" must be more than 0', "Ramp up"),
        ("the process that measures has ended", None),
        ('"Most streams" is no field of the form', None),
    ],
)
def test_a_refusal_belongs_to_the_field_that_it_names_first(
    refusal: str, label: str | None
) -> None:
    assert label_in(refusal) == label


def test_the_form_shows_its_fields_in_groups_with_what_each_allows() -> None:
    shown = described_fields()
    assert [one["group"] for one in shown if one["group"]] == [
        *("Server", "Leaving", "Requests", "Arrivals", "End and seed"),
    ]
    assert shown[0]["group"], "no field stands above the first heading"
    hints = {one["label"]: one["hint"] for one in shown}
    assert hints["Answer, if they leave (tokens)"].startswith("from 1 to 10,000,000; ")
