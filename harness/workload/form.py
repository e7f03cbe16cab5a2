"""The start form of the web page: one table of its fields, which become settings of a workload."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from harness.errors import ConfigError
from harness.records import Protocol, Way
from harness.workload.arrivals import MAX_STREAMS
from harness.workload.load import AbandonLoad
from harness.workload.values import LARGEST_INT, LONGEST_S, MOST_STREAMS, MOST_TOKENS, TomlTable
from harness.workload.workload import USUAL_RATE, USUAL_STREAMS, RunSettings, Workload

BY_HAND: Final = str(Path(__file__).with_name("by_hand.toml"))
AS_WORKLOAD: Final = "workload"
OURS: Final = "walkaway_"
HOST: Final = "Host"  # Locust's own field
_LAST_STREAMS_S: Final = 60  # after the schedule, for streams that are still open
_DIGITS: Final = r"(?:0|[1-9][0-9]*)(?:\.[0-9]+)?"
_RANGE: Final = re.compile(rf"({_DIGITS})\s*-\s*({_DIGITS})")
_NUMBER: Final = re.compile(_DIGITS)
_PLANS: Final = ("tokens", "time", "prefill", "queued", "last_token")
_PLACE: Final = re.compile(rf"^(?:--set [\w.]+|{re.escape(BY_HAND)}): ", re.MULTILINE)
_KEY: Final = re.compile(r"`([\w.]+)`")


def _number(text: str) -> str | None:
    return text if _NUMBER.fullmatch(text) else None


def _token_counts(text: str) -> str | None:
    counts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) <= MOST_TOKENS for part in counts):
        return None
    return f"[{', '.join(counts)}]"


def _range(text: str) -> str | None:
    found = _RANGE.fullmatch(text)
    low, high = (found[1], found[2]) if found else (text, text)
    if not (_NUMBER.fullmatch(low) and float(low) <= float(high)):
        return None
    return f"[{low}, {high}]"


def _whole_range(text: str) -> str | None:
    return None if "." in text else _range(text)


def _seconds(text: str) -> str | None:
    return text if _NUMBER.fullmatch(text) and 0 < float(text) <= LONGEST_S else None


# Locust's own fields, and their flags.
_LOCUSTS: Final = {"user_count": "--users", "spawn_rate": "--spawn-rate", "run_time": "--run-time"}


class FormField(NamedTuple):
    """A field of Locust's (`_LOCUSTS`), or one of ours, whose `id` has a prefix.

    `label`: what the form calls it, with its unit; `help` explains it, also in Locust's own help.
    `group`: the heading in the form under which it and the fields after it stand.
    `key`: the key of the workload that it sets; its range is allowed, unless `allowed` says more.
    `default`: its text under plain Locust. `parse`: from its text to TOML, None for a wrong text.
    `needs`: the id of a field, and its values, without which this one has no effect.
    """

    name: str
    label: str
    key: str = ""
    default: str = ""
    help: str = ""
    allowed: str = ""
    choices: Sequence[str] = ()
    parse: Callable[[str], str | None] = str
    needs: tuple[str, Sequence[str]] = ("", ())
    group: str = ""
    is_shown: bool = True

    @property
    def is_ours(self) -> bool:
        return self.name not in _LOCUSTS

    @property
    def id(self) -> str:
        return f"{OURS}{self.name}" if self.is_ours else self.name

    @property
    def flag(self) -> str:
        return _LOCUSTS.get(self.name, f"--{self.id.replace('_', '-')}")

    @property
    def range(self) -> str:
        return self.allowed or _range_of(self.key)

    @property
    def hint(self) -> str:
        return "; ".join(filter(None, (self.range, self.help)))

    def value(self, text: str, called: "Called") -> str:
        if self.choices and text and text not in self.choices:
            raise ConfigError(
                f"{called(self)} must be one of {', '.join(self.choices)}, not {text!r}"
            )
        value = self.parse(text) if text else ""
        if value is None:
            raise ConfigError(refused(self, text, called))
        return value


# How a refusal calls a field: as the form does, or on the command line of plain Locust.
Called = Callable[[FormField], str]


def by_label(field: FormField) -> str:
    return f'"{field.label}"' if field.is_shown else f"`{field.key}`"


def by_flag(field: FormField) -> str:
    return field.flag


def refused(field: FormField, text: str, called: Called = by_label) -> str:
    return f"{called(field)} must be {field.range}, not {text!r}"


def _range_of(key: str) -> str:
    section, _, name = key.partition(".")
    if not key:
        return ""
    model: type[TomlTable] = RunSettings if section == "run" else AbandonLoad
    ends = model.model_fields[name].metadata
    limits = {by: getattr(end, by) for end in ends for by in ("gt", "ge", "le") if hasattr(end, by)}
    least = f"more than {limits['gt']}" if "gt" in limits else f"from {limits['ge']}"
    return f"{least} on" if limits["le"] == LARGEST_INT else f"{least} to {limits['le']:,}"


# The fields in the order of the form, the caps first.
_TABLE: Final = (
    FormField(
        "user_count",
        "Number of users",
        "run.users",
        needs=("walkaway_arrivals", ("closed", AS_WORKLOAD)),
    ),
    FormField("spawn_rate", "Ramp up", allowed=f"more than 0 to {MOST_STREAMS:,} users a second"),
    FormField(
        "run_time",
        "Run time",
        "run.max_seconds",
        allowed=f"more than 0 and at most {LONGEST_S:,} seconds",
        parse=_seconds,
    ),
    FormField(
        "most_streams",
        "Most streams",
        "run.most_streams",
        help=f"more users or open streams are refused; empty: {USUAL_STREAMS:,}",
        is_shown=False,
    ),
    FormField(
        "most_rate",
        "Highest rate",
        "run.most_rate",
        help=f"more arrivals a second are refused; empty: {USUAL_RATE:,.0f}",
        is_shown=False,
    ),
    FormField(
        "engine",
        "Kind of server",
        group="Server",
        default="reference",
        help="a name from `walkaway targets`; reference without a Host: it is started",
    ),
    FormField("model", "Model", help="its name on the server; empty: the server's only one"),
    FormField(
        "leave",
        "When users leave",
        group="Leaving",
        default="tokens",
        help="after some tokens or a time, in the prefill, ...; workload: as its file says",
        choices=(*_PLANS, AS_WORKLOAD),
    ),
    FormField(
        "tokens",
        "Leave after (tokens)",
        default="1,16,64",
        help="one of these counts; if they leave by tokens",
        allowed=f"numbers from 0 to {MOST_TOKENS:,} with commas between",
        parse=_token_counts,
        needs=("walkaway_leave", ("tokens",)),
    ),
    FormField(
        "seconds",
        "Leave after (seconds)",
        default="0.1-2",
        help="since the sending, a number or lowest-highest; if they leave by time",
        allowed=f"seconds from 0 to {LONGEST_S:,}, or lowest-highest",
        parse=_range,
        needs=("walkaway_leave", ("time",)),
    ),
    FormField(
        "way",
        "Way to leave",
        default="fin",
        help="how the connection ends; not if they leave as the workload says",
        choices=tuple(way.value for way in Way if way.over(Protocol.HTTP) and not way.stays_open),
        needs=("walkaway_leave", _PLANS),
    ),
    FormField(
        "stay_share",
        "Share who stay",
        "load.stay_share",
        "0.25",
        "of all requests: read to their end",
    ),
    FormField(
        "think",
        "Pause before leaving",
        "load.think",
        "step",
        "step: a random part of one step of the engine",
        allowed=f'"step", "none", or seconds from 0 to {LONGEST_S:,}',
    ),
    FormField(
        "prompt_tokens",
        "Prompt (tokens)",
        "load.prompt_tokens",
        "64",
        "of each request",
        group="Requests",
        allowed=f"a whole number from 1 to {MOST_TOKENS:,}, or lowest-highest",
        parse=_whole_range,
    ),
    FormField(
        "answer_tokens",
        "Answer, if they leave (tokens)",
        "load.answer_tokens",
        "1000",
        "the longest answer that they ask for",
    ),
    FormField(
        "stay_tokens",
        "Answer, if they stay (tokens)",
        "load.stay_tokens",
        "128",
        "the longest answer that they ask for",
    ),
    FormField(
        "arrivals",
        "Arrivals",
        group="Arrivals",
        default="closed",
        help="closed: users wait for their answers; poisson, constant: requests come at a rate",
        choices=("closed", "poisson", "constant", AS_WORKLOAD),
    ),
    FormField(
        "rate",
        "Rate (requests a second)",
        default="1",
        help="for the run time; if arrivals are poisson or constant",
        allowed=f"more than 0 to {USUAL_RATE:,.0f} a second",
        parse=_number,
        needs=("walkaway_arrivals", ("poisson", "constant")),
    ),
    FormField(
        "max_streams",
        "Most open streams",
        help="arrivals at a rate: at most this many are open at once, others wait; "
        f"empty: {MAX_STREAMS:,}",
        allowed=f"from 1 to {USUAL_STREAMS:,}",
        parse=_number,
        is_shown=False,
    ),
    FormField(
        "stop_after",
        "Stop after (abandons)",
        "load.stop_after_abandons",
        group="End and seed",
        help="ends the load; empty: only its time or Stop does",
        allowed="a whole number from 1 on, or empty",
    ),
    FormField("timeout", "Timeout (seconds)", "run.timeout_s", "60", "longest wait for a byte"),
    FormField("seed", "Seed", "run.seed", "0", "every random choice follows from it"),
)
FIELDS: Final[Mapping[str, FormField]] = {one.id: one for one in _TABLE}
_BY_LABEL: Final = {one.label: one.id for one in _TABLE if one.is_ours}
_LABELS: Final = tuple(one.label for one in _TABLE if one.is_shown)
_BY_KEY: Final = {one.key: one for one in _TABLE if one.key} | {
    "arrivals": FIELDS["walkaway_arrivals"],
    "arrivals.rate": FIELDS["walkaway_rate"],
    "arrivals.seconds": FIELDS["run_time"],
    "arrivals.max_streams": FIELDS["walkaway_max_streams"],
    "load.mix.0.seconds": FIELDS["walkaway_seconds"],
    "load.mix.0.tokens": FIELDS["walkaway_tokens"],
}


def label_in(refusal: str) -> str | None:
    """The label of the field that a refusal names first, also of Locust's own."""
    named = {refusal.find(f'"{label}"'): label for label in (*_LABELS, HOST)}
    return named[min(at for at in named if at >= 0)] if max(named) >= 0 else None


