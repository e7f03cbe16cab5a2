"""Totals of the engine's work since it started; the scheduler and its cache change them."""

from typing import Any

import msgspec

from reference_engine.core.early_stop import Condition
from reference_engine.core.request import FinishReason, Request, Status


class Counters(msgspec.Struct, kw_only=True, array_like=True, gc=False):
    """Totals of tokens, blocks and requests; `metrics.exposition` has a sentence for each.

    `reclaimed_*`: blocks of cancelled requests that no other shared: blank at once, retained in the
    prefix cache, or blank for want of room.
    """

    steps: int = 0
    slot_steps: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    resumed_queried_tokens: int = 0
    resumed_hit_tokens: int = 0
    swapped_out_requests: int = 0
    swapped_out_blocks: int = 0
    swapped_in_requests: int = 0
    swapped_in_blocks: int = 0
    reclaimed_freed: int = 0
    reclaimed_retained: int = 0
    reclaimed_forced: int = 0
    retained_hits: int = 0
    saved_tokens: int = 0
    unread_prompt_tokens: int = 0
    finished: dict[str, int] = {}
    early_stops: dict[str, int] = {}
    early_stop_saved_tokens: dict[str, int] = {}
    handed_over_requests: int = 0
    taken_over_requests: int = 0

    def plus(self, other: "Counters") -> "Counters":
        sums = dict[str, Any]()
        for name in self.__struct_fields__:
            ours, theirs = getattr(self, name), getattr(other, name)
            if isinstance(ours, dict):
                names = ours.keys() | theirs.keys()
                sums[name] = {key: ours.get(key, 0) + theirs.get(key, 0) for key in names}
            else:
                sums[name] = ours + theirs
        return Counters(**sums)

    def count_prefix(self, request: Request, num_found: int) -> None:
        if request.status is Status.WAITING:
            self.prefix_queried_tokens += request.num_tokens
            self.prefix_hit_tokens += num_found
        else:
            self.resumed_queried_tokens += request.num_tokens
            self.resumed_hit_tokens += num_found

    def count_computed(self, request: Request, before: int) -> None:
        now = request.num_computed_tokens
        again = max(0, min(now, request.num_lost_tokens) - before)
        request.num_recomputed_tokens += again
        self.recomputed_tokens += again
        if before >= request.num_prompt_tokens:
            return
        request.num_prefilled_tokens += min(now, request.num_prompt_tokens) - before
        if now == request.num_prompt_tokens and not request.num_generated:
            self.prompt_tokens += now

    def count_finished(self, request: Request, reason: FinishReason) -> None:
        self.finished[reason] = self.finished.get(reason, 0) + 1
        if reason is FinishReason.ABORT:
            self.saved_tokens += request.num_tokens_left
            if not request.num_generated:
                self.unread_prompt_tokens += request.num_prefilled_tokens

    def count_early_stop(self, request: Request, condition: Condition) -> None:
        stops, saved = self.early_stops, self.early_stop_saved_tokens
        stops[condition] = stops.get(condition, 0) + 1
        saved[condition] = saved.get(condition, 0) + request.num_tokens_left
