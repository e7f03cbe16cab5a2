"""A gauge's fall, and which gauges can be trusted to show one."""

from typing import Any

import httpx
import pytest

from harness.collect.source import SourceError
from harness.experiments.gauge import find_fall
from harness.experiments.readings import Reading, poll_of, value_of, why_no_gauge
from harness.workload.target import MetricSource, Target

URLS = ["http://127.0.0.1:1/metrics"]


def read(*values: float, every_s: float = 0.01) -> list[Reading]:
    return [Reading(every_s * number, value) for number, value in enumerate(values)]


def test_a_fall_is_in_the_middle_of_the_two_readings_around_it() -> None:
    fall = find_fall(read(1, 1, 1, 0, 0), 0.005, 0)
    assert fall is not None
    assert fall.at_s == pytest.approx(0.025)
    assert fall.half_s == pytest.approx(0.005)


def test_a_dip_is_no_fall_and_a_gauge_that_stays_up_has_none() -> None:
    fall = find_fall(read(1, 0, 1, 1, 0, 0), 0.005, 0)
    assert fall is not None
    assert fall.at_s == pytest.approx(0.035)
    assert find_fall(read(1, 1, 1), 0.005, 0) is None
    assert find_fall(read(1, 0, 1), 0.005, 0) is None


def test_a_fall_before_the_first_reading_is_not_before_the_leave() -> None:
    fall = find_fall(read(1, 1, 0, 0), 0.019, 0)
    assert fall is not None
    assert 0.019 <= fall.at_s <= 0.02


def test_the_level_at_rest_may_be_above_nothing() -> None:
    """Ghosts of an earlier case may run."""
    fall = find_fall(read(3, 3, 2, 2), 0.005, 2)
    assert fall is not None
    assert fall.at_s == pytest.approx(0.015)


def source(**changes: Any) -> MetricSource:
    return MetricSource(**{"name": "up", "refresh": "each step", "trust": "exact", **changes})


def target(**changes: Any) -> Target:
    fields = {"name": "t", "description": "d", "settle_s": 2.0, "metrics": {"running": source()}}
    return Target(**{**fields, **changes})


def test_gauges_that_cannot_be_trusted_say_why() -> None:
    assert why_no_gauge(target(), URLS) is None
    assert "no metrics page" in (why_no_gauge(target(), []) or "")
    assert "no metrics page" in (why_no_gauge(target(metrics={}), URLS) or "")
    lower = target(metrics={"running": source(trust="lower")})
    assert "not to be trusted" in (why_no_gauge(lower, URLS) or "")
    seldom = target(metrics={"running": source(lag_steps=40, refresh="every 40 iterations")})
    assert "every 40 iterations" in (why_no_gauge(seldom, URLS) or "")


def test_a_page_is_read_twice_a_step_and_never_more_often_than_its_server_bears() -> None:
    assert poll_of(target(), 0.02) == pytest.approx(0.01)
    assert poll_of(target(), 0.0005) == pytest.approx(0.005)
    assert poll_of(target(), 3.0) == pytest.approx(0.05)
    assert poll_of(target(min_scrape_interval_s=1.1), 0.02) == pytest.approx(1.1)


def page(text: str) -> httpx.Response:
    return httpx.Response(200, text=text, request=httpx.Request("GET", URLS[0]))


def test_a_value_is_the_sum_of_its_series_and_of_no_other_metric() -> None:
    text = '# TYPE up gauge\nup{engine="0"} 3\nup{engine="1"} 2\nupper 9\nx_up 9\nbroken {\n'
    assert value_of(source(), page(text)) == 5
    assert value_of(source(labels={"engine": "1"}), page(text)) == 2
    assert value_of(source(), page(text), "kv_usage") == 2.5  # of a share: their mean
    assert value_of(source(), page("down 1\n")) == 0
    with pytest.raises(SourceError, match="Prometheus"):
        value_of(source(), page("up{ 1"))
