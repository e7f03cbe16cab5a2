"""Does the server stop? Judged in seconds, by any way, against controls.

In a control an answer ends by itself, and the slot it had changes hands. A try is long if it takes
longer than the slowest control by more than a harm: some steps and a tenth of a second.

- The slot never came back in a try, though it did in each control: the server does not stop.
- `k` of `n` tries are long, and there are `m` controls. If the server treated leaves as it treats
  ends, each order of the `n + m` times would be equally likely, and the `k` longest would all be
  tries with a probability of C(n, k) / C(n + m, k). At 2 % or less the server does not stop.
- No try is long, or a few are and all came well before the answers' ends: the server stops.
- Otherwise the question is open.

A look comes before the test: all tries, and one control. If no try is long and no stream stalled,
it acquits: the test would have, since more controls only raise the slowest. Else the test is made
afresh, and the look counts for nothing, so that the test's probability of a false alarm holds. To
stop early only in order to acquit never raises it (stopping for futility: Jennison and Turnbull,
Group Sequential Methods, 2000).

Streams that stayed are judged by the same rule: a stall in the tries and in no control is harm that
the server does, not a slow machine.
"""

from collections.abc import Sequence
from math import comb
from statistics import median
from typing import Final, NamedTuple

from harness.experiments.holds import Holds
from harness.formatting import quantity
from harness.store.conform_result import Failure, JudgingWay

AT_MEDIAN: Final = "at the median"
HARM_S: Final = 0.1
STALL_S: Final = 0.05
MOST_FALSE_ALARM: Final = 0.02
_SURELY_EARLY: Final = 0.8  # of the time to an answer's own end
_FLUSH_SPREAD: Final = 1.25
_LEAST_SHOWN_S: Final = 1e-3
ANOTHER_LOAD: Final = (
    "either another load uses this server, or it hands slots over late when answers end, too"
)
# What a leave is to bring about, by each way; and what it did not.
_BACK: Final[dict[JudgingWay, str]] = {
    "full_slots": "the slot worked for another request",
    "admission": "another request was admitted",
    "gauge": "the gauge of running requests fell",
    "pace": "the pace of another stream came back",
    "quiet": "the server came to rest",
}
_NOT_BACK: Final[dict[JudgingWay, str]] = {
    "full_slots": "the slot worked for no other request",
    "admission": "no other request was admitted",
    "gauge": "the gauge of running requests did not fall",
    "pace": "the pace of another stream did not come back",
    "quiet": "the server did not come to rest",
}
_OF_ENDS: Final[dict[JudgingWay, str]] = {
    "full_slots": "as slots that change hands by themselves do",
    "admission": "as after answers that ended by themselves",
}
_LIKE_ENDS: Final = "as after answers that ended by themselves"


class Stopping(NamedTuple):
    """`failure`: LATE or NEVER where `stops` is False. `false_alarm`: the probability that a server
    which treats leaves as it treats ends would be called late; None where nothing was late."""

    stops: bool | None
    failure: Failure | None
    said: str
    false_alarm: float | None = None


def false_alarm(longer: int, tries: int, controls: int) -> float:
    """The probability that the `longer` longest of all times are tries, by chance alone."""
    return comb(tries, longer) / comb(tries + controls, longer)


def judge_stopping(holds: Holds, harm_s: float) -> Stopping:
    """`harm_s`: by how much a try must exceed the slowest control to be long."""
    tries, controls = holds.tries_s, holds.controls_s
    if not tries:
        return Stopping(None, None, "no client could leave")
    if not controls:
        return Stopping(None, None, "no answer ended by itself, so there is no control")
    if None in tries:
        return _judge_missing(holds)
    came = [one for one in tries if one is not None]
    slowest_s, longest_s = max(controls), max(came)
    longer = sum(one > slowest_s + harm_s for one in came)
    chance = false_alarm(longer, len(came), len(controls)) if longer else None
    if chance is not None and chance <= MOST_FALSE_ALARM:
        return Stopping(
            stops=False, failure=Failure.LATE, said=_late(holds, longer), false_alarm=chance
        )
    if not longer:
        if holds.natural_s is not None and longest_s > _SURELY_EARLY * holds.natural_s:
            return Stopping(None, None, _at_the_end(holds))
        return Stopping(stops=True, failure=None, said=_good(holds, _LIKE_ENDS))
    is_early = holds.natural_s is not None and 2 * longest_s <= holds.natural_s
    if 2 * longer <= len(came) and is_early:
        before = f"well before the answers' ends, {quantity(holds.natural_s, 's')} later"
        return Stopping(stops=True, failure=None, said=_good(holds, before), false_alarm=chance)
    return Stopping(None, None, _open(holds, longer), chance)