def described_fields() -> list[dict[str, str]]:
    """What the form shows with each of our fields."""
    return [
        {"label": one.label, "group": one.group, "hint": one.hint}
        for one in _TABLE
        if one.is_ours and one.is_shown
    ]


def by_id(form: Mapping[str, str]) -> dict[str, str]:
    """A form as it was sent, in which our fields are called by their labels."""
    return {_BY_LABEL.get(name, name): text for name, text in form.items()}


def check_each_applies(fields: Mapping[str, str], shown: Mapping[str, str]) -> None:
    """Raise ConfigError for a field that was changed but has no effect. `fields`: all of a form;
    `shown`: their texts when it was shown."""
    for name, text in fields.items():
        one = FIELDS.get(name)
        if one is None or text.strip() == shown.get(name, "").strip():
            continue
        other, values = one.needs
        is_now = fields.get(other, AS_WORKLOAD)
        if other and is_now not in values:
            raise ConfigError(
                f"{by_label(one)} needs {by_label(FIELDS[other])} = {' or '.join(values)}, and "
                f"it is {is_now}: {text!r} would change nothing"
            )


def form_settings(fields: Mapping[str, str], called: Called = by_label) -> list[str]:
    """`fields`: Locust's and ours by name; an empty one leaves the workload as it is. Raises
    ConfigError for a text that cannot be a setting."""
    values = {name: one.value(fields.get(name, "").strip(), called) for name, one in FIELDS.items()}
    settings = [f"{one.key}={values[one.id]}" for one in _TABLE if one.key and values[one.id]]
    leave = values["walkaway_leave"] or AS_WORKLOAD
    needed = {"tokens": "walkaway_tokens", "time": "walkaway_seconds"}.get(leave)
    kind = values["walkaway_arrivals"] or AS_WORKLOAD
    is_at_a_rate = kind not in ("closed", AS_WORKLOAD)
    for name in (needed, "walkaway_rate" if is_at_a_rate else None):
        if name is not None and not values[name]:
            raise ConfigError(refused(FIELDS[name], "", called))
    if leave != AS_WORKLOAD:
        more = "" if needed is None else f", {needed.removeprefix(OURS)}={values[needed]}"
        entry = f'{{plan="{leave}", way="{values["walkaway_way"] or "fin"}"{more}}}'
        settings += ["load.abandon_after_tokens=[]", f"load.mix=[{entry}]"]
    if kind == "closed":
        settings.append('arrivals={kind="closed"}')
    elif is_at_a_rate:
        settings += _arrivals(kind, values, called)
    return settings


