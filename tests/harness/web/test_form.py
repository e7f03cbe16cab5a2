"""The start form: what its fields become, and what is said of those that cannot be."""

import argparse

import pytest

from harness.errors import ConfigError
from harness.load.options import add_arguments, form_fields, load_plan
from harness.records import Way
from harness.workload.abandon import TimePlan, TokensPlan
from harness.workload.arrivals import ClosedArrivals, PoissonArrivals
from harness.workload.form import (
    BY_HAND,
    check_startable,
    form_settings,
    in_words_of_the_form,
    label,
    prefilled,
)
from harness.workload.load import AbandonLoad
from harness.workload.workload import load_workload


def load_of(**fields: str) -> AbandonLoad:
    parser = argparse.ArgumentParser()
    add_arguments(parser.add_argument_group())
    flags = [f"--walkaway-{name.replace('_', '-')}={text}" for name, text in fields.items()]
    options = parser.parse_args(flags)
    options.num_users, options.run_time, options.host = 3, None, None
    load = load_plan(options).load
    assert isinstance(load, AbandonLoad)
    return load


def test_users_leave_as_the_fields_say() -> None:
    load = load_of(tokens="2, 5", way="rst", stay_share="0.2")
    assert load.mix == [TokensPlan(plan="tokens", tokens=[2, 5], way=Way.RST)]
    assert load.stay_share == 0.2
    load = load_of(leave="time", seconds="0.5-2")
    assert load.mix == [TimePlan(plan="time", seconds=[0.5, 2.0])]


def test_a_length_is_a_number_or_a_range() -> None:
    assert load_of(prompt_tokens="32-128").prompt_tokens == [32, 128]
    assert load_of(prompt_tokens="32").prompt_tokens == [32, 32]


def test_an_empty_field_leaves_the_workload_as_it_is() -> None:
    assert form_settings({"walkaway_leave": "workload", "walkaway_stop_after": ""}) == []


def test_a_form_shows_what_its_workload_says() -> None:
    workload = load_workload("demo")
    again = load_workload("demo", form_settings(prefilled(workload)))
    assert again == workload


@pytest.mark.parametrize(
    ("field", "text", "allowed"),
    [
        ("stay_share", "1.5", "0 to 1"),
        ("answer_tokens", "0", "1 to 10000000"),
        ("prompt_tokens", "9-2", "1 to 10000000, or lowest-highest"),
        ("timeout", "0", "more than 0 s, to 604800 s"),
        ("seed", "-1", "a whole number from 0 to 9.2e18"),
        ("tokens", "1;2", "numbers from 0 to 10000000 with commas between"),
        ("user_count", "20000", "1 to 10000"),
        ("user_count", "9999999", "1 to 10000"),
        ("rate", "9000000", "more than 0, to 10000"),
        ("rate", "20000", "more than 0, to 10000"),
        ("rate", "0", "more than 0, to 10000"),
        ("rate", "1..2", "more than 0, to 10000"),
        ("rate", "", "more than 0, to 10000"),
        ("run_time", "9999999", "more than 0 s, to 604800 s"),
        ("run_time", "1..2", "more than 0 s, to 604800 s"),
        ("seconds", "2-1", "0 to 604800, or lowest-highest"),
        ("seconds", "1..2", "0 to 604800, or lowest-highest"),
    ],
)
@pytest.mark.parametrize("workload", [BY_HAND, "demo"])
def test_what_is_out_of_range_is_refused_in_words_of_the_form(
    workload: str, field: str, text: str, allowed: str
) -> None:
    name = field if field in {"user_count", "run_time"} else f"walkaway_{field}"
    plans = {"seconds": "time", "tokens": "tokens"}
    arrivals = "constant" if field in {"rate", "run_time"} else "closed"
    fields = {
        "walkaway_leave": plans.get(field, "workload"),
        "walkaway_arrivals": arrivals,
        "walkaway_rate": "1",
        "run_time": "60",
        name: text,
    }
    with pytest.raises(ConfigError) as refused:
        load_workload(workload, form_settings(fields))
    said = in_words_of_the_form(str(refused.value), fields)
    assert said.startswith(f"{label(name)}: {text!r} is refused; allowed: {allowed}")
    for word in ("--set", ".toml", "`", "\n"):
        assert word not in said


