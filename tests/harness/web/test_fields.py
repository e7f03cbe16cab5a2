"""The fields of the start form: none is set aside without a word, and each says what it allows."""

import argparse

import pytest

from harness.errors import ConfigError
from harness.load.options import add_arguments, form_fields
from harness.workload.form import (
    allowed,
    check_each_applies,
    label,
    of_the_form,
    refused,
)

SHOWN = {
    "user_count": "8",
    "walkaway_leave": "workload",
    "walkaway_tokens": "1,16,64",
    "walkaway_seconds": "0.1-2",
    "walkaway_way": "fin",
    "walkaway_arrivals": "workload",
    "walkaway_rate": "1",
}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"tokens": "-5,abc"}, "Tokens needs Leave = tokens, and it is workload: '-5,abc' would"),
        ({"tokens": "2", "leave": "time"}, "Tokens needs Leave = tokens, and it is time"),
        ({"seconds": "3", "leave": "tokens"}, "Seconds needs Leave = time, and it is tokens"),
        (
            {"way": "rst"},
            "Way needs Leave = tokens or time or prefill or queued or last_token, and",
        ),
        ({"rate": "-3"}, "Rate needs Arrivals = poisson or constant, and it is workload"),
        ({"rate": "5", "arrivals": "closed"}, "Rate needs Arrivals = poisson or constant, and"),
    ],
)
def test_what_would_change_nothing_is_refused(fields: dict[str, str], why: str) -> None:
    form = SHOWN | {f"walkaway_{name}": text for name, text in fields.items()}
    with pytest.raises(ConfigError) as said:
        check_each_applies(form, SHOWN)
    assert str(said.value).startswith(why)


def test_a_number_of_users_needs_users_who_wait() -> None:
    form = SHOWN | {"user_count": "9", "walkaway_arrivals": "constant"}
    with pytest.raises(ConfigError, match="Number of users needs Arrivals = closed or workload"):
        check_each_applies(form, SHOWN)
    check_each_applies(form | {"user_count": "8"}, SHOWN)
    check_each_applies(form | {"walkaway_arrivals": "closed"}, SHOWN)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"leave": "tokens", "tokens": "2", "way": "rst"},
        {"leave": "time", "seconds": "3", "way": "cancel"},
        {"leave": "queued", "way": "half_close"},
        {"arrivals": "poisson", "rate": "5"},
    ],
)
def test_what_applies_may_change_and_what_was_shown_may_stay(fields: dict[str, str]) -> None:
    form = SHOWN | {f"walkaway_{name}": text for name, text in fields.items()}
    check_each_applies(form, SHOWN)
    check_each_applies(form | {"walkaway_leave": "workload"}, form)


def test_every_field_of_the_form_is_in_its_place_with_what_it_allows() -> None:
    parser = argparse.ArgumentParser()
    group = parser.add_argument_group()
    add_arguments(group)
    in_form = {
        action.dest: {"help_text": action.help, "default_value": action.default}
        for action in group._group_actions
        if getattr(action, "include_in_web_ui", False)
    }
    options = parser.parse_args(["--walkaway-seed=7"])
    options.num_users = options.run_time = options.host = None
    shown = of_the_form(in_form, form_fields(options))
    assert set(shown) == set(in_form)
    assert list(shown)[2:6] == [f"walkaway_{n}" for n in ("leave", "tokens", "seconds", "way")]
    assert shown["walkaway_seed"]["default_value"] == "7"
    for name, one in shown.items():
        assert one["help_text"].startswith(allowed(name, {}))


def test_a_field_is_called_what_the_form_calls_it() -> None:
    assert label("walkaway_stay_share") == "Stay share"
    said = refused("user_count", "0", {"walkaway_most_streams": "12"})
    assert said == "Number of users: '0' is refused; allowed: 1 to 12"
