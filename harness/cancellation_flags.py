"""AIPerf's two flags for cancelling, as settings of a workload's `[load]`.

`--request-cancellation-rate` is the percentage of the requests that are cancelled,
`--request-cancellation-delay` how many seconds after a request was fully sent. That clock is our
plan `time`, since "sent".
"""

from harness.config import Workload, load_workload
from harness.errors import ConfigError
from harness.values import LONGEST_S

_RATE = "--request-cancellation-rate"
_DELAY = "--request-cancellation-delay"
_SET_BY_FLAGS = ("stay_share", "mix", "abandon_after_tokens")


def cancellation_settings(workload: str, *, rate: float | None, delay_s: float | None) -> list[str]:
    """As if typed with `--set`; none without the flags. Raises ConfigError."""
    if rate is None:
        if delay_s is not None:
            raise ConfigError(f"{_DELAY}: say with {_RATE} how many percent of the requests")
        return []
    if not 0 <= rate <= 100:
        raise ConfigError(f"{_RATE} {rate:g}: must be a percentage from 0 to 100")
    _check_free_to_choose(load_workload(workload))
    delay_s = 0.0 if delay_s is None else delay_s
    if not 0 <= delay_s <= LONGEST_S:
        raise ConfigError(f"{_DELAY} {delay_s:g}: must be seconds from 0 to {LONGEST_S}")
    return [
        f"load.stay_share={1 - rate / 100!r}",
        f'load.mix=[{{plan="time", seconds={delay_s!r}, since="sent"}}]',
        "load.abandon_after_tokens=[]",
    ]


def _check_free_to_choose(workload: Workload) -> None:
    """Neither a kind of load nor an arm may say itself who leaves, and when."""
    if workload.load.kind != "abandon":
        raise ConfigError(f"{_RATE}: workload {workload.name} decides itself who leaves, and when")
    for arm in workload.arms:
        if own := [key for key in _SET_BY_FLAGS if key in arm.load]:
            raise ConfigError(
                f"{_RATE}: arm `{arm.name}` of workload {workload.name} says itself who leaves "
                f"(`load.{own[0]}`): take a workload whose arms do not"
            )
