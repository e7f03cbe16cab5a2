"""The end of a run on a terminal."""

import io
from typing import Any

import msgspec
import numpy as np
import pytest
from rich.console import Console

from harness.analysis import figure
from harness.analysis.littles_law import Balance, as_figure
from harness.commands.run_table import headline_sentences, print_summary
from harness.formatting import interval
from harness.records import Metric
from tests.made_up.summaries import made_up_summary


def console(*, is_terminal: bool = False, width: int = 80) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, width=width, force_terminal=is_terminal), file


SUMMARY: dict[str, Any] = {
    "workload": "demo",
    "engine": "reference",
    "model": "tiny",
    "outcomes": {"completed": 3, "abandoned": 9, "failed": 0},
    "metrics": {
        "cancel_latency_s": {
            "unit": "s",
            "n": 9,
            "n_censored": 1,
            "mean": None,
            "p50": 0.006,
            "p99": None,
            "max": None,
            "lower_bounds": {"p99": 2.0, "max": 2.0},
            "method": "exact",
            "bound": "point",
        },
        "wasted_tokens": {
            "unit": "tokens",
            "n": 9,
            "mean": 1.5,
            "method": "counter",
            "bound": "lower",
        },
        "ghost_rate": {
            "unit": "ratio",
            "n": 9,
            "mean": 0.0,
            "upper95": 0.28,
            "method": "exact",
            "bound": "point",
        },
        "refilled_next_schedule": {
            "unit": "ratio",
            "n": 9,
            "mean": 1.0,
            "lower95": 0.717,
            "method": "exact",
        },
    },
    "validity": [{"level": "warning", "text": "too few"}],
    "not_measurable": {"slot_recovery_s": "no probes"},
}


def test_the_summary_shows_figures_statements_and_what_is_missing() -> None:
    plain, file = console()
    print_summary(plain, made_up_summary(SUMMARY), shows_all=True)
    text = file.getvalue()
    assert "demo on reference (tiny): 3 completed, 9 abandoned\n" in text
    (latency,) = [line for line in text.splitlines() if line.startswith("cancel_latency_s")]
    cells = " ".join(latency.split())
    assert "6 ms > 2 s > 2 s" in cells
    assert "9 (1) exact" in cells
    assert "≥ 1.5" in text
    assert "≤ 28 %" in text
    assert "≥ 71.7 %" in text
    assert "warning: too few" in text
    assert "not measurable here: slot_recovery_s" in text
    assert max(map(len, text.splitlines())) <= 80


def test_without_all_three_sentences_come_first_then_few_rows_and_warnings() -> None:
    plain, file = console(width=100)
    info = {"level": "info", "text": "a note"}
    told = SUMMARY | {"validity": [*SUMMARY["validity"], info]}
    print_summary(plain, made_up_summary(told), shows_all=False)
    lines = file.getvalue().splitlines()
    assert lines[:4] == [
        "demo on reference (tiny): 3 completed, 9 abandoned",
        "A cancel took 6 ms (p99 > 2 s; n = 9).",
        "The server wasted ≥ 1.5 tokens on each user who left, ≥ 14 tokens in all (by counter).",
        "Slot recovery is not measurable here: no probes.",
    ]
    rows = [line.split()[0] for line in lines if line.split()[0] in SUMMARY["metrics"]]
    assert rows == ["cancel_latency_s", "wasted_tokens", "ghost_rate"]
    assert lines[-2:] == ["warning: too few", "1 figure and 1 note more: --all"]


