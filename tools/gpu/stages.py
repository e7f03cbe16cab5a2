"""What `make gpu` runs: the stages in order of worth, and the seconds that each may take.

Every stage is a process. A workload serves the model that the engine itself chooses for the device;
in a rehearsal that is the small one for CPUs, and the load is cut short.
"""

import ast
import json
import tomllib
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

Kind = Literal["device", "tests", "bench", "run"]

ROOT: Final = Path(__file__).parents[2]
DEVICE: Final = "device"
DEMO: Final = "demo"
REPORT: Final = "report.html"
LONGEST_S: Final = 460.0  # of all boxes together

# The end of a box, between SIGINT and SIGKILL. A run then writes its rows, its summary and report.
GRACE_S: Final[dict[Kind, float]] = {"device": 1.0, "tests": 2.0, "bench": 2.0, "run": 6.0}
# What is kept of what a process leaves, apart from what it says; the first file is needed.
FIGURES: Final[dict[Kind, tuple[str, ...]]] = {
    "device": ("device.json",),
    "tests": (),
    "bench": ("lines.jsonl",),
    "run": ("summary.json", "manifest.json"),
}


class GpuStage(NamedTuple):
    """`asks`: of a run the harness's command and workload, of a benchmark its name. `settings` are
    a run's, and `short` replace them in a rehearsal."""

    name: str
    box_s: float
    kind: Kind
    about: str
    asks: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    short: tuple[str, ...] = ("run.max_seconds=3",)

    @property
    def grace_s(self) -> float:
        return GRACE_S[self.kind]

    @property
    def keeps(self) -> tuple[str, ...]:
        """A report is 1.3 MB, and the table has its figures: one shows what it looks like."""
        return (*FIGURES[self.kind], *((REPORT,) if self.name == DEMO else ()))

    def leaves_in(self, work: Path) -> Path:
        """The folder of the process's files; a run has one of its own, which gives it its name."""
        return work / self.name if self.kind == "run" else work


def _engines_of_arms(workload: str) -> dict[str, dict[str, Any]]:
    """What each arm sets of the engine, apart from costs of the simulated runner."""
    arms = tomllib.loads((ROOT / "workloads" / f"{workload}.toml").read_text())["arms"]
    return {
        arm["name"]: {key: value for key, value in arm["engine"].items() if key[:4] != "sim_"}
        for arm in arms
    }


_PRESSURE: Final = _engines_of_arms("memory_pressure")
WHICH_ARMS: Final = (
    f"Of the {len(_PRESSURE)} arms of the workload `memory_pressure` three run: `off`, with which "
    "the others are compared, `on` (a watermark, which avoids preemptions) and `swap` (which makes "
    "them cheaper), since what these two save depends on the device. The others change sizes and "
    "policies, which the simulated runner shows as well: `walkaway run memory_pressure`."
)


# On a busy CPU a step may take a tenth of a second. Answers are to end all the same, and few blocks
# are to run short.
_SMALLER: Final = (
    "run.max_seconds=3",
    "run.users=4",
    "load.stay_tokens=24",
    "load.abandon_after_tokens=[4, 8]",
    "load.answer_tokens=200",
    "engine.max_model_len=768",
    "engine.num_blocks=48",
)


# Instead of the mix: priorities and victims are not asked about here.
_ALIKE: Final = (
    "load.mix=[]",
    "load.stay_share=0.8",
    "load.prompt_tokens=[256, 512]",
    "load.shared_prefix_tokens=192",
)


def _pressure(name: str, about: str, *, arm: str, **more: object) -> GpuStage:
    """An arm of `memory_pressure` as a run of its own, so that a slow one costs no other."""
    engine = {**_PRESSURE[arm], **more}
    settings = (
        f"engine.{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in engine.items()
    )
    alone = ("arms=[]", "run.rounds=1", *settings)
    return GpuStage(
        f"pressure_{name}",
        35,
        "run",
        f"blocks run short: {about}",
        ("run", "memory_pressure"),
        (*alone, "run.max_seconds=8"),
        (*alone, *_ALIKE, *_SMALLER),
    )


_ALL: Final = (
    GpuStage(DEVICE, 30, "device", "the device, and how fast it copies within its memory"),
    GpuStage(
        DEMO,
        80,
        "run",
        "what it costs when users walk away, and a few probes",
        ("demo",),
        ("run.max_seconds=20",),
    ),
    GpuStage("tests", 50, "tests", "the tests that need a device"),
    GpuStage(
        "decode_step",
        70,
        "bench",
        "a decode step, batch by batch, against the bytes that it reads",
        ("model_speed_gpu",),
    ),
    GpuStage(
        "cancel_steps",
        45,
        "run",
        "engine steps from a user's leaving to the release of the slot",
        ("run", "cancel_steps"),
        ("run.max_seconds=15",),
    ),
    GpuStage(
        "slot_recovery",
        45,
        "run",
        "one user of a full server leaves: how long until the next one is served",
        ("run", "slot_recovery"),
        ("run.max_seconds=10",),
    ),
    GpuStage(
        "swap_or_recompute",
        35,
        "bench",
        "a preempted request's blocks, copied to the host and back or computed again",
        ("swap_or_recompute",),
    ),
    _pressure("off", "nothing is done about it, and victims compute again", arm="off"),
    _pressure("watermark", "a share of them is kept for requests that already run", arm="on"),
    _pressure(
        "swap",
        "victims' blocks are copied to the host and back",
        arm="swap",
        swap_space_blocks=512,  # of a large model the default would pin 8 GB of the host's memory
    ),
)
STAGES: Final = {stage.name: stage for stage in _ALL}


def arguments(stage: GpuStage, work: Path, *, rehearses: bool) -> list[str]:
    """The arguments of Python, run in `ROOT`. Results go into the folder `work`."""
    match stage.kind:
        case "device":
            rehearsal = ["--rehearse"] if rehearses else []
            return ["-m", "tools.gpu.device", str(work / FIGURES["device"][0]), *rehearsal]
        case "tests":
            # Warnings of versions that no other test has met are shown, and fail nothing.
            flags = ["-q", "-m", "gpu", "-rfEs", "-W", "default"]
            return ["-m", "pytest", *flags, *marked_tests(ROOT / "tests")]
        case "bench":
            flags = ["--report-only", "--out", str(work / FIGURES["bench"][0])]
            return ["-m", "tools.bench", *stage.asks, *flags, *(["--quick"] if rehearses else [])]
        case "run":
            device = "cpu" if rehearses else "cuda"
            of_stage = stage.short if rehearses else stage.settings
            keys = (f"engine.device={device}", "engine.runner=torch", *of_stage)
            settings = [word for key in keys for word in ("--set", key)]
            return ["-m", "harness", *stage.asks, *settings, "--out", str(stage.leaves_in(work))]


def marked_tests(folder: Path) -> list[str]:
    """The test files with the marker `gpu`, found without importing any."""
    return [str(file) for file in sorted(folder.rglob("test_*.py")) if _has_marker(file)]


def _has_marker(file: Path) -> bool:
    text = file.read_text()
    return "mark.gpu" in text and any(_is_marker(node) for node in ast.walk(ast.parse(text)))


def _is_marker(node: ast.AST) -> bool:
    """`pytest.mark.gpu`, in a decorator or anywhere else."""
    if not (isinstance(node, ast.Attribute) and node.attr == "gpu"):
        return False
    return isinstance(node.value, ast.Attribute) and node.value.attr == "mark"
