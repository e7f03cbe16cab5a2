"""What `make gpu` runs: the stages in order of worth, and the seconds that each may take.

Every stage is a process. A workload serves the model that the engine itself chooses for the device;
in a rehearsal that is the small one for CPUs, and the load is cut short.
"""

import ast
from pathlib import Path
from typing import Final, Literal, NamedTuple

Kind = Literal["device", "tests", "bench", "run"]

ROOT: Final = Path(__file__).parents[2]
DEVICE: Final = "device"
LONGEST_S: Final = 460.0  # of all boxes together

# The end of a box, between SIGINT and SIGKILL. A run then writes its rows, its summary and report.
GRACE_S: Final[dict[Kind, float]] = {"device": 1.0, "tests": 2.0, "bench": 2.0, "run": 6.0}
# What a process leaves in its folder, apart from what it says; the first file is needed.
FIGURES: Final[dict[Kind, tuple[str, ...]]] = {
    "device": ("device.json",),
    "tests": (),
    "bench": ("lines.jsonl",),
    "run": ("summary.json", "manifest.json", "report.html"),
}


class Stage(NamedTuple):
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

    def leaves_in(self, work: Path) -> Path:
        """The folder of the process's files; a run has one of its own, which gives it its name."""
        return work / self.name if self.kind == "run" else work


def _pressure(name: str, about: str, *settings: str) -> Stage:
    """One arm of `memory_pressure` as a run of its own, so that a slow one costs no other."""
    alone = ("arms=[]", "run.rounds=1", *settings)
    return Stage(
        f"pressure_{name}",
        40,
        "run",
        f"blocks run short: {about}",
        ("run", "memory_pressure"),
        (*alone, "run.max_seconds=8"),
        (*alone, "run.max_seconds=3"),
    )


_ALL: Final = (
    Stage(DEVICE, 15, "device", "the device, and how fast it copies within its memory"),
    Stage(
        "demo",
        80,
        "run",
        "what it costs when users walk away, and a few probes",
        ("demo",),
        ("run.max_seconds=20",),
    ),
    Stage("tests", 50, "tests", "the tests that need a device"),
    Stage(
        "decode_step",
        70,
        "bench",
        "a decode step at batch 1, 16 and 64, against the bytes that it reads",
        ("model_speed_gpu",),
    ),
    Stage(
        "cancel_steps",
        45,
        "run",
        "engine steps from a user's leaving to the release of the slot",
        ("run", "cancel_steps"),
        ("run.max_seconds=15",),
    ),
    Stage(
        "slot_recovery",
        45,
        "run",
        "one user of a full server leaves: how long until the next one is served",
        ("run", "slot_recovery"),
        ("run.max_seconds=10",),
    ),
    Stage(
        "swap_or_recompute",
        35,
        "bench",
        "a preempted request's blocks, copied to the host and back or computed again",
        ("swap_or_recompute",),
    ),
    _pressure("off", "nothing is done about it, and victims compute again"),
    _pressure(
        "watermark",
        "15 % of them are kept for requests that already run",
        "engine.watermark=0.15",
    ),
    _pressure(
        "swap",
        "victims' blocks are copied to the host and back",
        "engine.preemption=swap",
        "engine.swap_space_blocks=512",
    ),
)
STAGES: Final = {stage.name: stage for stage in _ALL}


def arguments(stage: Stage, work: Path, *, rehearses: bool) -> list[str]:
    """Of Python, run in `ROOT`. Results go into the folder `work`."""
    match stage.kind:
        case "device":
            rehearsal = ["--rehearse"] if rehearses else []
            return ["-m", "tests.gpu.device", str(work / FIGURES["device"][0]), *rehearsal]
        case "tests":
            # Warnings of versions that no other test has met are shown, and fail nothing.
            flags = ["-q", "-m", "gpu", "-rfE", "-W", "default"]
            return ["-m", "pytest", *flags, *marked_tests(ROOT / "tests")]
        case "bench":
            flags = ["--report-only", "--out", str(work / FIGURES["bench"][0])]
            return ["-m", "tests.bench", *stage.asks, *flags, *(["--quick"] if rehearses else [])]
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
