"""The idle server, measured before the first experiment: its slots, its step, its first-token time.

Slots that were named are checked, and others are counted, by how many requests run at once.
"""

from collections.abc import Sequence
from statistics import median
from typing import Final, NamedTuple

from harness.errors import TargetError
from harness.experiments.limit import find_limit
from harness.experiments.outcome import CannotDecideError
from harness.experiments.patience import READY_S
from harness.load.live import LiveStream, join_all
from harness.load.rows import most_at_once
from harness.load.session import LoadSession
from harness.records import Outcome, RequestRow, Role
from harness.workload.abandon import RequestSpec

MOST_SLOTS: Final = 64  # more streams at once would be a load of their own
PROMPT_TOKENS: Final = 24
TOGETHER_TOKENS: Final = 32  # of requests that are to run at once: they hold their slots so long
ANOTHER_LOAD: Final = "another load runs beside this one, or slots are always handed over late"
_IDLE_PROBES: Final = 7
_LONGEST_TOGETHER: Final = 512  # tokens
_LEAST_STEP_S: Final = 1e-4  # shorter, and the answer was there before


class _NotServedError(Exception):
    """Of some requests at once one was not answered."""


class Facts(NamedTuple):
    """The server when it is idle. `slots`: None if none were found, and `why`. `refuses`: beyond
    its slots it refuses a request instead of queueing it. `flush_tokens`: those that come at once.
    """

    slots: int | None
    step_s: float
    ttft_s: float
    context: int | None
    why: str = ""
    refuses: bool = False
    flush_tokens: float = 1.0


def find_facts(session: LoadSession, *, slots: int | None, context: int | None) -> Facts:
    """The idle server's first-token time, its step, and its slots, if they were not named.

    Raises TargetError if it does not serve, and CannotDecideError if it ignores `max_tokens`, or
    shows no step.
    """
    probes = [_first(session, 8) for _ in range(_IDLE_PROBES)]
    ttft_s = median((row.token_times_ns[0] - row.sent_ns) / 1e9 for row in probes[1:])
    why = f"it has {slots}"
    if slots is None:
        slots, why = _count_slots(session)
    elif slots <= MOST_SLOTS:
        _check_slots(session, slots)
    gaps = _gaps_of(session, 1 if slots is None else min(slots, MOST_SLOTS))
    return Facts(slots, median(gaps), ttft_s, context, why)


def _first(session: LoadSession, tokens: int) -> RequestRow:
    (row,) = _at_once(session, 1, tokens, Role.PROBE)
    if row is None or row.outcome is not Outcome.COMPLETED:
        why = f"no end within {READY_S:g} s" if row is None else row.error or row.outcome
        raise TargetError(f"{session.plan.url} does not answer a request of {tokens} tokens: {why}")
    if row.tokens_read > tokens:
        raise CannotDecideError(
            f"the server ignores max_tokens: {tokens} were asked for, {row.tokens_read} came"
        )
    if not row.token_times_ns:
        raise CannotDecideError("the server answers without a token")
    return row


def _at_once(
    session: LoadSession, streams: int, tokens: int, role: Role
) -> list[RequestRow | None]:
    spec = RequestSpec(user=0, max_tokens=tokens, prompt_tokens=PROMPT_TOKENS, role=role)
    return join_all([LiveStream(session, spec) for _ in range(streams)], READY_S)


def _count_slots(session: LoadSession) -> tuple[int | None, str]:
    """The number, or why there is none."""
    try:
        found = find_limit(lambda streams, tokens: _token_times(session, streams, tokens))
    except _NotServedError as error:
        return None, str(error)
    return found or None, "no two streams were seen to overlap"


def _check_slots(session: LoadSession, slots: int) -> None:
    """So many requests run at once, and one more waits. Prefills that take turns may keep short
    answers from overlapping: another number counts once answers of twice the length show it, too.
    Raises CannotDecideError."""
    together, before, tokens = 0, None, TOGETHER_TOKENS
    try:
        while together != before and tokens <= _LONGEST_TOGETHER:
            before = together
            together = most_at_once(_token_times(session, slots + 1, tokens))
            tokens *= 2
            if together == slots:
                return
    except _NotServedError:  # where no request can queue, one more is refused
        return
    raise CannotDecideError(
        f"the server is said to have {slots} slots, but of {slots + 1} requests {together} ran at "
        f"once: --slots names another number, or {ANOTHER_LOAD}"
    )


def _token_times(session: LoadSession, streams: int, tokens: int) -> list[Sequence[int]]:
    if streams > MOST_SLOTS + 1:
        raise _NotServedError(f"{MOST_SLOTS} streams run at once")
    rows = _at_once(session, streams, tokens, Role.CHECK)
    for row in rows:
        if row is None or row.outcome is not Outcome.COMPLETED:
            why = "no answer" if row is None else row.error or row.outcome
            raise _NotServedError(f"of {streams} streams at once one had {why}")
    return [row.token_times_ns for row in rows if row is not None]


def _gaps_of(session: LoadSession, streams: int) -> list[float]:
    rows = _at_once(session, streams, TOGETHER_TOKENS, Role.FILLER)
    whole_rows = [row for row in rows if row is not None and row.outcome is Outcome.COMPLETED]
    if not whole_rows:
        why = next((row.error or row.outcome for row in rows if row is not None), "no answer")
        raise TargetError(f"{session.plan.url} no longer answers: {why}")
    gaps = [
        (row.token_times_ns[-1] - row.token_times_ns[0]) / 1e9 / (row.tokens_read - 1)
        for row in whole_rows
        if row.tokens_read > 1
    ]
    if not gaps or median(gaps) <= _LEAST_STEP_S:
        raise CannotDecideError(
            "the server shows no step: the tokens of an answer come in one piece (a proxy that "
            "buffers, or an answer made beforehand)"
        )
    return gaps
