"""The fields of the web page's start form: what they are called there, what may stand in them, and
which of them mean nothing unless another says so.

So that nothing that somebody typed is left aside without a word.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from harness.errors import ConfigError
from harness.load_caps import USUAL_RATE, USUAL_STREAMS
from harness.records import Way
from harness.values import LONGEST_S, MOST_RATE, MOST_STREAMS, MOST_TOKENS

AS_WORKLOAD: Final = "workload"
LEAVE: Final = ("tokens", "time", "prefill", "queued", "last_token", AS_WORKLOAD)
HELD: Final = frozenset({"stop_reading", "vanish"})  # these must outlast the users who left so
WAYS: Final = tuple(way.value for way in Way if way not in HELD)
ARRIVALS: Final = ("closed", "poisson", "constant", AS_WORKLOAD)
_ANY_INT: Final = "a whole number from {lowest} to 9.2e18"

# What may stand in a field, of ours in the order of the form; "" where there is nothing to say.
ALLOWED: Final = {
    "user_count": "1 to {most_streams}",
    "spawn_rate": f"more than 0, to {MOST_STREAMS} users a second",
    "run_time": f"more than 0 s, to {LONGEST_S} s",
    "walkaway_most_streams": f"1 to {MOST_STREAMS}",
    "walkaway_most_rate": f"more than 0, to {MOST_RATE} a second",
    "walkaway_engine": "",
    "walkaway_model": "",
    "walkaway_leave": "",
    "walkaway_tokens": f"numbers from 0 to {MOST_TOKENS} with commas between",
    "walkaway_seconds": f"0 to {LONGEST_S}, or lowest-highest",
    "walkaway_way": "",
    "walkaway_stay_share": "0 to 1",
    "walkaway_think": f'"step", "none", or seconds from 0 to {LONGEST_S}',
    "walkaway_prompt_tokens": f"1 to {MOST_TOKENS}, or lowest-highest",
    "walkaway_answer_tokens": f"1 to {MOST_TOKENS}",
    "walkaway_stay_tokens": f"1 to {MOST_TOKENS}",
    "walkaway_arrivals": "",
    "walkaway_rate": "more than 0, to {most_rate} a second",
    "walkaway_max_streams": "1 to {most_streams}",
    "walkaway_stop_after": f"{_ANY_INT.format(lowest=1)}, or empty",
    "walkaway_timeout": f"more than 0 s, to {LONGEST_S} s",
    "walkaway_seed": _ANY_INT.format(lowest=0),
}

# The fields that mean nothing unless another holds one of these.
_NEEDS: Final = {
    "user_count": ("walkaway_arrivals", ("closed", AS_WORKLOAD)),
    "walkaway_tokens": ("walkaway_leave", ("tokens",)),
    "walkaway_seconds": ("walkaway_leave", ("time",)),
    "walkaway_way": ("walkaway_leave", ("tokens", "time", "prefill", "queued", "last_token")),
    "walkaway_rate": ("walkaway_arrivals", ("poisson", "constant")),
}
_LABELS: Final = {"user_count": "Number of users", "spawn_rate": "Ramp up"}


def label(field: str) -> str:
    """What a field is called, as in the form but for the "Walkaway" before ours."""
    return _LABELS.get(field) or field.removeprefix("walkaway_").replace("_", " ").capitalize()


def refused(field: str, text: str, fields: Mapping[str, str]) -> str:
    """What is said of a text that may not stand in a field. `fields`: all of them, of which some
    are caps on others."""
    return f"{label(field)}: {text!r} is refused; allowed: {allowed(field, fields)}"


def allowed(field: str, fields: Mapping[str, str]) -> str:
    """What may stand in a field, where these are all of them."""
    return ALLOWED[field].format(
        most_streams=fields.get("walkaway_most_streams") or USUAL_STREAMS,
        most_rate=fields.get("walkaway_most_rate") or f"{USUAL_RATE:.0f}",
    )


def changed(fields: Mapping[str, str], before: Mapping[str, str]) -> list[str]:
    """The fields that hold something else than before."""
    return [name for name, text in fields.items() if text.strip() != before.get(name, "").strip()]


def check_each_applies(fields: Mapping[str, str], shown: Mapping[str, str]) -> None:
    """Raise ConfigError for a field that was changed and would change nothing.

    `fields`: all of a form; `shown`: what it was shown with.
    """
    for name in changed(fields, shown):
        of, values = _NEEDS.get(name, ("", ()))
        is_now = fields.get(of, AS_WORKLOAD)
        if of and is_now not in values:
            raise ConfigError(
                f"{label(name)} needs {label(of)} = {' or '.join(values)}, and it is {is_now}: "
                f"{fields[name]!r} would change nothing"
            )


def why_not_while_running(names: Iterable[str]) -> str | None:
    """Why a running test cannot be changed in these fields; None where it can."""
    ours = [label(name) for name in names if name.startswith("walkaway_")]
    if not ours:
        return None
    return f"{', '.join(ours)} cannot change while a test runs: stop it, and start another"


def of_the_form(
    options: Mapping[str, Mapping[str, Any]], shown: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Locust's description of our fields in the order of the form, with what stands in each."""
    return {
        name: {**options[name], "default_value": shown[name]} for name in ALLOWED if name in options
    }
