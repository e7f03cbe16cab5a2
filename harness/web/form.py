"""The start form of the web page: settings of a workload, out of what stands in its fields.

So the same checks judge them as a file. What is wrong is said in words of the form: the field, what
stood in it, and what it allows.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from harness.config import Workload
from harness.errors import ConfigError
from harness.load.options import ARRIVALS, AS_WORKLOAD, HELD, LEAVE, WAYS
from harness.load.plan import AbandonLoad
from harness.load_caps import USUAL_RATE, USUAL_STREAMS
from harness.load_settings import AbandonSettings
from harness.mix_settings import NeverEntry, slice_values
from harness.values import LARGEST_INT, LONGEST_S, MOST_STREAMS, MOST_TOKENS

BY_HAND: Final = str(Path(__file__).with_name("by_hand.toml"))

# Each field that sets a single key: the key, and what may stand there.
KEYS: Final = {
    "user_count": ("run.users", "1 to {most_streams}"),
    "run_time": ("run.max_seconds", f"more than 0 s, to {LONGEST_S} s"),
    "walkaway_most_streams": ("run.most_streams", f"1 to {MOST_STREAMS}"),
    "walkaway_stay_share": ("load.stay_share", "0 to 1"),
    "walkaway_think": ("load.think", f'"step", "none", or seconds from 0 to {LONGEST_S}'),
    "walkaway_prompt_tokens": ("load.prompt_tokens", f"1 to {MOST_TOKENS}, or lowest-highest"),
    "walkaway_answer_tokens": ("load.answer_tokens", f"1 to {MOST_TOKENS}"),
    "walkaway_stay_tokens": ("load.stay_tokens", f"1 to {MOST_TOKENS}"),
    "walkaway_stop_after": ("load.stop_after_abandons", f"1 to {LARGEST_INT}, or empty: no limit"),
    "walkaway_timeout": ("run.timeout_s", f"more than 0 s, to {LONGEST_S} s"),
    "walkaway_seed": ("run.seed", f"0 to {LARGEST_INT}"),
}
_LAST_STREAMS_S: Final = 60  # beyond the schedule, for streams that are still open then
_TOKENS_ALLOWED: Final = f"numbers from 0 to {MOST_TOKENS} with commas between"
_RATE_ALLOWED: Final = f"more than 0, to {USUAL_RATE:.0f} (or the workload's own most) a second"
_SECONDS_ALLOWED: Final = f"0 to {LONGEST_S}, or lowest-highest"
_DIGITS: Final = r"(?:0|[1-9][0-9]*)(?:\.[0-9]+)?"
_RANGE: Final = re.compile(rf"\s*({_DIGITS})\s*-\s*({_DIGITS})\s*")
_NUMBER: Final = re.compile(rf"\s*{_DIGITS}\s*")

# The fields and what may stand there, by the keys whose checks judge them.
_JUDGED: Final = {key: (name, allowed) for name, (key, allowed) in KEYS.items()} | {
    "arrivals.rate": ("walkaway_rate", _RATE_ALLOWED),
    "run.most_rate": ("walkaway_rate", _RATE_ALLOWED),
    "arrivals.seconds": ("run_time", KEYS["run_time"][1]),
    "load.mix.0.seconds": ("walkaway_seconds", _SECONDS_ALLOWED),
}
_PLACED: Final = re.compile(r"(?:--set [\w.]+|.*?\.toml): (.*)")
_KEY: Final = re.compile(r"`([\w.]+)`")


def form_settings(fields: Mapping[str, str]) -> list[str]:
    """The settings that the fields describe. Raises ConfigError for what cannot even be one.

    `fields`: Locust's and ours by name, as text; an empty one leaves the workload as it is.
    """
    settings = []
    for name, (key, _) in KEYS.items():
        if text := fields.get(name, "").strip():
            settings.append(f"{key}={_as_range(text) if name.endswith('prompt_tokens') else text}")
    return settings + _mix(fields) + _arrivals(fields)


def in_words_of_the_form(message: str, fields: Mapping[str, str]) -> str:
    """What is wrong with the settings that these fields became, said of the fields.

    A form knows no keys, flags and files; what no field says is left as it was.
    """
    lines = [_of_the_form(line, fields) for line in message.splitlines()]
    return "\n".join(dict.fromkeys(lines))


def _of_the_form(line: str, fields: Mapping[str, str]) -> str:
    if (placed := _PLACED.fullmatch(line)) is None or (key := _KEY.search(placed[1])) is None:
        return line
    name, allowed = _JUDGED.get(key[1], ("", ""))
    if text := fields.get(name, "").strip():
        most_streams = fields.get("walkaway_most_streams", "") or USUAL_STREAMS
        return _refused(name, text, allowed.format(most_streams=most_streams))
    return placed[1] if line.startswith("--set") else line


def _refused(field: str, text: str, allowed: str) -> str:
    name = field.removeprefix("walkaway_").replace("_", " ")
    return f"{name}: {text!r} is refused; allowed: {allowed}"


def simple_load(workload: Workload) -> AbandonLoad:
    """The load of a form without a run: one way of leaving, and those who stay."""
    load = workload.load
    assert isinstance(load, AbandonSettings)
    leaver, stay = load.leavers[0], NeverEntry(plan="never")
    mix = [
        slice_values(leaver, {}, Path()) | {"weight": 1 - load.stay_share},
        slice_values(stay, {}, Path()) | {"weight": load.stay_share},
    ]
    return msgspec.convert({**load.model_dump(), "mix": mix}, type=AbandonLoad)


def check_startable(workload: Workload) -> None:
    """Raise ConfigError for a workload that cannot be started and stopped by hand."""
    name, load = workload.name, workload.load
    if workload.arms:
        raise ConfigError(
            f"workload {name} has arms, which alternate by a plan; the web page starts one load: "
            "run it without --web"
        )
    if not isinstance(load, AbandonSettings):
        raise ConfigError(
            f"workload {name} directs its requests by a plan of its own; the web page starts "
            'users who leave (load.kind = "abandon"): run it without --web'
        )
    if held := HELD & {entry.way for entry in load.leavers}:
        raise ConfigError(
            f"way to leave: {', '.join(sorted(held))} leaves connections open, which must be held "
            "until the server has settled, and the users of the web page end before: take another "
            "way, or a workload that has it, without --web"
        )
    if workload.run.loops > 1:
        raise ConfigError(f"`run.loops` is {workload.run.loops}; the web page starts one: take 1")


def prefilled(workload: Workload) -> dict[str, str]:
    """What stands in the fields of a form for this workload."""
    load, run = workload.load, workload.run
    assert isinstance(load, AbandonSettings)
    low, high = load.prompt_tokens
    return {
        "walkaway_arrivals": AS_WORKLOAD,
        "walkaway_leave": AS_WORKLOAD,
        "walkaway_most_streams": str(run.most_streams),
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
    """The settings for how users leave; none where it is as the workload says."""
    leave, way = fields.get("walkaway_leave", AS_WORKLOAD), fields.get("walkaway_way") or "fin"
    if leave == AS_WORKLOAD:
        return []
    if leave not in LEAVE:
        raise ConfigError(f"abandon plan: must be one of {', '.join(LEAVE)}, not {leave!r}")
    if way not in WAYS:
        raise ConfigError(f"way to leave: must be one of {', '.join(WAYS)}, not {way!r}")
    more = ""
    if leave == "tokens":
        more = f", tokens=[{_token_counts(fields.get('walkaway_tokens', ''))}]"
    elif leave == "time":
        more = f", seconds={_seconds(fields.get('walkaway_seconds', ''))}"
    entry = f'{{plan="{leave}", way="{way}"{more}}}'
    return ["load.abandon_after_tokens=[]", f"load.mix=[{entry}]"]


def _arrivals(fields: Mapping[str, str]) -> list[str]:
    """The settings for when requests come; none where it is as the workload says."""
    kind = fields.get("walkaway_arrivals", AS_WORKLOAD)
    if kind == AS_WORKLOAD:
        return []
    if kind == "closed":
        return ['arrivals={kind="closed"}']
    if kind not in ARRIVALS:
        raise ConfigError(f"arrivals: must be one of {', '.join(ARRIVALS)}, not {kind!r}")
    rate, seconds = fields.get("walkaway_rate", "").strip(), fields.get("run_time", "").strip()
    if not _NUMBER.fullmatch(rate):
        raise ConfigError(_refused("walkaway_rate", rate, _RATE_ALLOWED))
    if not seconds:
        raise ConfigError("arrivals at a rate need an end: give a run time, for example 60s")
    if not _NUMBER.fullmatch(seconds):
        raise ConfigError(_refused("run_time", seconds, KEYS["run_time"][1]))
    return [
        f'arrivals={{kind="{kind}", rate={rate}, seconds={seconds}}}',
        f"run.max_seconds={float(seconds) + _LAST_STREAMS_S:g}",
    ]


def _token_counts(text: str) -> str:
    counts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) <= MOST_TOKENS for part in counts):
        raise ConfigError(_refused("walkaway_tokens", text, _TOKENS_ALLOWED))
    return ", ".join(counts)


def _seconds(text: str) -> str:
    if not (_RANGE.fullmatch(text) or _NUMBER.fullmatch(text)):
        raise ConfigError(_refused("walkaway_seconds", text, _SECONDS_ALLOWED))
    return _as_range(text)


def _as_range(text: str) -> str:
    """ "32-128" is [32, 128], and one number both its ends; anything else is left to the check."""
    if found := _RANGE.fullmatch(text):
        return f"[{found[1]}, {found[2]}]"
    return f"[{text}, {text}]" if _NUMBER.fullmatch(text) else text
