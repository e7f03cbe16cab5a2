"""The value of cancellation: one load with it and without it, and what both cost.

Every row of the table is a formula on the sums of a run (`Account`). The value of an arm is the
formula on the sums of all its rounds. The change is that of paired rounds: see
`harness.analysis.compare`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Final

import msgspec

from harness.analysis.cancellation import cancellations
from harness.analysis.capacity import slots_in_use_s
from harness.analysis.compare import compare_rounds
from harness.analysis.facts import run_facts
from harness.analysis.step_log import num_sampled
from harness.analysis.tokens import tokens_read
from harness.metrics import CANCEL_LATENCY
from harness.records import Metric, Outcome, Stage, Value, ValueRow
from harness.store.frames import RunFrames


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Sums of one run, or of several.

    `wasted_tokens`: generated for requests that were left - read by their clients, until the
    observation ended. All others count within the load, in seconds and tokens: `late_tokens` like
    `wasted_tokens`, and the engine, slot and block time of requests already left
    (`*_s_for_nobody`).
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
    engine_s_for_nobody: float
    slot_s_for_nobody: float
    block_s_for_nobody: float


def account(frames: RunFrames) -> Account | None:
    """The sums of one run; None for a server without complete logs."""
    facts = run_facts(frames)
    num_blocks = _num_blocks(frames)
    tells = facts.has_lifecycle and facts.has_steps and facts.clocks_agree
    if not tells or facts.slots is None or num_blocks is None or facts.load_s <= 0:
        return None
    in_load = until(frames, facts.load_ended_ns)
    cancels, late = cancellations(frames), cancellations(in_load)
    return Account(
        load_s=facts.load_s,
        slot_s=facts.slots * facts.load_s,
        block_s=num_blocks * facts.load_s,
        requests=len(frames.requests),
        left=len(cancels),
        completed=float((frames.requests["outcome"] == Outcome.COMPLETED).sum()),
        read_tokens=float(tokens_read(frames.requests).sum()),
        generated_tokens=num_sampled(in_load.steps),
        wasted_tokens=float(cancels["wasted_tokens"].sum()),
        late_tokens=float(late["wasted_tokens"].sum()),
        used_slot_s=slots_in_use_s(frames.steps, facts),
        engine_s_for_nobody=float(late["gpu_seconds"].sum()),
        slot_s_for_nobody=float(late["slot_seconds"].sum()),
        block_s_for_nobody=float(late["block_seconds"].sum()),
    )


def until(frames: RunFrames, end_ns: int) -> RunFrames:
    """The run as if the server had been watched only up to this moment."""
    window = {**(frames.manifest.get("window") or {}), "settled_ns": end_ns}
    return replace(
        frames,
        manifest={**frames.manifest, "window": window},
        lifecycle=frames.lifecycle[frames.lifecycle["t_ns"] <= end_ns],
        steps=frames.steps[frames.steps["ended_ns"] <= end_ns],
    )


def sum_of(accounts: Sequence[Account | None]) -> Account | None:
    known = [one for one in accounts if one is not None]
    if not known:
        return None
    sums = {field.name: sum(getattr(one, field.name) for one in known) for field in fields(Account)}
    return Account(**sums)


def _num_blocks(frames: RunFrames) -> int | None:
    config = (frames.manifest.get("target") or {}).get("config") or {}
    found = config.get("num_blocks")
    return None if found is None else int(found)


HOUR_S: Final = 3600.0


class ValueTerms(msgspec.Struct, kw_only=True, frozen=True):
    """The `[value]` of a workload: the arms compared, and the assumptions."""

    honoured: str
    ignored: str
    assumed_ms_per_token: float = 20.0
    price_per_million_tokens: float | None = None


Formula = Callable[[Account, ValueTerms], float | None]


def _late_tokens_an_hour(one: Account) -> float:
    return one.late_tokens / one.load_s * HOUR_S


def _of_leavers(compute: Formula) -> Formula:
    """Null without an abandon: the cost of leaving is then not known, and not 0."""
    return lambda one, terms: compute(one, terms) if one.left else None


def _price(tokens: float, terms: ValueTerms) -> float:
    assert terms.price_per_million_tokens is not None
    return tokens * terms.price_per_million_tokens / 1e6


_ROWS: Final[tuple[tuple[str, str, str, Formula], ...]] = (
    (
        "requests left by their users",
        "ratio",
        "abandoned requests / all requests",
        lambda one, _: one.left / one.requests,
    ),
    (
        "tokens wasted per cancel",
        "tokens",
        "(tokens generated for those who left - tokens they had read) / abandoned requests",
        lambda one, _: one.wasted_tokens / one.left,
    ),
    (
        "engine seconds wasted an hour",
        "s",
        "sum over steps of (seconds of the step after t0 * the request's share of the tokens "
        "computed in it) / seconds of load * 3600",
        _of_leavers(lambda one, _: one.engine_s_for_nobody / one.load_s * HOUR_S),
    ),
    (
        "... as the source estimates it",
        "s",
        "tokens wasted within the load * assumed time a token / seconds of load * 3600",
        _of_leavers(
            lambda one, terms: _late_tokens_an_hour(one) * terms.assumed_ms_per_token / 1e3
        ),
    ),
    (
        "blocks held for nobody",
        "blocks",
        "sum of (blocks held after t0 * seconds) / seconds of load",
        _of_leavers(lambda one, _: one.block_s_for_nobody / one.load_s),
    ),
    (
        "... of all blocks",
        "ratio",
        "sum of (blocks held after t0 * seconds) / (all blocks * seconds of load)",
        _of_leavers(lambda one, _: one.block_s_for_nobody / one.block_s),
    ),
    (
        "slot utilisation",
        "ratio",
        "sum over steps of (requests running * seconds) / (slots * seconds of load)",
        lambda one, _: one.used_slot_s / one.slot_s,
    ),
    (
        "... for nobody",
        "ratio",
        "sum of seconds in the batch after t0 / (slots * seconds of load)",
        _of_leavers(lambda one, _: one.slot_s_for_nobody / one.slot_s),
    ),
    (
        "... for somebody",
        "ratio",
        "slot utilisation - slot utilisation for nobody",
        lambda one, _: (one.used_slot_s - one.slot_s_for_nobody) / one.slot_s,
    ),
    (
        "tokens generated for nobody",
        "ratio",
        "tokens wasted within the load / tokens generated within the load",
        _of_leavers(lambda one, _: one.late_tokens / one.generated_tokens),
    ),
    (
        "effective throughput",
        "tokens/s",
        "tokens that clients read / seconds of load",
        lambda one, _: one.read_tokens / one.load_s,
    ),
    (
        "answers completed",
        "rps",
        "completed requests / seconds of load",
        lambda one, _: one.completed / one.load_s,
    ),
)
_PRICED_ROWS: Final[tuple[tuple[str, str, str, Formula], ...]] = (
    (
        "money wasted an hour",
        "money",
        "tokens wasted within the load / seconds of load * 3600 * price of a token",
        _of_leavers(lambda one, terms: _price(_late_tokens_an_hour(one), terms)),
    ),
    (
        "money wasted per 1,000 cancels",
        "money",
        "tokens wasted per cancel * 1000 * price of a token",
        lambda one, terms: _price(one.wasted_tokens / one.left * 1000, terms),
    ),
)
# What each stage is called in the source's table of the pipeline's timing, and its limits there.
_STAGES: Final = (
    ("detect_s", "the client leaves -> the server sees it", (0.0, 0.005)),
    ("signal_s", "... -> the engine hears it", (0.0, 0.0001)),
    ("wait_s", "... -> out of the batch, at a step's end", (0.0, 0.0301)),
    ("free_s", "... -> its blocks are free", (0.0, 0.0001)),
    (CANCEL_LATENCY, "all of it", (0.005, 0.035)),
)


def value_of(
    accounts: Mapping[str, Sequence[Account | None]],
    terms: ValueTerms,
    honoured_metrics: Mapping[str, Metric],
) -> Value:
    """Both tables, from the accounts of each arm's rounds (null: a round without one) and the
    figures of the arm that honours cancellation."""
    rows = _ROWS if terms.price_per_million_tokens is None else (*_ROWS, *_PRICED_ROWS)
    return Value(
        honoured=terms.honoured,
        ignored=terms.ignored,
        rows=[_row(row, accounts, terms) for row in rows],
        stages=_stages(honoured_metrics),
    )


def _row(
    row: tuple[str, str, str, Formula],
    accounts: Mapping[str, Sequence[Account | None]],
    terms: ValueTerms,
) -> ValueRow:
    name, unit, formula, compute = row
    honoured, ignored = accounts[terms.honoured], accounts[terms.ignored]
    return ValueRow(
        name=name,
        unit=unit,
        formula=formula,
        ignored=_applied(compute, sum_of(ignored), terms),
        honoured=_applied(compute, sum_of(honoured), terms),
        change=compare_rounds(
            terms.honoured,
            terms.ignored,
            [_applied(compute, one, terms) for one in honoured],
            [_applied(compute, one, terms) for one in ignored],
            paired=True,
        ),
    )


def _stages(metrics: Mapping[str, Metric]) -> list[Stage]:
    return [
        Stage(
            name=name,
            what=what,
            p50=getattr(metrics.get(name), "p50", None),
            p99=getattr(metrics.get(name), "p99", None),
            source_s=limits,
        )
        for name, what, limits in _STAGES
    ]


def _applied(compute: Formula, one: Account | None, terms: ValueTerms) -> float | None:
    if one is None:
        return None
    try:
        return compute(one, terms)
    except ZeroDivisionError:
        return None
