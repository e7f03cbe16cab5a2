"""A machine on which torch says that it has CUDA, and on which no process is started."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from tests.made_up.rows import made_up_manifest, target_facts
from tests.made_up.summaries import made_up_summary
from tools.bench.ratio import RatioLimit, share
from tools.gpu.boxed import BoxEnd
from tools.gpu.device import describe
from tools.gpu.results import SAID

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
GOOD = BoxEnd(0, 12.0)
STOPPED = BoxEnd(-9, 40.0, was_stopped=True)
UUID = "GPU-0123"


def _refuse(_: int) -> int:
    raise RuntimeError("not supported")


NVML: Any = SimpleNamespace(  # two devices; ours is the second, which does not show its power
    NVML_CLOCK_GRAPHICS="graphics",
    NVML_CLOCK_MEM="memory",
    NVMLError=RuntimeError,
    nvmlDeviceGetCount=lambda: 2,
    nvmlDeviceGetHandleByIndex=lambda index: index,
    nvmlDeviceGetUUID=lambda handle: ("GPU-other", UUID)[handle],
    nvmlSystemGetDriverVersion=lambda: "580.159.04",
    nvmlDeviceGetClockInfo=lambda handle, kind: handle * {"graphics": 1755, "memory": 3201}[kind],
    nvmlDeviceGetMaxClockInfo=lambda _, kind: {"graphics": 1980, "memory": 3201}[kind],
    nvmlDeviceGetMigMode=lambda _: [0, 0],
    nvmlDeviceGetEnforcedPowerLimit=_refuse,
)


def fake_torch(**cuda: Any) -> Any:
    properties = SimpleNamespace(
        name="NVIDIA H200",
        total_memory=140 * 2**30,
        multi_processor_count=132,
        major=9,
        minor=0,
    )
    shown = {"is_available": lambda: True, "get_device_properties": lambda _: properties, **cuda}
    return SimpleNamespace(
        __version__="2.11.0+cu130",
        version=SimpleNamespace(cuda="13.0"),
        cuda=SimpleNamespace(**shown),
    )


class MadeUpMachine:
    """Starts no process, and leaves what the stage's process would leave.

    `ended`: how the stages end that are not good. `leaves_nothing`: stages without figures.
    """

    def __init__(
        self, ended: Mapping[str, BoxEnd] | None = None, *, leaves_nothing: Sequence[str] = ()
    ) -> None:
        self.ended, self.leaves_nothing = ended or {}, leaves_nothing
        self.pytest_says = "......\n== 12 passed, 31 deselected in 30.2s ==\n"
        self.commands: dict[str, Sequence[str]] = {}
        self.seconds = 0.0

    def __call__(
        self, command: Sequence[str], *, root: Path, said: Path, box_s: float, grace_s: float
    ) -> BoxEnd:
        name = said.parent.name
        ended = self.ended.get(name, GOOD)
        self.commands[name] = command
        self.seconds += box_s
        assert 0 < grace_s < box_s
        said.write_text(f"the words of {name}\nits last words\n")
        if name not in self.leaves_nothing:
            self._leave(command, said.parent)
        return ended

    def _leave(self, command: Sequence[str], work: Path) -> None:
        if "pytest" in command:
            (work / SAID).write_text(self.pytest_says)
        elif "tools.gpu.device" in command:
            measured = {"at": NOON.isoformat(), "copy_bytes_s": [4.25e12, 4.3e12, 4.35e12]}
            versions = {"triton": "3.6.0", "python": "3.12.3"}
            facts = describe(fake_torch(), NVML, UUID) | versions | measured
            (work / "device.json").write_text(json.dumps(facts))
        elif "tools.bench" in command:
            goal = RatioLimit("at most", 1.25)
            lines = [
                share("1 x 1024", "ms", [4.0], [3.5], goal),
                share("64", "ms", [9.0], [5.5], goal),
            ]
            encoded = [msgspec.to_builtins(line) | {"holds": line.holds} for line in lines]
            (work / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in encoded))
        else:
            self._leave_run(Path(command[-1]))

    def _leave_run(self, folder: Path) -> None:
        folder.mkdir()
        config = {"dtype": "bfloat16", "compile": True, "max_num_seqs": 8, "num_blocks": 4096}
        manifest = made_up_manifest(target=target_facts(config=config))
        (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))
        summary = made_up_summary(SUMMARY)
        (folder / "summary.json").write_bytes(msgspec.json.encode(summary))
        (folder / "report.html").write_text("a report")
        (folder / "engine.log").write_text("what the engine said")


SUMMARY = {
    "model": "8b",
    "outcomes": {"abandoned": 500, "completed": 100, "cut_off": 12, "failed": 0},
    "metrics": {
        "step_s": {"unit": "s", "n": 900, "p50": 0.0051, "p99": 0.0062, "method": "exact"},
        "cancel_latency_steps": {
            "unit": "steps",
            "n": 500,
            "p50": 1.0,
            "p99": 7.0,
            "method": "exact",
        },
        "throughput_tps": {"unit": "tokens/s", "n": 1, "mean": 1480.0, "method": "exact"},
        "leaked_slots": {"unit": "slots", "n": 1, "mean": 0.0, "method": "gauge"},
        "gpu_power_w": {"unit": "W", "n": 90, "mean": 412.0, "method": "gauge", "bound": "lower"},
    },
    "validity": [
        {"level": "info", "text": "not worth a line"},
        {"level": "warning", "text": "the load was short"},
    ],
}
