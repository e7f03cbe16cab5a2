"""The text of one answer as it grows, why it ends before its last token, and the account of it."""

from typing import NamedTuple

from reference_engine.core.early_stop import Condition, Detector, EarlyStopping, QualityHook
from reference_engine.core.request import FinishReason, Phase, Request, Sampling
from reference_engine.model.tokenizer import TextStream
from reference_engine.protocol import EarlyEnding, Ending


class TextEnd(NamedTuple):
    """`stop_reason`: the stop string or the stop token, else "early_stop". `condition` is None for
    a stop string, which every server knows.
    """

    stop_reason: str | int
    condition: Condition | None = None


class GrowingAnswer:
    """Finds stop strings and stop sequences, which may straddle tokens, and the conditions of early
    stopping.

    Text that could be the beginning of a stop is held back until it is decided. `end` is set by the
    last token.
    """

    def __init__(
        self,
        sampling: Sampling,
        num_prompt_tokens: int,
        hook: QualityHook | None,
        text_of: TextStream,
    ) -> None:
        self._text_of = text_of
        self._stop = sampling.stop
        self._held = ""
        self.end: TextEnd | None = None
        self._detector: Detector | None = None
        if sampling.early_stopping is not None or hook is not None:
            wanted = sampling.early_stopping or EarlyStopping()
            self._detector = Detector(wanted, num_prompt_tokens, hook)

    def push(self, token_id: int, probability: float | None = None) -> str:
        """The text that may be shown now."""
        text, detector = self._text_of(token_id), self._detector
        if not self._stop and detector is None:
            return text
        pending, self._held = self._held + text, ""
        early = None if detector is None else detector.push(token_id, text, probability)
        if early is not None:
            pending = pending[: len(pending) - early.num_dropped]
        found = [(at, stop) for stop in self._stop if (at := pending.find(stop)) >= 0]
        if found:
            at, stop = min(found)
            self.end = TextEnd(stop)
            return pending[:at]
        if early is not None:
            reason = "early_stop" if early.token_id is None else early.token_id
            self.end = TextEnd(reason, early.condition)
            return pending
        keep = max((_overlap(pending, stop) for stop in self._stop), default=0)
        if detector is not None:
            keep = max(keep, detector.num_undecided)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def ending_of(request: Request, phase: Phase, end: TextEnd | None, why: str) -> Ending:
    """The ending of a request that has finished in this phase. `why`: the reason in the log."""
    assert request.finish_reason is not None
    stop_reason, early = None if end is None else end.stop_reason, None
    if request.finish_reason is FinishReason.ERROR:
        stop_reason = why
    if end is not None and end.condition is not None:
        early = EarlyEnding(condition=end.condition, tokens_saved=request.num_tokens_left)
    return Ending(
        finish_reason=request.finish_reason,
        phase=phase,
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
        num_recomputed_tokens=request.num_recomputed_tokens,
        stop_reason=stop_reason,
        early_stop=early,
    )


def _overlap(text: str, stop: str) -> int:
    """The length of the longest beginning of `stop` with which `text` ends."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
