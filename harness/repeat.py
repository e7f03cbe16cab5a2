"""The line that repeats a run: what was typed, with its seed, and without the folder it filled.

Of a run that a web page started, what was typed has only opened the page: its line is made of the
order itself, with what stood in the form.
"""

import math
import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from harness.load.plan import AbandonLoad, LoadPlan
from harness.order import RunOrder

_SEED: Final = "run.seed="


def repeat_command(command: Sequence[str], *, seed: int) -> str:
    """A shell line that does the same again in a new folder; "" where nothing was typed.

    The seed stands in it, so that the line holds when the workload's own is changed. A hidden value
    of a header (`***`) is for whoever repeats it to fill in.
    """
    if not command:
        return ""
    kept = list(_without_folder(command))
    has_seed = any(argument.removeprefix("--set=").startswith(_SEED) for argument in kept)
    return shlex.join(kept if has_seed else [*kept, "--set", f"{_SEED}{seed}"])


def command_of(order: RunOrder, *, seed: int) -> str:
    """A shell line of `walkaway run` that does what this order says, in a new folder.

    Values of headers are hidden (`***`).
    """
    flags = {
        "--target": [] if order.target_url is None else [order.target_url],
        "--engine": [order.engine],
        "--model": [] if order.model is None else [order.model],
        "--metrics-url": order.metrics_urls,
        "--api-key-env": [] if order.api_key_env is None else [order.api_key_env],
        "--header": [f"{name}=***" for name in order.headers],
        "--ca-file": [] if order.ca_file is None else [order.ca_file],
        "--set": _last_of_each_key([*order.settings, f"{_SEED}{seed}"]),
    }
    typed = [text for flag, values in flags.items() for value in values for text in (flag, value)]
    scraping = [] if order.has_scraping else ["--no-scrape"]
    return shlex.join(["walkaway", "run", order.workload, *scraping, *typed])


def until_stopped(plan: LoadPlan, *, left: int, elapsed_s: float) -> list[str]:
    """The setting with which a load like this ends when it was stopped, in whole seconds; none for
    one that came to its own end. `left`: how many users had walked away."""
    enough = plan.load.stop_after_abandons if isinstance(plan.load, AbandonLoad) else None
    seconds = math.ceil(elapsed_s)
    is_at_its_end = seconds >= plan.max_seconds or (enough is not None and left >= enough)
    if plan.open_loop is not None or is_at_its_end:
        return []
    return [f"run.max_seconds={seconds}"]


def _last_of_each_key(settings: Iterable[str]) -> Iterable[str]:
    """Without those that a later one of the same key undoes."""
    kept: dict[str, str] = {}
    for setting in settings:
        key = setting.partition("=")[0]
        kept.pop(key, None)  # else it would keep the place of the first
        kept[key] = setting
    return kept.values()


def _without_folder(command: Sequence[str]) -> Iterator[str]:
    arguments = iter(command)
    for argument in arguments:
        if argument == "--out":
            next(arguments, None)
        elif not argument.startswith("--out="):
            yield argument
