"""What is more than a machine is usually asked for is refused, with what raises the cap."""

from pathlib import Path

import pytest

from harness.errors import ConfigError
from harness.run.run_config import RunOrder, resolve_order
from harness.workload.caps import streams_of_each
from harness.workload.workload import load_workload

RATE = ["arrivals.kind=constant", "arrivals.seconds=1"]


@pytest.mark.parametrize(
    ("name", "settings", "keys", "streams"),
    [
        ("demo", ["run.users=20000"], "`run.users`", 20_000),
        ("open_loop", ["arrivals.max_streams=20000"], "`arrivals.max_streams`", 20_000),
        (
            "cancel_storm",
            ["load.streams=9000", "load.stayers=2000"],
            "`load.streams` + `load.stayers`",
            11_000,
        ),
        ("chunk_frontier", ["load.bystanders=10001"], "`load.bystanders`", 10_001),
    ],
)
def test_streams(name: str, settings: list[str], keys: str, streams: int) -> None:
    with pytest.raises(ConfigError) as refused:
        load_workload(name, settings)
    text = str(refused.value)
    assert f"{keys} come to {streams:,} streams at once" in text
    assert "a file handle and some 20 KiB of memory" in text
    assert "25 bytes for each token" in text
    raised = f"run.most_streams={streams}"
    assert f"--set {raised}" in text
    load_workload(name, [*settings, raised])


@pytest.mark.parametrize(
    ("name", "settings", "streams"),
    [
        ("demo", ["run.users=13"], 13),
        ("demo", ["run.users=13", "run.processes=2"], 7),
        ("open_loop", ["arrivals.max_streams=8"], 8),
        ("cancel_storm", ["load.streams=9", "load.stayers=2"], 11),
        ("slot_recovery", [], 0),
    ],
)
def test_what_one_process_has_open(name: str, settings: list[str], streams: int) -> None:
    workload = load_workload(name, settings)
    users, processes = workload.run.users, workload.run.processes
    load, arrivals = workload.load, workload.arrivals
    assert streams_of_each(load, arrivals, users=users, processes=processes) == streams


def test_a_cap_may_be_lowered() -> None:
    with pytest.raises(ConfigError, match=r"more than `run.most_streams`, 3; "):
        load_workload("demo", ["run.most_streams=3"])


@pytest.mark.parametrize(
    "arrivals",
    [
        [*RATE, "arrivals.rate=20000"],
        [
            "arrivals.kind=ramp",
            "arrivals.seconds=1",
            "arrivals.from_rate=1",
            "arrivals.to_rate=2e4",
        ],
        ["arrivals.kind=steps", "arrivals.steps=[{rate=1,seconds=1},{rate=20000,seconds=1}]"],
    ],
)
def test_rates(arrivals: list[str]) -> None:
    with pytest.raises(
        ConfigError, match=r"up to 20,000 requests a second, .* --set run.most_rate=20000"
    ):
        load_workload("demo", arrivals)
    load_workload("demo", [*arrivals, "run.most_rate=20000"])


def test_a_trace_that_is_replayed_too_fast(tmp_path: Path) -> None:
    """Ten a second as recorded."""
    trace = tmp_path / "trace.jsonl"
    lines = (f'{{"timestamp":{100 * n},"input_length":9,"output_length":3}}' for n in range(40))
    trace.write_text("\n".join(lines))

    def at_speed(speed: int) -> RunOrder:
        settings = [f"arrivals.file={trace}", "run.most_rate=15", f"arrivals.speed={speed}"]
        return RunOrder(workload="trace_replay", settings=settings)

    resolve_order(at_speed(1))
    with pytest.raises(ConfigError, match=r"trace.jsonl: `arrivals` bring up to 2. .*most_rate=2"):
        resolve_order(at_speed(2))
