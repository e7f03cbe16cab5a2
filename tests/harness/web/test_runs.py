"""The runs of a page that is asked over HTTP, without a browser."""

from pathlib import Path

import httpx
import pytest

from tests.e2e.running import set_flags, wait_until
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