def test_the_sentences_tell_steps_recovery_and_bounds() -> None:
    steps = Metric(unit="steps", n=9, p50=1.0, p99=2.0, method="exact")
    latency = Metric(unit="s", n=9, p50=0.01, p99=0.02, method="exact")
    idle = Metric(unit="s", n=8, p50=0.008, method="probe")
    recovery = Metric(unit="s", n=8, p50=0.02, p99=0.03, method="probe")
    metrics = {"cancel_latency_s": latency, "cancel_latency_steps": steps}
    metrics |= {"slot_recovery_s": recovery, "probe_ttft_unloaded_s": idle}
    assert headline_sentences(metrics, {"wasted_tokens": "no counter"}) == [
        "A cancel took 10 ms (p99 20 ms; n = 9), that is 1 step (p99 2 steps).",
        "Wasted tokens are not measurable here: no counter.",
        "A freed slot served the next user after 20 ms (p99 30 ms; n = 8); an idle server takes "
        "8 ms.",
    ]
    most = Metric(unit="s", n=9, upper95=0.02, method="gauge", bound="upper")
    assert headline_sentences({"cancel_latency_s": most}, {})[0] == (
        "A cancel took ≤ 20 ms on average (n = 9; by gauge)."
    )


@pytest.mark.parametrize(
    ("width", "left_out"), [(80, []), (60, ["method"]), (54, ["method", "max"])]
)
def test_a_narrow_terminal_is_shown_fewer_columns_but_whole_figures(
    width: int, left_out: list[str]
) -> None:
    narrow, file = console(width=width)
    print_summary(narrow, made_up_summary(SUMMARY), shows_all=True)
    lines = file.getvalue().splitlines()
    (header,) = [line for line in lines if line.startswith("figure")]
    assert [name for name in ("method", "max") if name not in header] == left_out
    assert "…" not in file.getvalue()
    assert max(map(len, lines)) <= width


def test_the_floor_stands_below_the_table() -> None:
    plain, file = console(width=100)
    lag = {"unit": "s", "n": 5, "p50": 0.0002, "p99": 0.004, "method": "client"}
    metrics = SUMMARY["metrics"] | {"client_lag_s": lag}
    read = {"unit": "tokens", "n": 5, "p50": 0.0, "p99": 2.0, "method": "client"}
    metrics |= {"over_read_tokens": read}
    reasons = {"scrape_interval_s": "the run did not scrape"}
    told = {**SUMMARY, "metrics": metrics, "not_measurable": reasons}
    print_summary(plain, made_up_summary(told), shows_all=True)
    floor = (
        "client lag 200 µs (p99 4 ms), the run did not scrape, over-read 0 tokens (p99 2 tokens)"
    )
    assert f"floor: {floor}\n" in file.getvalue()


def shown(**metrics: Metric) -> str:
    plain, file = console(width=100)
    print_summary(
        plain, made_up_summary(SUMMARY | {"metrics": msgspec.to_builtins(metrics)}), shows_all=True
    )
    return file.getvalue()


def test_a_limit_stands_where_the_mean_would() -> None:
    most = Metric(unit="s", n=9, upper95=0.02, method="gauge", bound="upper")
    (line,) = [one for one in shown(cancel_latency_s=most).splitlines() if one.startswith("canc")]
    assert line.split()[1:4] == ["≤", "20", "ms"]
    assert line.count("20 ms") == 1


def test_how_far_old_pages_may_put_a_mean_off_is_told() -> None:
    sums, counts = np.array([1.0, 1.2, 0.8]), np.full(3, 10)
    found = Balance(edges_ns=np.arange(3), sums=sums, counts=counts, bias=(-0.01, 0.02))
    mean = as_figure(found, "counter")
    assert isinstance(mean, Metric)
    assert (
        f"95 % interval of the mean {interval(mean, 'mean')}, which includes a bias of "
        "-10 ms to 20 ms from the age of the metrics pages"
    ) in " ".join(shown(cancel_latency_s=mean).split())


def test_that_p99_is_the_largest_of_few_is_said() -> None:
    few = figure.describe(figure.Sample(values=np.arange(61) / 1e3), unit="s", method="client")
    assert "p99 of n < 100 values is the largest of them" in shown(ttft_s=few)
    many = figure.describe(figure.Sample(values=np.arange(161) / 1e3), unit="s", method="client")
    assert "is the largest" not in shown(ttft_s=many)
