"""The start form of the web page: its fields become settings of a workload.

The settings pass the checks of a workload file. A refusal names the field, its text and the allowed
values.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from harness.errors import ConfigError
from harness.records import Way
from harness.workload.load import AbandonLoad
from harness.workload.values import LONGEST_S, MOST_RATE, MOST_STREAMS, MOST_TOKENS
from harness.workload.workload import USUAL_RATE, USUAL_STREAMS, Workload

AS_WORKLOAD: Final = "workload"
LEAVE: Final = ("tokens", "time", "prefill", "queued", "last_token", AS_WORKLOAD)
HELD: Final = frozenset({"stop_reading", "vanish"})  # these connections must outlast their users
WAYS: Final = tuple(way.value for way in Way if way not in HELD)
ARRIVALS: Final = ("closed", "poisson", "constant", AS_WORKLOAD)
_ANY_INT: Final = "a whole number from {lowest} to 9.2e18"

# The texts that a field allows, ours in the order of the form.
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

# Fields without effect unless another field has one of these values.
_NEEDS: Final = {
    "user_count": ("walkaway_arrivals", ("closed", AS_WORKLOAD)),
    "walkaway_tokens": ("walkaway_leave", ("tokens",)),
    "walkaway_seconds": ("walkaway_leave", ("time",)),
    "walkaway_way": ("walkaway_leave", ("tokens", "time", "prefill", "queued", "last_token")),
    "walkaway_rate": ("walkaway_arrivals", ("poisson", "constant")),
}
_LABELS: Final = {"user_count": "Number of users", "spawn_rate": "Ramp up"}


def label(field: str) -> str:
    """The name of a field, as in the form but without the "Walkaway" before ours."""
    return _LABELS.get(field) or field.removeprefix("walkaway_").replace("_", " ").capitalize()


def refused(field: str, text: str, fields: Mapping[str, str]) -> str:
    """The refusal of a text in a field. `fields`: all of them, as some cap others."""
    return f"{label(field)}: {text!r} is refused; allowed: {allowed(field, fields)}"


def allowed(field: str, fields: Mapping[str, str]) -> str:
    return ALLOWED[field].format(
        most_streams=fields.get("walkaway_most_streams") or USUAL_STREAMS,
        most_rate=fields.get("walkaway_most_rate") or f"{USUAL_RATE:.0f}",
    )


def changed(fields: Mapping[str, str], before: Mapping[str, str]) -> list[str]:
    return [name for name, text in fields.items() if text.strip() != before.get(name, "").strip()]


def check_each_applies(fields: Mapping[str, str], shown: Mapping[str, str]) -> None:
    """Raise ConfigError for a field that was changed but has no effect. `fields`: all of a form;
    `shown`: their texts when it was shown."""
    for name in changed(fields, shown):
        of, values = _NEEDS.get(name, ("", ()))
        is_now = fields.get(of, AS_WORKLOAD)
        if of and is_now not in values:
            raise ConfigError(
                f"{label(name)} needs {label(of)} = {' or '.join(values)}, and it is {is_now}: "
                f"{fields[name]!r} would change nothing"
            )


def of_the_form(
    options: Mapping[str, Mapping[str, Any]], shown: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Locust's description of our fields in the order of the form, with the text of each."""
    return {
        name: {**options[name], "default_value": shown[name]} for name in ALLOWED if name in options
    }


BY_HAND: Final = str(Path(__file__).with_name("by_hand.toml"))

KEYS: Final = {  # for the fields that set a single key
    "user_count": "run.users",
    "run_time": "run.max_seconds",
    "walkaway_most_streams": "run.most_streams",
    "walkaway_most_rate": "run.most_rate",
    "walkaway_stay_share": "load.stay_share",
    "walkaway_think": "load.think",
    "walkaway_prompt_tokens": "load.prompt_tokens",
    "walkaway_answer_tokens": "load.answer_tokens",
    "walkaway_stay_tokens": "load.stay_tokens",
    "walkaway_stop_after": "load.stop_after_abandons",
    "walkaway_timeout": "run.timeout_s",
    "walkaway_seed": "run.seed",
}
_LAST_STREAMS_S: Final = 60  # after the schedule, for streams that are still open
_DIGITS: Final = r"(?:0|[1-9][0-9]*)(?:\.[0-9]+)?"
_RANGE: Final = re.compile(rf"\s*({_DIGITS})\s*-\s*({_DIGITS})\s*")
_NUMBER: Final = re.compile(rf"\s*{_DIGITS}\s*")

# The field for each key that a refusal may name.
_JUDGED: Final = {key: name for name, key in KEYS.items()} | {
    "arrivals.rate": "walkaway_rate",
    "arrivals.max_streams": "walkaway_max_streams",
    "arrivals": "walkaway_rate",
    "arrivals.seconds": "run_time",
    "load.mix.0.seconds": "walkaway_seconds",
}
_PLACED: Final = re.compile(r"(?:--set [\w.]+|.*?\.toml): (.*)")
_KEY: Final = re.compile(r"`([\w.]+)`")


def form_settings(fields: Mapping[str, str]) -> list[str]:
    """The settings that the fields describe. Raises ConfigError for a text that cannot be one.

    `fields`: Locust's and ours by name; an empty one leaves the workload as it is.
    """
    settings = []
    for name, key in KEYS.items():
        if text := fields.get(name, "").strip():
            settings.append(f"{key}={_as_range(text) if name.endswith('prompt_tokens') else text}")
    return settings + _mix(fields) + _arrivals(fields)


def in_words_of_the_form(message: str, fields: Mapping[str, str]) -> str:
    """The refusal of the settings that these fields became, in terms of the fields."""
    lines = [_of_the_form(line, fields) for line in message.splitlines()]
    return "\n".join(dict.fromkeys(lines))


