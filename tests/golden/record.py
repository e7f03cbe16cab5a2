"""Record the runs and what is made of them: `python -m tests.golden.record runs|expected [NAME]`.

`--code DIR` names the checkout whose code is run: the recorded files were made by that of 7cb23c3.
`runs` makes the folders under `runs/`. Their rows are as the run wrote them, but for the machine's
name; files that are made from the rows (summary, report) are left out. `expected` makes each of
these anew, and what `gate`, `compare` and `export` say, and keeps it under `expected/`.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from tests.golden.outputs import (
    EXPECTED,
    JUDGED,
    Code,
    judge_all,
    lay_out,
    summaries_as_files,
    summarise_all,
    summarise_rounds,
    write_outputs,
)
from tests.golden.runs import COMPARED_ARMS, RUNS, Ending, Recorded

HERE: Final = Path(__file__).parent
ROOT: Final = HERE.parents[1]
LEFT_OUT: Final = ("report.html", "report.log", "load.log", "load_plan.json", "summary.json")
MACHINE: Final = {"cpu": "a processor", "cores": 2, "memory_bytes": 2**34, "platform": "Linux"}
HOST: Final = "host"
RUNS_FOR_S: Final = 2.5  # until it is interrupted, or something is killed


def record(name: str, code: Code) -> None:
    """Make one run and keep its folder."""
    of = RUNS[name]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        shutil.copytree(HERE / "workloads", work, dirs_exist_ok=True)
        with _server(of, code, work) as (url, pid):
            command = [sys.executable, "-m", "harness", "run", of.workload, "--out", name]
            command += [flag.format(url=url) for flag in of.flags]
            for setting in of.sets:
                command += ["--set", setting]
            process = subprocess.Popen(command, cwd=work, env=code.env)
            _end(of.ending, process, work / name, pid)
            process.wait(180)
        _keep(work / name, HERE / "runs" / name)
    say(f"{name}: exit code {process.returncode}")


@contextmanager
def _server(of: Recorded, code: Code, work: Path) -> Iterator[tuple[str, int]]:
    """The server that the run is held against, if it has one of its own."""
    if of.engine is not None:
        command = [sys.executable, "-m", "reference_engine", "--port", "0", "--exit-with-stdin"]
        place, env = work, code.env
        command += of.engine
    elif of.script is not None:
        command = [sys.executable, "-m", "tests.truth.server", of.script]
        place, env = ROOT, dict(os.environ)
    else:
        yield "", 0
        return
    with subprocess.Popen(
        command, cwd=place, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            ready = json.loads(process.stdout.readline())
            yield ready["url"], process.pid
        finally:
            process.stdin.close()
            try:
                process.wait(10)
            finally:
                process.kill()


def _end(ending: Ending, process: subprocess.Popen[bytes], folder: Path, server: int) -> None:
    """Let the load run a while, and end what is to be ended."""
    if ending == "by itself":
        return
    while not any(folder.glob("shards/requests-*")):
        time.sleep(0.05)  # noqa: TID251  a tool that records, no test
    time.sleep(RUNS_FOR_S)  # noqa: TID251
    if ending == "server killed":
        os.kill(server, signal.SIGKILL)
    else:
        process.send_signal(signal.SIGKILL if ending == "killed" else signal.SIGINT)


def _keep(run: Path, kept: Path) -> None:
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(run, kept, ignore=shutil.ignore_patterns(*LEFT_OUT, "*.log"))
    for path in kept.rglob("manifest.json"):
        _neutral_manifest(path)
    for path in kept.rglob("*.parquet"):
        _neutral_rows(path)
    for path in kept.glob("shards/*.ndjson"):
        _neutral_shard(path)


def _neutral_manifest(path: Path) -> None:
    content = json.loads(path.read_text())
    content["hardware"] |= MACHINE
    for process in content["load_processes"]:
        process["host"] = HOST
    path.write_text(json.dumps(content, indent=1) + "\n")


def _neutral_rows(path: Path) -> None:
    """The same rows, with another name of the host, packed as small as can be."""
    table = pq.read_table(path)
    at = table.schema.get_field_index("host")
    if at >= 0:
        hosts = pa.array([HOST] * len(table), pa.string())
        table = table.set_column(at, table.schema.field(at), hosts)
    pq.write_table(table, path, compression="zstd", compression_level=19, write_page_checksum=True)


def _neutral_shard(path: Path) -> None:
    host = socket.gethostname()
    text = path.read_text().replace(f'"{host}"', f'"{HOST}"')
    path.unlink()
    path.with_name(path.name.replace(f"-{host}-", f"-{HOST}-")).write_text(text)


def expect(code: Code) -> None:
    """Make everything anew from the rows and keep it."""
    for path in EXPECTED.rglob("*.json"):
        path.unlink()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder, "runs")
        lay_out(work, judged=False)
        write_outputs(summaries_as_files(summarise_all(code, work, JUDGED)), EXPECTED)
        write_outputs(summaries_as_files(summarise_rounds(code, work, COMPARED_ARMS)), EXPECTED)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder, "runs")
        lay_out(work, judged=True)
        write_outputs(judge_all(code, work), EXPECTED)


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("runs", "expected"))
    parser.add_argument("names", nargs="*", choices=[*RUNS, []])
    parser.add_argument("--code", type=Path, default=ROOT)
    options = parser.parse_args(arguments)
    code = Code(options.code)
    if options.what == "runs":
        for name in options.names or RUNS:
            record(name, code)
    else:
        expect(code)


if __name__ == "__main__":
    main(sys.argv[1:])