def test_the_most_users_are_those_of_the_workload() -> None:
    fields = {"walkaway_most_streams": "12000", "user_count": "20000"}
    with pytest.raises(ConfigError) as refused:
        load_workload(BY_HAND, form_settings(fields))
    said = in_words_of_the_form(str(refused.value), fields)
    assert said == "Number of users: '20000' is refused; allowed: 1 to 12000"


def test_what_no_field_says_is_told_as_it_is() -> None:
    broken = "mine.toml: `run.seed` must be at least 0, not -1"
    assert in_words_of_the_form(broken, {"walkaway_seed": ""}) == broken
    assert in_words_of_the_form("unknown engine `x`", {}) == "unknown engine `x`"


@pytest.mark.parametrize(
    ("field", "text"), [("tokens", "-5,abc"), ("seconds", "soon"), ("rate", "-3")]
)
def test_what_does_not_apply_is_looked_at_all_the_same(field: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"{text}' is refused; allowed: "):
        form_settings({"walkaway_leave": "queued", f"walkaway_{field}": text})


@pytest.mark.parametrize(
    ("field", "text", "allowed"),
    [
        ("way", 'fin"', "one of fin, rst, half_close, killed, cancel, not"),
        ("way", "vanish", "one of fin, rst, half_close, killed, cancel, not"),
        ("leave", "soon", "one of tokens, time"),
    ],
)
def test_what_is_no_choice_is_refused(field: str, text: str, allowed: str) -> None:
    fields = {"walkaway_leave": "tokens", "walkaway_tokens": "1", f"walkaway_{field}": text}
    with pytest.raises(ConfigError, match=allowed):
        form_settings(fields)


def test_a_form_that_was_left_alone_is_as_it_was_shown() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser.add_argument_group())
    options = parser.parse_args([])
    options.num_users, options.run_time, options.host = 3, None, "http://127.0.0.1:1"
    fields = form_fields(options)
    assert (fields["user_count"], fields["host"]) == ("3", "http://127.0.0.1:1")
    assert "run_time" not in fields
    assert "load.stay_share=0.25" in form_settings(fields)


def test_requests_come_as_the_fields_say() -> None:
    fields = {"walkaway_arrivals": "poisson", "walkaway_rate": "2.5", "run_time": "20"}
    workload = load_workload(BY_HAND, form_settings(fields))
    assert workload.arrivals == PoissonArrivals(kind="poisson", rate=2.5, seconds=20)
    assert workload.run.max_seconds > 20  # the last streams may end
    closed = load_workload("open_loop", form_settings({"walkaway_arrivals": "closed"}))
    assert closed.arrivals == ClosedArrivals()


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"walkaway_rate": "2"}, "need an end: give a run time"),
        ({"walkaway_arrivals": "ramp"}, "must be one of closed, poisson, constant, workload"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(fields: dict[str, str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_workload(BY_HAND, form_settings({"walkaway_arrivals": "constant", **fields}))


@pytest.mark.parametrize("name", ["demo", "open_loop", "trace_replay", "last_token_race"])
def test_closed_and_open_loops_are_started_by_hand(name: str) -> None:
    check_startable(load_workload(name))


@pytest.mark.parametrize("way", ["stop_reading", "vanish"])
def test_a_connection_that_must_be_held_is_refused(way: str) -> None:
    mix = f'load.mix=[{{plan="tokens", tokens=[1], way="{way}"}}]'
    workload = load_workload(BY_HAND, ["load.abandon_after_tokens=[]", mix])
    with pytest.raises(ConfigError, match=f"{way} leaves connections open"):
        check_startable(workload)


def test_the_form_offers_no_way_that_it_always_refuses() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser.add_argument_group())
    choices = next(a.choices for a in parser._actions if a.dest == "walkaway_way")
    for way in choices or ():
        fields = {"walkaway_leave": "tokens", "walkaway_tokens": "1", "walkaway_way": way}
        check_startable(load_workload(BY_HAND, form_settings(fields)))


@pytest.mark.parametrize("name", ["slot_recovery", "cancel_storm", "value_of_cancellation"])
def test_what_cannot_be_started_by_hand_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="run it without --web"):
        check_startable(load_workload(name))
