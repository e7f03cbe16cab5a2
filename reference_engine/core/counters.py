"""What the engine has done since it started: plain sums, incremented by the scheduler only."""

import msgspec

from reference_engine.core.kv_cache import Reclaimed


class Counters(msgspec.Struct, kw_only=True, array_like=True):
    """Totals of tokens, blocks, requests.

    `generated_tokens` are all that were sampled, also those nobody read; `recomputed_tokens` those
    computed again after a preemption. `prefix_queried_tokens` were looked up in the prefix cache at
    an admission and `prefix_hit_tokens` found, at a resumption `resumed_queried_tokens` and
    `resumed_hit_tokens`. `reclaimed_*` are blocks of cancelled requests by what became of them,
    `retained_hits` those of the retained ones that somebody could use later. `saved_tokens`: what
    aborted requests had left to generate. `prompt_tokens` are of prompts that were computed, or
    found, to their end; `unread_prompt_tokens` were computed for requests that were aborted before
    their first token. `slot_steps`: requests computed for, summed over steps.
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
    reclaimed_freed: int = 0
    reclaimed_retained: int = 0
    reclaimed_forced: int = 0
    retained_hits: int = 0
    saved_tokens: int = 0
    unread_prompt_tokens: int = 0
    finished: dict[str, int] = {}

    def count_finish(self, reason: str, times: int) -> None:
        self.finished[reason] = self.finished.get(reason, 0) + times

    def count_reclaimed(self, reclaimed: Reclaimed) -> None:
        self.reclaimed_freed += reclaimed.freed
        self.reclaimed_retained += reclaimed.retained
        self.reclaimed_forced += reclaimed.forced
