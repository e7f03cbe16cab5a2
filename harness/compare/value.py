"""The value of cancellation: one load with it and without it, and what both cost.

Every row is a formula on the sums of a run (`Account`): the value of an arm is that on the sums of
all its rounds, the change that of paired rounds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import msgspec
import pandas as pd

from harness.analysis.cancellations import cancellations
from harness.analysis.capacity import steps_in_window
from harness.analysis.figure import Sample, describe
from harness.analysis.run_facts import run_facts
from harness.analysis.timeline import num_sampled
from harness.analysis.tokens import tokens_read
from harness.compare.pairs import compare_rounds
from harness.metrics import CANCEL_LATENCY
from harness.records import Metric, Outcome, Stage, Value, ValueRow
from harness.store.frames import RunFrames


class Account(NamedTuple):
    """Sums of one run, or of several.

    `wasted_tokens`: generated for requests that were left - read by their clients, until the
    observation ended. All others count within the load, in seconds and tokens: `late_tokens` like
    `wasted_tokens`, and the engine, slot and block time of requests already left (`late_*_s`).
    """

    load_s: float
    slot_s: float
    block_s: float
    requests: float
    left: float
    completed: float
    read_tokens: float
    generated_tokens: float
    wasted_tokens: float
    late_tokens: float
    used_slot_s: float
    late_engine_s: float
    late_slot_s: float
    late_block_s: float

    def an_hour(self, of_the_load: float) -> float:
        return of_the_load / self.load_s * 3600.0


def account(frames: RunFrames, cancels: pd.DataFrame) -> Account | None:
    facts = run_facts(frames)
    if facts.lacks("lifecycle", "steps", "clock", "load"):
        return None
    if facts.slots is None or facts.num_blocks is None:
        return None
    in_load = until(frames, facts.load_ended_ns)
    late = cancellations(in_load)
    return Account(
        load_s=facts.load_s,
        slot_s=facts.slots * facts.load_s,
        block_s=facts.num_blocks * facts.load_s,
        requests=len(frames.requests),
        left=len(cancels),
        completed=float((frames.requests["outcome"] == Outcome.COMPLETED).sum()),
        read_tokens=float(tokens_read(frames.requests).sum()),
        generated_tokens=num_sampled(in_load.steps),
        wasted_tokens=float(cancels["wasted_tokens"].sum()),
        late_tokens=float(late["wasted_tokens"].sum()),
        used_slot_s=float(steps_in_window(frames.steps, facts)["slot_s"].sum()),
        late_engine_s=float(late["gpu_seconds"].sum()),
        late_slot_s=float(late["slot_seconds"].sum()),
        late_block_s=float(late["block_seconds"].sum()),
    )


def until(frames: RunFrames, end_ns: int) -> RunFrames:
    window = {**(frames.manifest.get("window") or {}), "settled_ns": end_ns}
    return replace(
        frames,
        manifest={**frames.manifest, "window": window},
        lifecycle=frames.lifecycle[frames.lifecycle["t_ns"] <= end_ns],
        steps=frames.steps[frames.steps["ended_ns"] <= end_ns],
    )


def sum_of(accounts: Sequence[Account | None]) -> Account | None:
    known = [one for one in accounts if one is not None]
    return Account(*map(sum, zip(*known, strict=True))) if known else None


class ValueTerms(msgspec.Struct, kw_only=True, frozen=True):
    honoured: str
    ignored: str
    assumed_ms_per_token: float = 20.0
    price_per_million_tokens: float | None = None

    def cost(self, tokens: float) -> float:
        return tokens * (self.price_per_million_tokens or 0.0) / 1e6


class _Row(NamedTuple):
    """A row of the table. `of_abandons`: without an abandoned request it is not known, not 0.

    `source`: what the source has in its table of waste, without cancellation and with it.
    """

    name: str
    unit: str
    formula: str
    compute: Callable[[Account, ValueTerms], float]
    of_abandons: bool = False
    source: str | None = None

    def of(self, account: Account | None, terms: ValueTerms) -> float | None:
        if account is None or (self.of_abandons and not account.left):
            return None
        try:
            return self.compute(account, terms)
        except ZeroDivisionError:
            return None


_ROWS: Final = (
    _Row(
        "requests abandoned",
        "ratio",
        "abandoned requests / all requests",
        lambda one, _: one.left / one.requests,
        source="15 % -> 15 %",
    ),
    _Row(
        "tokens wasted per cancel",
        "tokens",
        "(tokens generated for abandoned requests - tokens that their clients had read) / "
        "abandoned requests",
        lambda one, _: one.wasted_tokens / one.left,
        source="800 -> 5",
    ),
    _Row(
        "engine seconds wasted an hour",
        "s",
        "sum over steps of (seconds of the step after t0 * the request's share of the tokens "
        "computed in it) / seconds of load * 3600",
        lambda one, _: one.an_hour(one.late_engine_s),
        of_abandons=True,
        source="720 s -> 4.5 s",
    ),
    _Row(
        "... as the source estimates it",
        "s",
        "tokens wasted within the load * assumed time a token / seconds of load * 3600",
        lambda one, terms: one.an_hour(one.late_tokens) * terms.assumed_ms_per_token / 1e3,
        of_abandons=True,
    ),
    _Row(
        "blocks held by abandoned requests",
        "blocks",
        "sum of (blocks held after t0 * seconds) / seconds of load",
        lambda one, _: one.late_block_s / one.load_s,
        of_abandons=True,
        source="3,000 -> 20",
    ),
    _Row(
        "... of all blocks",
        "ratio",
        "sum of (blocks held after t0 * seconds) / (all blocks * seconds of load)",
        lambda one, _: one.late_block_s / one.block_s,
        of_abandons=True,
        source="15 % -> 0.1 %",
    ),
    _Row(
        "slot utilisation",
        "ratio",
        "sum over steps of (requests running * seconds) / (slots * seconds of load)",
        lambda one, _: one.used_slot_s / one.slot_s,
    ),
    _Row(
        "... by abandoned requests",
        "ratio",
        "sum of seconds in the batch after t0 / (slots * seconds of load)",
        lambda one, _: one.late_slot_s / one.slot_s,
        of_abandons=True,
    ),
    _Row(
        "... by all other requests",
        "ratio",
        "slot utilisation - slot utilisation by abandoned requests",
        lambda one, _: (one.used_slot_s - one.late_slot_s) / one.slot_s,
        source="85 % -> 98 %",
    ),
    _Row(
        "generated tokens that were wasted",
        "ratio",
        "tokens wasted within the load / tokens generated within the load",
        lambda one, _: one.late_tokens / one.generated_tokens,
        of_abandons=True,
        source="12-18 % -> < 1 %",
    ),
    _Row(
        "effective throughput",
        "tokens/s",
        "tokens that clients read / seconds of load",
        lambda one, _: one.read_tokens / one.load_s,
    ),
    _Row(
        "answers completed",
        "rps",
        "completed requests / seconds of load",
        lambda one, _: one.completed / one.load_s,
    ),
    _Row(
        "money wasted an hour",
        "money",
        "tokens wasted within the load / seconds of load * 3600 * price of a token",
        lambda one, terms: terms.cost(one.an_hour(one.late_tokens)),
        of_abandons=True,
    ),
    _Row(
        "money wasted per 1,000 cancels",
        "money",
        "tokens wasted per cancel * 1000 * price of a token",
        lambda one, terms: terms.cost(one.wasted_tokens / one.left * 1000),
    ),
)


# Each stage, and its limits in the source's table of the pipeline's timing. The source sets a flag
# within one process: only a part of `signal_s` is like that.
_STAGES: Final = (
    ("detect_s", "the client leaves -> the server sees it", (0.0, 0.005)),
    ("signal_s", "... -> the engine hears it", None),
    ("set_s", "in it: until the token is set", (0.0, 0.0001)),
    ("wait_s", "... -> out of the batch", None),
    ("boundary_s", "in it: until the step has ended", (0.0, 0.03)),
    ("removal_s", "in it: the removal", (0.0, 0.0001)),
    ("free_s", "... -> its blocks are free", (0.0, 0.0001)),
    (CANCEL_LATENCY, "all of it", (0.005, 0.035)),
)


def stage_parts(cancels: pd.DataFrame) -> dict[str, Metric]:
    parts = {
        "set_s": cancels["set_s"],
        "boundary_s": cancels["wait_s"] - cancels["removal_s"],
        "removal_s": cancels["removal_s"],
    }
    samples = {name: Sample(values=part.dropna().to_numpy(float)) for name, part in parts.items()}
    return {
        name: describe(sample, unit="s", method="exact")
        for name, sample in samples.items()
        if len(sample.values)
    }


def value_of(
    accounts: Mapping[str, Sequence[Account | None]],
    terms: ValueTerms,
    stages: Mapping[str, Metric],
) -> Value:
    honoured, ignored = accounts[terms.honoured], accounts[terms.ignored]
    return Value(
        honoured=terms.honoured,
        ignored=terms.ignored,
        rows=[
            ValueRow(
                name=row.name,
                unit=row.unit,
                formula=row.formula,
                source=row.source,
                ignored=row.of(sum_of(ignored), terms),
                honoured=row.of(sum_of(honoured), terms),
                change=compare_rounds(
                    terms.honoured,
                    terms.ignored,
                    [row.of(one, terms) for one in honoured],
                    [row.of(one, terms) for one in ignored],
                    paired=True,
                ),
            )
            for row in _ROWS
            if row.unit != "money" or terms.price_per_million_tokens is not None
        ],
        stages=[
            Stage(
                name=name,
                what=what,
                p50=getattr(stages.get(name), "p50", None),
                p99=getattr(stages.get(name), "p99", None),
                source_s=limits,
            )
            for name, what, limits in _STAGES
        ],
    )
