"""The needs of `walkaway simulate capacity` as text, for the terminal and the page."""

from typing import Final

from harness.formatting import DASH
from harness.store.capacity_result import Estimate, Need

NEED_COLUMNS: Final = (
    "cancellation",
    "requests/s",
    "replicas (95 %)",
    "GPUs (95 %)",
    "a month (95 %)",
    "more (95 %)",
    "wasted tokens",
)


def need_cells(need: Need) -> tuple[str, ...]:
    """`requests/s`: of one replica; `a month`: money; `wasted tokens`: of one cancel."""
    waste = need.figures.get("wasted_tokens")
    return (
        need.name,
        f"{need.rate.value:.3g}",
        whole(need.replicas),
        whole(need.gpus),
        whole(need.money_a_month),
        DASH if need.more is None else _shown(need.more, "{:+.1%}"),
        DASH if waste is None else f"{waste:,.3g}",
    )


def whole(estimate: Estimate | None) -> str:
    if estimate is None:
        return DASH
    if estimate.value >= 1e6:
        return _shown(estimate.times(1e-6), "{:,.2f}") + " M"
    return _shown(estimate, "{:,.0f}")


def _shown(estimate: Estimate, form: str) -> str:
    value, ends = form.format(estimate.value), estimate.ci95
    return value if ends is None else f"{value} ({form.format(ends[0])} to {form.format(ends[1])})"
