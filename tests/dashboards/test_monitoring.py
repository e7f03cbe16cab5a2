"""The Grafana dashboard, the scrape example and the alerts: they parse, and their metrics exist.

promtool (from Debian's package prometheus) reads the expressions, and plays made-up series to the
alerts: `alerts_test.yml`.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.reference_engine.running_engine import body, post_raw, running

MONITORING = Path(str(files("dashboards"))) / "monitoring"
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="no promtool is installed")
GRAFANA_VARIABLES = {"$__rate_interval": "1m", "$__range": "30m", "$instance": ".*"}
METRIC = re.compile(r"\b(?:vllm:|walkaway_engine_)\w+")
LABELS = re.compile(r"\b(?:by|without) \(([^)]*)\)")
OF_PROMETHEUS = {"job", "instance"}


def board() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((MONITORING / "grafana.json").read_text())
    return content


def drawn() -> Iterator[str]:
    for panel in board()["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"]
            for variable, value in GRAFANA_VARIABLES.items():
                expression = expression.replace(variable, value)
            yield expression


def alerting() -> Iterator[str]:
    content = yaml.safe_load((MONITORING / "alerts.yml").read_text())
    for group in content["groups"]:
        for rule in group["rules"]:
            yield rule["expr"]


def promtool(*arguments: str) -> str:
    assert PROMTOOL is not None
    command = [PROMTOOL, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.e2e
def test_every_metric_that_is_asked_for_is_on_the_page_of_the_engine() -> None:
    """The page as it is after one cancel: series of what was never counted do not exist before."""
    with running("--runner", "simulated", "--sim-fixed-ms", "2") as engine:
        httpx.post(f"{engine.url}/v1/completions", json=body(max_tokens=2), timeout=60)
        leaver = post_raw(engine, "leaver", stream=True)
        engine.wait_for("first_token", "leaver")
        leaver.close()
        engine.wait_for("finished", "leaver")
        page = httpx.get(f"{engine.url}/metrics").text
    samples = [one for family in text_string_to_metric_families(page) for one in family.samples]
    expressions = [*drawn(), *alerting()]
    assert {name for text in expressions for name in METRIC.findall(text)} <= {
        sample.name for sample in samples
    }
    labels = {label for sample in samples for label in sample.labels} | OF_PROMETHEUS
    grouped = {
        label.strip()
        for text in expressions
        for found in LABELS.findall(text)
        for label in found.split(",")
    }
    assert grouped <= labels


def test_the_dashboard_is_whole() -> None:
    content = board()
    assert {one["name"] for one in content["templating"]["list"]} == {"datasource", "instance"}
    panels = [panel for panel in content["panels"] if panel["type"] != "row"]
    numbers = [panel["id"] for panel in content["panels"]]
    assert len(numbers) == len(set(numbers))
    for panel in panels:
        assert panel["description"], panel["title"]
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        for target in panel["targets"]:
            assert 'instance=~"$instance"' in target["expr"]
            assert target["datasource"]["uid"] == "${datasource}"


@needs_promtool
def test_the_expressions_of_the_dashboard_parse(tmp_path: Path) -> None:
    rules = [{"record": f"panel:{i}", "expr": text} for i, text in enumerate(drawn())]
    assert len(rules) > 20
    (tmp_path / "rules.yml").write_text(
        yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]})
    )
    assert f"{len(rules)} rules found" in promtool("check", "rules", str(tmp_path / "rules.yml"))


@needs_promtool
def test_the_scrape_example_and_the_alerts_are_accepted() -> None:
    assert "7 rules found" in promtool("check", "rules", str(MONITORING / "alerts.yml"))
    promtool("check", "config", str(MONITORING / "prometheus.yml"))


@needs_promtool
def test_the_alerts_fire_when_they_must_and_are_silent_otherwise() -> None:
    promtool("test", "rules", str(Path(__file__).with_name("alerts_test.yml")))
