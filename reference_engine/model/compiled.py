"""The decode step compiled ahead of time for this CPU, by torch's AOTInductor.

There are two packages: one for a single row, and one for any larger number of rows. Neither
contains weights: a package uses the eager model's. So a package depends on the model's shape, on
torch, on the processor and on our source, and its name in the cache on disk is a hash of all that.
Missing ones are compiled first, each package in a process of its own:

    python -m reference_engine.model.compiled < a pickled job

The process ends with its standard input, so it never outlives the worker.
"""

import hashlib
import os
import pickle
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

import msgspec
import torch
from torch import Tensor

from reference_engine.config import EngineConfig
from reference_engine.model import attention, batch, decode_step, llama
from reference_engine.model.batch import DecodeRows, Span
from reference_engine.model.decode_step import DecodeStep
from reference_engine.model.llama import build_model
from reference_engine.model.shapes import ModelShape

MIN_BLOCKS: Final = 2  # torch.export takes a dimension of 1 for a constant
_OPTIONS: Final = {
    "aot_inductor.package_constants_in_so": False,
    "assert_indirect_indexing": False,  # the scheduler's checks hold the tables together
}
_SOURCES: Final = (llama, attention, batch, decode_step, sys.modules[__name__])
_POLL_S: Final = 0.2
_SAY_S: Final = 15.0


class CompileError(RuntimeError):
    """The step could not be compiled or loaded; the message says why."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """All that a package depends on, apart from the machine, torch and our source."""

    shape: ModelShape
    max_model_len: int
    num_blocks: int
    block_size: int
    num_threads: int
    has_one_row: bool

    def file_name(self, machine: Sequence[str]) -> str:
        parts = [msgspec.json.encode(self), repr(_OPTIONS).encode()]
        parts += [part.encode() for part in machine]
        parts += [Path(str(module.__file__)).read_bytes() for module in _SOURCES]
        digest = hashlib.sha256(b"\0".join(parts)).hexdigest()
        return f"{'one-row' if self.has_one_row else 'rows'}-{digest[:32]}.pt2"


def this_machine() -> list[str]:
    """Packages have the instructions of the processor that they were compiled on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    flags = [line for line in lines if line.startswith(("flags", "Features"))]
    capability = torch.backends.cpu.get_cpu_capability()
    return [torch.__version__, sys.version, platform.machine(), capability, *flags[:1]]


class CompiledStep:
    """Answers plain steps of any number of requests."""

    def __init__(self, step: DecodeStep, pools: Sequence[Tensor], rows: DecodeRows) -> None:
        self._weights = dict(step.named_parameters()) | dict(step.named_buffers())
        self._pools, self._rows = list(pools), rows
        self._packages: dict[bool, Any] = {}

    def prepare(
        self, shape: ModelShape, config: EngineConfig, folder: Path, say: Callable[[str], None]
    ) -> None:
        """Load the packages; first compile those that are missing. Raises CompileError."""
        jobs = [
            Job(
                shape=shape,
                max_model_len=config.max_model_len,
                num_blocks=len(self._pools[0]),
                block_size=config.block_size,
                num_threads=torch.get_num_threads(),
                has_one_row=has_one_row,
            )
            for has_one_row in (True, False)[: config.max_num_seqs]
        ]
        for job, path in ensure_compiled(jobs, folder, say).items():
            self._load(path, has_one_row=job.has_one_row)

    def _load(self, path: Path, *, has_one_row: bool) -> None:
        """The first run, with rows that do nothing, warms it up."""
        try:
            # torch._inductor.aoti_load_package does the same, but imports Triton, and its result
            # reads a description of the inputs at each call: 0.1 ms.
            package = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", True, 1, -1)
            weights = {name: self._weights[name] for name in package.get_constant_fqns()}
            # Neither the inactive copy nor a partial update; the weights stay the model's own.
            package.load_constants(weights, False, True, True)
            self._packages[has_one_row] = package
            self._run([], 1 if has_one_row else 2)
        except (AttributeError, KeyError, RuntimeError, TypeError) as error:  # of another torch
            raise CompileError(f"{path} cannot be used, delete it: {error}") from error

    def logits(self, spans: Sequence[Span]) -> Tensor:
        return self._run(spans, len(spans))

    def _run(self, spans: Sequence[Span], num_rows: int) -> Tensor:
        self._rows.fill(spans, num_rows, min_blocks=MIN_BLOCKS)
        package = self._packages[num_rows == 1]
        logits: Tensor
        [logits] = package.boxed_run([self._rows.head, self._rows.tables, *self._pools])
        return logits


