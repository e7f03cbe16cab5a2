"""The runs of a page that is asked over HTTP, without a browser."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.run.process import free_port
from tests.e2e.running import ROOT, Run, answers, assert_nothing_is_left, set_flags, wait_until
from tests.e2e.test_web_page import served


@pytest.mark.slow
@pytest.mark.e2e
def test_a_load_without_end_is_stopped_when_its_time_is_up(tmp_path: Path) -> None:
    endless = ("run.max_seconds=2", "load.stop_after_abandons=1000000", "settle.seconds=0")
    flags = set_flags(*endless, "engine.runner=simulated", "engine.sim_fixed_ms=5")
    command = ("harness", "run", "demo", "--web", *flags, "--out", str(tmp_path / "runs"))

    def is_there(url: str) -> bool:
        return httpx.get(url).is_success

    def has_stopped() -> bool:
        return bool(httpx.get(f"{url}/stats/requests").json()["state"] == "stopped")

    with served(*command, is_ready=is_there) as (url, _):
        form = {"user_count": "12", "spawn_rate": "12"}
        began = httpx.post(f"{url}/swarm", data=form, timeout=60).json()
        assert began["success"], began
        wait_until(has_stopped, "its users have stopped")


def try_starts(url: str) -> None:
    """One is refused, one runs, and one comes while that starts."""

    def now() -> dict[str, Any]:
        told: dict[str, Any] = httpx.get(f"{url}/walkaway/now.json").json()
        return told

    def start(**fields: str) -> dict[str, Any]:
        answer: dict[str, Any] = httpx.post(f"{url}/swarm", data=fields, timeout=60).json()
        return answer

    assert '"Number of users" must be at least 1' in start(user_count="0")["message"]
    assert now()["told"].startswith('no test was started: "Number of users"')
    assert now()["field"] == "Number of users"
    form = {"user_count": "4", "spawn_rate": "4", "Stop after (abandons)": "", "Seed": "7"}
    assert start(**form)["success"]
    assert not start(**form)["success"], "it starts already, or runs"


@pytest.mark.e2e
def test_an_interrupted_page_saves_its_run_and_says_where(tmp_path: Path) -> None:
    """SIGINT comes to `walkaway` alone, as from `kill -INT`."""
    port, run = free_port(), Run(tmp_path / "runs" / "1")
    flags = set_flags("engine.runner=simulated", "engine.sim_fixed_ms=2", "settle.seconds=0")
    command = ("harness", "run", "demo", "--web", *flags, "--out", str(run.folder.parent))
    url, said = f"http://127.0.0.1:{port}", tmp_path / "said"

    def is_served() -> bool:
        try:
            return answers(url)
        except httpx.TransportError:
            return False

    with (
        said.open("wb") as output,
        subprocess.Popen(
            [sys.executable, "-m", *command, "--web-port", str(port)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        ) as process,
    ):
        try:
            wait_until(is_served, "the page is there", 90)
            try_starts(url)
            shards = run.folder / "shards"
            wait_until(lambda: any(one.stat().st_size for one in shards.glob("requests-*")), "rows")
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
        finally:
            process.kill()
    text = said.read_text()
    assert f"the page is at {url}; Ctrl-C ends it" in text
    assert "Aggregated" not in text, "a table of Locust's own counts"
    assert "starting the reference engine (simulated runner)" in text
    assert f"interrupted; the run so far is judged and saved in {run.folder}\n" in text
    assert f"\nreport: {run.folder / 'report.html'}\n" in text
    assert text.count("A cancel took ") == 1
    assert text.endswith("error: interrupted: the page has ended\n")
    assert "Traceback" not in text
    assert run.rows("requests")
    assert run.manifest["seed"] == 7
    assert_nothing_is_left(run)