def _arrivals(kind: str, values: Mapping[str, str], called: Called) -> list[str]:
    if not (seconds := values["run_time"]):
        end = called(FIELDS["run_time"])
        raise ConfigError(f"arrivals at a rate need an end: give {end}, for example 60s")
    most = values["walkaway_max_streams"]
    more = f", max_streams={most}" if most else ""
    whole_s = min(float(seconds) + _LAST_STREAMS_S, LONGEST_S)
    return [
        f'arrivals={{kind="{kind}", rate={values["walkaway_rate"]}, seconds={seconds}{more}}}',
        f"run.max_seconds={whole_s:g}",
    ]


def about_fields(refusal: str, called: Called = by_label) -> str:
    """A refusal of settings that fields have made: it names the fields, as no file and no `--set`
    holds them."""

    def field_of(key: re.Match[str]) -> str:
        return called(_BY_KEY[key[1]]) if key[1] in _BY_KEY else key[0]

    return _KEY.sub(field_of, _PLACE.sub("", refusal))


def check_startable(workload: Workload) -> None:
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
    if held := {plan.way for plan in load.leavers if plan.way.stays_open}:
        raise ConfigError(
            f"way to leave: {', '.join(sorted(held))} leaves connections open, which must be held "
            "until the server has settled, and the users of the web page end before: take another "
            "way, or a workload that has it, without --web"
        )
    if workload.run.loops > 1:
        raise ConfigError(f"`run.loops` is {workload.run.loops}; the web page starts one: take 1")


def prefilled(workload: Workload) -> dict[str, str]:
    fields = {"walkaway_arrivals": AS_WORKLOAD, "walkaway_leave": AS_WORKLOAD}
    for one in _TABLE:
        if one.key and one.is_ours:
            section, _, key = one.key.partition(".")
            fields[one.id] = _text_of(getattr(getattr(workload, section), key))
    return fields


def _text_of(value: object) -> str:
    match value:
        case None:
            return ""
        case [low, high]:
            return f"{low}-{high}" if low != high else str(low)
        case _:
            return str(value).removesuffix(".0")
