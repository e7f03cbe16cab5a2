"""Slot recovery on a server with fewer slots than it was told to have: no trial means anything."""

from pathlib import Path

import pytest

from tests.e2e.running import Harness
from tests.reference_engine.running_engine import running

pytestmark = pytest.mark.e2e

SETTINGS = ("load.slots=3", "load.trials=1", "run.timeout_s=2", "settle.seconds=0")


def test_the_run_fails_and_says_why(tmp_path: Path) -> None:
    flags = [flag for setting in SETTINGS for flag in ("--set", setting)]
    with running("--runner", "simulated", "--sim-fixed-ms", "2", "--max-num-seqs", "2") as engine:
        harness = Harness(
            "slot_recovery",
            tmp_path / "run",
            *("--target", engine.url, "--engine", "openai", "--model", "tiny", *flags),
        )
        try:
            assert harness.wait() == 5, harness.output
        finally:
            harness.end()
    why = "for 2 s no 3 requests ran at once"
    assert f"no trial means anything; the first, arm {first_arm(harness)}: {why}" in harness.output
    (said,) = [one for one in harness.run.summary["validity"] if one["level"] == "invalid"]
    assert said["text"].startswith(f"void trials: 3, because {why}")
    assert {one["why"].partition(" (")[0] for one in harness.run.manifest["void_trials"]} == {why}


def first_arm(harness: Harness) -> str:
    arm: str = harness.run.manifest["void_trials"][0]["arm"]
    return arm