def is_suspicious(holds: Holds, harm_s: float, step_s: float, flush_s: float) -> bool:
    """A try is long, or a stream that stayed was cut or stalled: a look does not acquit."""
    slowest_s = max(holds.controls_s, default=0.0)
    is_long = any(one is None or one > slowest_s + harm_s for one in holds.tries_s)
    return is_long or bool(holds.cuts) or bool(_long_stalls(holds, step_s, flush_s))


def _long_stalls(holds: Holds, step_s: float, flush_s: float) -> int:
    """Half of a hold at least must be a stall: a longer wait sees longer gaps."""
    stalls, controls = holds.stalls_s, holds.control_stalls_s
    if not stalls or not controls:
        return 0
    came = [one for one in holds.tries_s if one is not None]
    if came and 2 * median(stalls) < median(came):
        return 0
    least_s = max(*controls, _FLUSH_SPREAD * flush_s) + max(STALL_S, 4 * step_s)
    return sum(one > least_s for one in stalls)


def judge_stalls(holds: Holds, step_s: float, flush_s: float) -> str | None:
    """What the leaves did to streams that stayed; None if nothing that the controls did not.
    `flush_s`: between two flushes."""
    if holds.cuts:
        return f"a stream that stayed was cut as another one left: {holds.cuts[0]}"
    stalls, controls = holds.stalls_s, holds.control_stalls_s
    longer = _long_stalls(holds, step_s, flush_s)
    is_chance = not longer or false_alarm(longer, len(stalls), len(controls)) > MOST_FALSE_ALARM
    if is_chance and not _stood_still(holds):
        return None
    return (
        "each leave stops the streams that stayed: they stood still for "
        f"{quantity(median(stalls), 's')} at the median ({_of(longer, stalls)}), and for at most "
        f"{quantity(max(controls), 's')} where answers ended by themselves"
    )


def _stood_still(holds: Holds) -> bool:
    """No slot came back, since nothing moved for most of the wait."""
    stalls, controls = holds.stalls_s, holds.control_stalls_s
    is_missing = None in holds.tries_s and bool(stalls) and bool(controls)
    return is_missing and min(stalls) > holds.waited_s / 2 > 2 * max(controls)


def _judge_missing(holds: Holds) -> Stopping:
    missing, slowest_s = sum(one is None for one in holds.tries_s), max(holds.controls_s)
    not_back = _NOT_BACK.get(holds.way, _NOT_BACK["full_slots"])
    said = (
        f"{not_back} within {quantity(holds.waited_s, 's')} after the client left "
        f"({_of(missing, holds.tries_s)})"
    )
    if 2 * slowest_s > holds.waited_s:
        late = f"the control, an answer that ended by itself, took {quantity(slowest_s, 's')}"
        return Stopping(None, None, f"{said}, but {late}: {ANOTHER_LOAD}")
    said += f"; after answers that ended by themselves it took at most {_shown(holds, slowest_s)}"
    return Stopping(stops=False, failure=Failure.NEVER, said=said)


def _late(holds: Holds, longer: int) -> str:
    came = [one for one in holds.tries_s if one is not None]
    back = _BACK.get(holds.way, _BACK["full_slots"])
    return (
        f"{quantity(median(came), 's')} {AT_MEDIAN} until {back}, far longer in "
        f"{_of(longer, came)} than the {_shown(holds, max(holds.controls_s))} at most "
        "after answers that ended by themselves"
    )


def _good(holds: Holds, how: str) -> str:
    came = [one for one in holds.tries_s if one is not None]
    if how is _LIKE_ENDS:
        how = f"{_OF_ENDS.get(holds.way, how)} ({_shown(holds, max(holds.controls_s))})"
    each = f"each of {len(came)} tries" if len(came) > 1 else "one try"
    return f"it stops: within {_shown(holds, max(came))} in {each}, {how}"


def _open(holds: Holds, longer: int) -> str:
    came = [one for one in holds.tries_s if one is not None]
    return (
        f"{_of(longer, came)} took longer than the slowest control "
        f"({_shown(holds, max(came))} at worst, {_shown(holds, max(holds.controls_s))} where "
        "answers ended by themselves): too uneven to say whether the server stops"
    )


def _at_the_end(holds: Holds) -> str:
    came = [one for one in holds.tries_s if one is not None]
    return (
        f"{_shown(holds, max(came))} at worst, when the answers that were left would have ended "
        f"by themselves ({quantity(holds.natural_s, 's')}): a longer answer is needed"
    )


def _of(some: int, tries: Sequence[float | None]) -> str:
    return f"{some} of {len(tries)} {'tries' if len(tries) > 1 else 'try'}"


def _shown(holds: Holds, seconds: float) -> str:
    return quantity(max(seconds, holds.floor_s, _LEAST_SHOWN_S), "s")
