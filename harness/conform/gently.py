"""The gentle watch as a run of its own: one case, decided again and again on a server in use.

No slots are counted or filled for it; see harness/experiments/gentle.py.
"""

import random
from collections.abc import Callable, Iterable

from harness.client.session import LoadSession
from harness.conform.case import Case
from harness.conform.cases.leaks import MOST_GHOSTS
from harness.conform.finding import Evidence, Finding
from harness.conform.gentle_case import gentle_case
from harness.conform.messages import SuiteRequest
from harness.conform.verdict import settle_case
from harness.errors import TargetError
from harness.experiments.gentle import GentleTerms, watch
from harness.experiments.gentle_plan import Gentle, is_look
from harness.experiments.outcome import CannotDecideError
from harness.experiments.visitors import BusyError, first_look
from harness.formatting import quantity
from harness.records import Disconnect
from harness.store.conform_result import Aftermath, CaseResult, Failure, Verdict


def watch_gently(
    order: SuiteRequest,
    session: LoadSession,
    decided: Callable[[CaseResult], None],
    so_far: Callable[[CaseResult], None],
) -> None:
    """See `follow`. Raises TargetError if the server does not serve from the beginning."""
    assert order.gentle_s is not None
    case, contract = gentle_case(order.gentle_s), session.plan.target.disconnect
    terms = GentleTerms(
        max_seconds=order.gentle_s,
        settle_s=order.settle_s,
        slots=order.slots,
        context=order.context,
    )
    looks = watch(session, order.metrics_urls, terms, random.Random(order.seed))
    follow(
        case,
        contract,
        looks,
        lambda: aftermath_of(lambda: first_look(session)),
        decided,
        so_far,
    )


def aftermath_of(ask: Callable[[], object]) -> Aftermath:
    """`ask`: for a short answer, as `first_look` does."""
    try:
        ask()
    except BusyError:
        return Aftermath.REFUSING
    except TargetError:
        return Aftermath.DEAD
    except CannotDecideError:  # it answered, but in one piece
        return Aftermath.CLEAN
    return Aftermath.CLEAN


def follow(
    case: Case,
    contract: Disconnect,
    looks: Iterable[Gentle],
    aftermath: Callable[[], Aftermath],
    decided: Callable[[CaseResult], object],
    so_far: Callable[[CaseResult], object],
) -> None:
    """Each result replaces the one before; the last one says how the server is afterwards, and why
    the watch ended early, if it did. `so_far` gets the results between two looks."""
    found, moments = None, 0
    try:
        for found in looks:
            is_news = is_look(found.moments) and found.moments > moments
            moments = found.moments
            if not found.is_final:
                (decided if is_news else so_far)(judged(case, found, contract))
        assert found is not None
        result = judged(case, found, contract)
    except CannotDecideError as error:
        if found is None:
            result = settle_case(case, error)
        else:
            result = judged(case, found, contract)
            result.reason += f"; it ended early: {error}"
    result.aftermath = aftermath()
    if result.aftermath is Aftermath.DEAD and result.verdict is Verdict.PASS:
        result.verdict = Verdict.CANNOT_DECIDE
        result.reason += "; afterwards it answered no short request"
    decided(result)


def judged(case: Case, found: Gentle, contract: Disconnect) -> CaseResult:
    result = settle_case(case, _outcome(found, contract))
    result.stops, result.way, result.evidence = found.stops, found.way, _evidence(found)
    result.left = result.left_in_all = found.leaves
    result.took_s = round(found.seconds, 2)
    return result


def _outcome(found: Gentle, contract: Disconnect) -> Finding | Exception:
    if found.stops is None:
        return CannotDecideError(found.sentence)
    forgets = found.ghosts_at_least is not None and found.ghosts_at_least > MOST_GHOSTS
    if found.stops and not forgets:
        return Finding(None, found.sentence, {})
    if contract != "cancel" and found.loses:  # not even when the answers end
        return Finding(Failure.NEVER, f"it declares `{contract}`, but {found.sentence}", {})
    if contract != "cancel":
        return Finding(None, f"as it declares (`{contract}`): {found.sentence}", {})
    too_many = f"it forgets more than {quantity(MOST_GHOSTS, 'ratio')} of the streams that leave; "
    return Finding(Failure.NEVER, (too_many if found.stops else "") + found.sentence, {})


def _evidence(found: Gentle) -> Evidence:
    """The figures in milliseconds, and in shares of 1."""
    latency, ghosts = found.latency_ci95, found.ghost_ci95
    figures: dict[str, float | None] = {
        "leaves": found.leaves,
        "moments": found.moments,
        "latency_ms": None if found.latency_s is None else 1e3 * found.latency_s,
        "latency_ms_low95": None if latency is None else 1e3 * latency.low,
        "latency_ms_high95": None if latency is None else 1e3 * latency.high,
        "floor_ms": 1e3 * found.floor_s,
        "ghost_rate": found.ghost_rate,
        "ghost_rate_low95": None if ghosts is None else ghosts.low,
        "ghost_rate_high95": None if ghosts is None else ghosts.high,
        "seen_by_ms": None if found.seen_by_s is None else 1e3 * found.seen_by_s,
        "share_of_load": found.share_of_load,
        "share_of_memory": found.share_of_memory,
        "prompt_tokens": found.prompt_tokens or None,
        "mistaken_share": found.mistaken_share,
        "ends": found.ends or None,
        "missed_ends": found.missed_ends if found.ends else None,
        "most_streams": found.most_streams,
    }
    return {name: None if one is None else round(one, 4) for name, one in figures.items()}
