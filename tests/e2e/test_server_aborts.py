"""The bundled engine ends requests of its own accord: to the harness that is never a completion."""

from importlib.resources import files
from pathlib import Path

import pytest

from tests.e2e.running import measure, set_flags

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SETTINGS = (
    *("load.stop_after_abandons=60", "load.abandon_after_tokens=[1]"),
    *("load.stay_share=0.5", "load.stay_tokens=3000"),
)


def test_a_deadline_that_passed_on_the_server_is_a_time_out(tmp_path: Path) -> None:
    target = (files("harness.targets") / "reference.toml").read_text()
    before = "ignore_eos = true"
    assert before in target
    engine = tmp_path / "hasty.toml"
    engine.write_text(target.replace(before, f"{before}, deadline_s = 0.3"))
    run = measure("cancel_steps", tmp_path / "run", "--engine", str(engine), *set_flags(*SETTINGS))
    outcomes = run.summary["outcomes"]
    assert outcomes["timed_out"] > 0
    assert outcomes["completed"] == 0, "3,000 tokens take a minute, and the deadline is 0.3 s"
    timed_out = [row for row in run.rows("requests") if row["outcome"] == "timed_out"]
    assert {row["error"] for row in timed_out} == {"the server aborted the request: client_timeout"}
    assert {row["finish_reason"] for row in timed_out} == {"abort"}
    assert run.metrics["ghost_rate"]["mean"] == 0
