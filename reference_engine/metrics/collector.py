"""Histograms and counts of requests since the frontend started, and sums over its workers.

Cancelled requests are in the histograms like all others: they show all the server's work. A
worker's counters cover all frontends; what a worker counted before it was lost is kept.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from functools import reduce
from typing import Final

from reference_engine.config import EngineConfig
from reference_engine.context import Cancellation
from reference_engine.core.accounting import Counters
from reference_engine.core.early_stop import Condition
from reference_engine.core.request import FinishReason
from reference_engine.protocol import StepReport

# vLLM's bounds (vllm/v1/metrics/loggers.py), with some below: simulated steps last milliseconds.
FIRST_TOKEN_S: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
NEXT_TOKEN_S: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_S: Final = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0),
    *(20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
CANCEL_S: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25),
    *(0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
STEP_TOKENS: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
NUM_ANSWERS: Final = (1, 2, 5, 10, 20)


class Histogram:
    """Counts of values by upper bound; the last of `counts` is for values above all bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float | None) -> None:
        if value is not None:
            self.counts[bisect_left(self.bounds, value)] += 1
            self.total += value


class MetricsCollector:
    """Times in seconds. All its state changes on the event loop.

    `workers`: for each worker, the worker through which it reports (itself, or its prefill worker)
    and its last report. At its start, and while it is lost, this is a report with all blocks free.
    `_before`: what earlier incarnations of the workers counted.
    """

    def __init__(self, config: EngineConfig, workers: Sequence[str] = ()) -> None:
        lengths = token_bounds(config.max_model_len)
        self._config = config
        self.workers: dict[str, tuple[str, StepReport]] = {}
        self._before = Counters()
        self._total: Counters | None = None
        for worker in workers:
            self.began(worker)
        self.first_token_s = Histogram(FIRST_TOKEN_S)
        self.next_token_s = Histogram(NEXT_TOKEN_S)
        self.token_mean_s = Histogram(NEXT_TOKEN_S)
        self.e2e_s = Histogram(REQUEST_S)
        self.queue_s = Histogram(REQUEST_S)
        self.prefill_s = Histogram(REQUEST_S)
        self.decode_s = Histogram(REQUEST_S)
        self.inference_s = Histogram(REQUEST_S)
        self.prompt_tokens = Histogram(lengths)
        self.generated_tokens = Histogram(lengths)
        self.most_generated_tokens = Histogram(lengths)
        self.max_tokens = Histogram(lengths)
        self.num_answers = Histogram(NUM_ANSWERS)
        self.step_tokens = Histogram(STEP_TOKENS)
        self.cancel_s = Histogram(CANCEL_S)
        self.cancellations: Counter[tuple[str, ...]] = Counter()
        self.signals: Counter[tuple[str, ...]] = Counter()
        self.leavings: Counter[tuple[str, ...]] = Counter()
        self.closed_before_stream = 0
        self.closed_while_streaming = 0
        self.unread_tokens = 0
        self.unread_answers = 0
        self.generated_by_reason = {(str(reason),): 0 for reason in FinishReason}

    @property
    def counters(self) -> Counters:
        if self._total is None:
            ours = [report.counters for _, report in self.workers.values()]
            self._total = reduce(Counters.plus, ours, self._before)
        return self._total

    @property
    def total_blocks(self) -> int:
        return self._config.num_blocks * max(1, len(self.workers))

    @property
    def batch_slots(self) -> int:
        return self._config.max_num_seqs * max(1, len(self.workers))

    @property
    def num_running(self) -> int:
        return sum(report.num_running for _, report in self.workers.values())

    @property
    def num_waiting(self) -> int:
        return sum(report.num_waiting for _, report in self.workers.values())

    @property
    def free_blocks(self) -> int:
        return sum(report.free_blocks for _, report in self.workers.values())

    @property
    def cached_blocks(self) -> int:
        return sum(report.cached_blocks for _, report in self.workers.values())

    @property
    def host_blocks(self) -> int:
        return sum(report.host_blocks for _, report in self.workers.values())

    @property
    def kv_usage(self) -> float:
        return 1.0 - self.free_blocks / self.total_blocks

    @property
    def slot_utilisation(self) -> float:
        counters = self.counters
        return counters.slot_steps / max(1, counters.steps * self._config.max_num_seqs)

    @property
    def ended_by_reason(self) -> dict[tuple[str], int]:
        return {(reason,): self.counters.finished.get(reason, 0) for reason in FinishReason}

    @property
    def early_stops(self) -> dict[tuple[str], int]:
        return {(one,): self.counters.early_stops.get(one, 0) for one in Condition}

    @property
    def early_stop_saved_tokens(self) -> dict[tuple[str], int]:
        return {(one,): self.counters.early_stop_saved_tokens.get(one, 0) for one in Condition}

    @property
    def reclaimed_blocks(self) -> dict[tuple[str], int]:
        counters = self.counters
        return {
            ("freed",): counters.reclaimed_freed,
            ("retained",): counters.reclaimed_retained,
            ("forced",): counters.reclaimed_forced,
        }

    def step_of(self, worker: str) -> int:
        _, latest = self.workers.get(worker, (None, None))
        return 0 if latest is None else latest.counters.steps

    def began(self, worker: str, *, anew: bool = False) -> None:
        """`anew`: another process of this name, which counts from 0."""
        if anew:
            _, latest = self.workers.pop(worker)
            self._before = self._before.plus(latest.counters)
        if worker not in self.workers:
            self.workers[worker] = worker, self._idle(worker, Counters())

    def lost(self, worker: str) -> None:
        for name, (via, report) in self.workers.items():
            if via == worker:
                self.workers[name] = via, self._idle(name, report.counters)

    def _idle(self, worker: str, counters: Counters) -> StepReport:
        num_blocks = self._config.num_blocks
        return StepReport(free_blocks=num_blocks, counters=counters, worker=worker)

    def reported(self, report: StepReport, via: str) -> None:
        _, latest = self.workers.get(report.worker, (None, None))
        if latest is not None and report.counters.steps < latest.counters.steps:
            self.began(report.worker, anew=True)  # behind another one, and started again unseen
        self.workers[report.worker] = via, report
        self._total = None
        if report.step is not None:
            self.step_tokens.observe(sum(report.step.scheduled.values()))

    def ended(  # noqa: PLR0913 the whole account of a request, by name
        self,
        *,
        finish_reason: str,
        prompt_tokens: int,
        generated_tokens: int,
        max_tokens: int,
        e2e_s: float,
        queue_s: float | None,
        prefill_s: float | None,
        decode_s: float | None,
    ) -> None:
        """One answer has ended; None marks a stage that it did not reach.

        The mean time of a token is vLLM's: decode_s / (generated tokens - 1).
        """
        self.generated_by_reason[finish_reason,] += generated_tokens
        self.prompt_tokens.observe(prompt_tokens)
        self.generated_tokens.observe(generated_tokens)
        self.max_tokens.observe(max_tokens)
        self.e2e_s.observe(e2e_s)
        self.queue_s.observe(queue_s)
        self.prefill_s.observe(prefill_s)
        self.decode_s.observe(decode_s)
        if prefill_s is not None and decode_s is not None:
            self.inference_s.observe(prefill_s + decode_s)
        if decode_s is not None and generated_tokens > 1:
            self.token_mean_s.observe(decode_s / (generated_tokens - 1))

    def count_leaving(self, model: str, endpoint: str, *, stream: bool, num_sent: int) -> None:
        """A client has left before its answer was complete, after `num_sent` tokens."""
        self.leavings[model, endpoint, "stream" if stream else "unary"] += 1
        if stream and num_sent:
            self.closed_while_streaming += 1
        else:
            self.closed_before_stream += 1

    def cancelled(
        self, cancellation: Cancellation, *, phase: str, latency_s: float, unread_tokens: int
    ) -> None:
        """`latency_s`: from the cancellation until the blocks were free. `unread_tokens` were not
        sent, because the client had left.
        """
        self.cancellations[cancellation.reason, phase, cancellation.method] += 1
        self.cancel_s.observe(latency_s)
        self.unread_tokens += unread_tokens


def token_bounds(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `most`."""
    steps = (digit * 10**power for power in range(len(str(most))) for digit in (1, 2, 5))
    return tuple(bound for bound in steps if bound <= most)