def _of_the_form(line: str, fields: Mapping[str, str]) -> str:
    if (placed := _PLACED.fullmatch(line)) is None or (key := _KEY.search(placed[1])) is None:
        return line
    name = _JUDGED.get(key[1], "")
    if text := fields.get(name, "").strip():
        return refused(name, text, fields)
    return placed[1] if line.startswith("--set") else line


def check_startable(workload: Workload) -> None:
    """Raise ConfigError for a workload that a web page cannot start and stop."""
    name, load = workload.name, workload.load
    if workload.arms:
        raise ConfigError(
            f"workload {name} has arms, which alternate by a plan; the web page starts one load: "
            "run it without --web"
        )
    if not isinstance(load, AbandonLoad):
        raise ConfigError(
            f"workload {name} directs its requests by a plan of its own; the web page starts "
            'users who leave (load.kind = "abandon"): run it without --web'
        )
    if held := HELD & {plan.way for plan in load.leavers}:
        raise ConfigError(
            f"way to leave: {', '.join(sorted(held))} leaves connections open, which must be held "
            "until the server has settled, and the users of the web page end before: take another "
            "way, or a workload that has it, without --web"
        )
    if workload.run.loops > 1:
        raise ConfigError(f"`run.loops` is {workload.run.loops}; the web page starts one: take 1")


def prefilled(workload: Workload) -> dict[str, str]:
    """The fields of the form as this workload fills them."""
    load, run = workload.load, workload.run
    assert isinstance(load, AbandonLoad)
    low, high = load.prompt_tokens
    return {
        "walkaway_arrivals": AS_WORKLOAD,
        "walkaway_leave": AS_WORKLOAD,
        "walkaway_most_streams": str(run.most_streams),
        "walkaway_most_rate": f"{run.most_rate:.10g}",
        "walkaway_stay_share": str(load.stay_share),
        "walkaway_think": str(load.think),
        "walkaway_prompt_tokens": f"{low}-{high}" if low != high else str(low),
        "walkaway_answer_tokens": str(load.answer_tokens),
        "walkaway_stay_tokens": str(load.stay_tokens),
        "walkaway_stop_after": str(load.stop_after_abandons or ""),
        "walkaway_timeout": f"{run.timeout_s:g}",
        "walkaway_seed": str(run.seed),
    }


def _mix(fields: Mapping[str, str]) -> list[str]:
    """The settings for how users leave; none if the workload decides. A field without effect is
    checked all the same."""
    leave = _choice(fields, "walkaway_leave", LEAVE, AS_WORKLOAD)
    way = _choice(fields, "walkaway_way", WAYS, "fin")
    tokens = _parsed(fields, "walkaway_tokens", _token_counts, is_needed=leave == "tokens")
    seconds = _parsed(fields, "walkaway_seconds", _seconds, is_needed=leave == "time")
    if leave == AS_WORKLOAD:
        return []
    more = {"tokens": f", tokens=[{tokens}]", "time": f", seconds={seconds}"}.get(leave, "")
    entry = f'{{plan="{leave}", way="{way}"{more}}}'
    return ["load.abandon_after_tokens=[]", f"load.mix=[{entry}]"]


def _arrivals(fields: Mapping[str, str]) -> list[str]:
    """The settings for when requests come; none if the workload decides. A field without effect is
    checked all the same."""
    kind = _choice(fields, "walkaway_arrivals", ARRIVALS, AS_WORKLOAD)
    is_at_a_rate = kind not in ("closed", AS_WORKLOAD)
    rate = _parsed(fields, "walkaway_rate", _number, is_needed=is_at_a_rate)
    if not is_at_a_rate:
        return ['arrivals={kind="closed"}'] if kind == "closed" else []
    if not (seconds := _parsed(fields, "run_time", _number, is_needed=False)):
        raise ConfigError("Arrivals at a rate need an end: give a run time, for example 60s")
    most = _parsed(fields, "walkaway_max_streams", _number, is_needed=False)
    more = f", max_streams={most}" if most else ""
    return [
        f'arrivals={{kind="{kind}", rate={rate}, seconds={seconds}{more}}}',
        f"run.max_seconds={float(seconds) + _LAST_STREAMS_S:g}",
    ]


def _choice(fields: Mapping[str, str], name: str, choices: Sequence[str], usual: str) -> str:
    chosen = fields.get(name) or usual
    if chosen not in choices:
        raise ConfigError(f"{label(name)}: must be one of {', '.join(choices)}, not {chosen!r}")
    return chosen


def _parsed(
    fields: Mapping[str, str], name: str, parse: Callable[[str], str | None], *, is_needed: bool
) -> str:
    """The text of a field as a setting; "" if it is empty and not needed. Raises ConfigError."""
    text = fields.get(name, "").strip()
    if not text and not is_needed:
        return ""
    if (value := parse(text)) is None:
        raise ConfigError(refused(name, text, fields))
    return value


def _number(text: str) -> str | None:
    return text if _NUMBER.fullmatch(text) else None


def _token_counts(text: str) -> str | None:
    counts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) <= MOST_TOKENS for part in counts):
        return None
    return ", ".join(counts)


def _seconds(text: str) -> str | None:
    return _as_range(text) if _RANGE.fullmatch(text) or _NUMBER.fullmatch(text) else None


def _as_range(text: str) -> str:
    """ "32-128" is [32, 128], and one number both its ends; anything else is left to the check."""
    if found := _RANGE.fullmatch(text):
        return f"[{found[1]}, {found[2]}]"
    return f"[{text}, {text}]" if _NUMBER.fullmatch(text) else text
