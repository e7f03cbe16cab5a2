"""What the engine has done since it started: plain sums, incremented by the scheduler only."""

import msgspec


class Counters(msgspec.Struct, kw_only=True):
    """Totals. `generated_tokens` counts every sampled token, also those nobody read;
    `recomputed_tokens` the computed tokens that preemptions threw away.
    """

    steps: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    finished: dict[str, int] = {}

    def count_finish(self, reason: str) -> None:
        self.finished[reason] = self.finished.get(reason, 0) + 1
