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


class Families:
    """Which requests belong to which parent. Changes in `add` and `ended` only."""

    def __init__(self) -> None:
        self._children: dict[str, list[str]] = {}
        self._parent_of: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._children)

    def add(self, parent_id: str, request_id: str) -> None:
        self._children.setdefault(parent_id, []).append(request_id)
        self._parent_of[request_id] = parent_id

    def members(self, name: str) -> list[str]:
        """The children of a parent in order, or the name itself where it is no parent's."""
        return list(self._children.get(name, [name]))

    def ended(self, request_id: str) -> None:
        """A request has ended; not an error for one without a parent."""
        parent_id = self._parent_of.pop(request_id, None)
        if parent_id is None:
            return
        children = self._children[parent_id]
        children.remove(request_id)
        if not children:
            del self._children[parent_id]