def ensure_compiled(
    jobs: Sequence[Job], folder: Path, say: Callable[[str], None]
) -> dict[Job, Path]:
    """Compile what the folder lacks, side by side. Raises CompileError."""
    machine = this_machine()
    paths = {job: folder / job.file_name(machine) for job in jobs}
    missing = [job for job, path in paths.items() if not path.exists()]
    if missing:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _compile_all({job: paths[job] for job in missing}, say)
        except OSError as error:
            raise CompileError(str(error)) from error
    return paths


def _compile_all(paths: Mapping[Job, Path], say: Callable[[str], None]) -> None:
    started = said = time.monotonic()
    say(f"compiling the decode step: {len(paths)} packages, once for this machine")
    with tempfile.TemporaryFile() as log:
        processes = [_start(job, path, log) for job, path in paths.items()]
        try:
            while None in (statuses := [process.poll() for process in processes]):
                if any(statuses):
                    break
                threading.Event().wait(_POLL_S)
                if time.monotonic() - said > _SAY_S:
                    said = time.monotonic()
                    done = len(statuses) - statuses.count(None)
                    say(f"{done} of {len(paths)} packages compiled after {said - started:.0f} s")
        finally:
            for process in processes:
                process.kill()
                process.communicate()
        if any(statuses):
            log.seek(0)
            lines = log.read().decode(errors="replace").strip().splitlines()
            raise CompileError(lines[-1] if lines else f"exit status {statuses}")
    say(f"compiled after {time.monotonic() - started:.0f} s")


def _start(job: Job, path: Path, log: IO[bytes]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", __name__]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)
    assert process.stdin is not None
    pickle.dump((job, path), process.stdin)
    process.stdin.flush()  # it stays open: its end would end the process
    return process


def compile_package(job: Job, path: Path) -> None:
    from torch._inductor import aoti_compile_and_package  # here, since it imports compilers
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch.export import Dim

    get_cpp_compiler()  # raises, if there is none, before the work and not after it
    torch.set_num_threads(job.num_threads)
    shape = job.shape
    model = build_model(shape, job.max_model_len, torch.device("cpu"))
    step = DecodeStep(model, torch.zeros(2, shape.vocab_size), job.block_size)
    num_rows = 1 if job.has_one_row else 3
    block_numel = job.block_size * 2 * shape.num_kv_heads * shape.head_dim
    dtype = getattr(torch, shape.dtype)
    pools = [torch.empty(job.num_blocks, block_numel, dtype=dtype) for _ in range(shape.num_layers)]
    head = torch.zeros(4, num_rows, dtype=torch.long)
    tables = torch.zeros(num_rows, MIN_BLOCKS, dtype=torch.long)
    rows = None if job.has_one_row else Dim("rows", min=2)
    width = Dim("width", min=MIN_BLOCKS)
    shapes = ({1: rows}, {0: rows, 1: width}, [None] * len(pools))
    with torch.no_grad():
        program = torch.export.export(step, (head, tables, pools), dynamic_shapes=shapes)
        made = path.with_suffix(f".{os.getpid()}.pt2")
        aoti_compile_and_package(program, package_path=str(made), inductor_configs=_OPTIONS)
    made.replace(path)


def main() -> None:
    job, path = pickle.load(sys.stdin.buffer)

    def leave_with_the_worker() -> None:
        while os.read(0, 4096):
            pass
        os._exit(1)

    threading.Thread(target=leave_with_the_worker, daemon=True).start()
    compile_package(job, path)


if __name__ == "__main__":
    main()
