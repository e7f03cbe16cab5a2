"""The start form: what its fields become, and how a wrong or useless text is refused."""

import argparse
from typing import Any

import pytest

from harness.errors import ConfigError
from harness.load.options import add_arguments, form_fields, load_plan
from harness.records import Way
from harness.workload.abandon import TimePlan, TokensPlan
from harness.workload.arrivals import ClosedArrivals, PoissonArrivals
from harness.workload.form import (
    BY_HAND,
    FIELDS,
    check_each_applies,
    check_startable,
    form_settings,
    in_words_of_the_form,
    prefilled,
)
from harness.workload.load import AbandonLoad
from harness.workload.workload import load_workload

SHOWN = {
    "user_count": "8",
    "walkaway_leave": "workload",
    "walkaway_tokens": "1,16,64",
    "walkaway_seconds": "0.1-2",
    "walkaway_way": "fin",
    "walkaway_arrivals": "workload",
    "walkaway_rate": "1",
}


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
    ("field", "text", "allowed"),
    [
        ("stay_share", "1.5", "0 to 1"),
        ("answer_tokens", "0", "1 to 10000000"),
        ("prompt_tokens", "9-2", "1 to 10000000, or lowest-highest"),
        ("timeout", "0", "more than 0, to 604800"),
        ("seed", "-1", "0 to 9223372036854775807"),
        ("tokens", "1;2", "numbers from 0 to 10000000 with commas between"),
        ("tokens", "", "numbers from 0 to 10000000 with commas between"),
        ("user_count", "20000", "1 to 10000"),
        ("rate", "20000", "more than 0, to 10000"),
        ("rate", "0", "more than 0, to 10000"),
        ("rate", "", "more than 0, to 10000"),
        ("run_time", "9999999", "more than 0, to 604800"),
        ("run_time", "1..2", "more than 0, to 604800"),
        ("seconds", "2-1", "0 to 604800, or lowest-highest"),
        ("seconds", "1..2", "0 to 604800, or lowest-highest"),
    ],
)
@pytest.mark.parametrize("workload", [BY_HAND, "demo"])
def test_a_text_out_of_range_is_refused_in_words_of_the_form(
    workload: str, field: str, text: str, allowed: str
) -> None:
    fields = ours(
        leave={"seconds": "time", "tokens": "tokens"}.get(field, "workload"),
        arrivals="constant" if field in {"rate", "run_time"} else "closed",
        **({"rate": "1", "run_time": "60"} | {field: text}),
    )
    with pytest.raises(ConfigError) as refused:
        load_workload(workload, form_settings(fields))
    said = in_words_of_the_form(str(refused.value), fields)
    (name,) = ours(**{field: text})
    assert said.startswith(f"{FIELDS[name].label}: {text!r} is refused; allowed: {allowed}")
    for word in ("--set", ".toml", "`", "\n"):
        assert word not in said


def test_a_cap_is_the_form_s_own() -> None:
    fields = ours(most_streams="12000", user_count="20000")
    with pytest.raises(ConfigError) as refused:
        load_workload(BY_HAND, form_settings(fields))
    said = in_words_of_the_form(str(refused.value), fields)
    assert said == "Number of users: '20000' is refused; allowed: 1 to 12000"
    broken = "mine.toml: `run.seed` must be at least 0, not -1"
    assert in_words_of_the_form(broken, {"walkaway_seed": ""}) == broken, "it is of no field"


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"leave": "queued", "tokens": "-5,abc"}, "'-5,abc' is refused; allowed: "),
        ({"leave": "queued", "seconds": "soon"}, "'soon' is refused; allowed: "),
        ({"rate": "-3"}, "'-3' is refused; allowed: "),
        ({"leave": "tokens", "tokens": "1", "way": 'fin"'}, "one of fin, rst, half_close, killed,"),
        ({"leave": "tokens", "tokens": "1", "way": "vanish"}, "one of fin, rst, half_close,"),
        ({"leave": "soon"}, "one of tokens, time"),
        ({"arrivals": "ramp"}, "one of closed, poisson, constant, workload"),
        ({"arrivals": "constant", "rate": "2"}, "need an end: give a run time"),
    ],
)
def test_a_wrong_text_is_refused_even_where_it_has_no_effect(
    fields: dict[str, str], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        form_settings(ours(**fields))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"tokens": "-5,abc"}, "Tokens needs Leave = tokens, and it is workload: '-5,abc' would"),
        ({"tokens": "2", "leave": "time"}, "Tokens needs Leave = tokens, and it is time"),
        ({"seconds": "3", "leave": "tokens"}, "Seconds needs Leave = time, and it is tokens"),
        ({"way": "rst"}, "Way needs Leave = tokens or time or prefill or queued or last_token,"),
        ({"rate": "-3"}, "Rate needs Arrivals = poisson or constant, and it is workload"),
        ({"user_count": "9", "arrivals": "constant"}, "Number of users needs Arrivals = closed or"),
    ],
)
def test_a_change_without_effect_is_refused(fields: dict[str, str], why: str) -> None:
    form = SHOWN | ours(**fields)
    with pytest.raises(ConfigError) as said:
        check_each_applies(form, SHOWN)
    assert str(said.value).startswith(why)
    check_each_applies(form, form)


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
        assert action.help.startswith(FIELDS[name].allowed_in({}))
    for way in shown["walkaway_way"].choices:  # none that the page always refuses
        fields = ours(leave="tokens", tokens="1", way=way)
        check_startable(load_workload(BY_HAND, form_settings(fields)))


OPEN = 'load.mix=[{plan="tokens", tokens=[1], way="stop_reading"}]'


@pytest.mark.parametrize(
    ("name", "settings", "why"),
    [
        ("slot_recovery", [], "run it without --web"),
        ("cancel_storm", [], "run it without --web"),
        ("value_of_cancellation", [], "run it without --web"),
        ("soak", ["run.loops=2"], "`run.loops` is 2; the web page starts one"),
        (BY_HAND, ["load.abandon_after_tokens=[]", OPEN], "stop_reading leaves connections open"),
    ],
)
def test_the_page_starts_only_what_it_can_stop(name: str, settings: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check_startable(load_workload(name, settings))


@pytest.mark.parametrize("name", ["demo", "open_loop", "trace_replay", "last_token_race"])
def test_the_page_starts_what_it_can_stop(name: str) -> None:
    check_startable(load_workload(name))
