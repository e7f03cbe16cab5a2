"""What a request's events and outputs mean for the statistics."""

from reference_engine.cancellation import Cancellation
from reference_engine.frontend.client_request import Choice, ClientRequest
from reference_engine.frontend.statistics import Statistics


def count_tokens(
    statistics: Statistics, request: ClientRequest, choice: Choice, now_ns: int
) -> None:
    """New tokens of an answer have come here; several at once count as one interval."""
    if choice.last_output_ns is None:
        statistics.first_token((now_ns - request.arrived_ns) / 1e9)
    else:
        statistics.next_token((now_ns - choice.last_output_ns) / 1e9)
    choice.last_output_ns = now_ns


def count_ended(
    statistics: Statistics, request: ClientRequest, choice: Choice, now_ns: int
) -> None:
    """An answer has ended; a stage lasts until the next one begins, or until the end."""
    assert choice.ending is not None
    stamps = choice.stamps
    end_ns = stamps.get("finished", now_ns)
    admitted_ns, first_token_ns = stamps.get("admitted"), stamps.get("first_token")
    statistics.ended(
        finish_reason=choice.ending.finish_reason,
        prompt_tokens=request.num_prompt_tokens,
        generated_tokens=choice.num_generated,
        max_tokens=request.max_tokens,
        e2e_s=(end_ns - request.arrived_ns) / 1e9,
        queue_s=_seconds(request.arrived_ns, admitted_ns),
        prefill_s=_seconds(admitted_ns, first_token_ns),
        decode_s=_seconds(first_token_ns, end_ns),
    )


def count_cancelled(statistics: Statistics, cancellation: Cancellation, choice: Choice) -> None:
    """An abort took effect: the answer has ended, and its blocks are free."""
    assert choice.ending is not None
    statistics.cancelled(
        cancellation,
        phase=choice.ending.phase,
        latency_s=(choice.stamps["blocks_freed"] - cancellation.t_ns) / 1e9,
        unread_tokens=choice.num_unread,
    )


def _seconds(start_ns: int | None, end_ns: int | None) -> float | None:
    return None if start_ns is None or end_ns is None else (end_ns - start_ns) / 1e9
