"""`walkaway export`: a run in the formats of other tools."""

import json
from collections.abc import Iterable
from pathlib import Path

from harness.errors import ConfigError
from harness.export.aiperf_rows import aiperf_rows
from harness.export.chrome_trace import chrome_trace
from harness.export.library import load_run


def export_run(run: Path, *, trace: Path | None, aiperf: Path | None, force: bool) -> None:
    """Write what was asked for. Raises ConfigError where nothing was, where a file is named twice,
    is there already or cannot be written, and where the run's rows are not there."""
    files = [file for file in (trace, aiperf) if file is not None]
    if not files:
        raise ConfigError("nothing to write: name a file with --trace or with --aiperf")
    if trace is not None and aiperf is not None and trace.resolve() == aiperf.resolve():
        raise ConfigError(f"{trace}: is named by --trace and by --aiperf: name a file for each")
    for file in files:
        if file.exists() and not force:
            raise ConfigError(f"{file}: is there already; overwrite it with --force")
    frames = load_run(run).frames
    if frames.requests.empty:
        raise ConfigError(f"{run}: no request was made in this run: nothing to write")
    if trace is not None:
        _write(trace, [json.dumps(chrome_trace(frames))])
        print(f"wrote {trace}; open it at https://ui.perfetto.dev")  # noqa: T201
    if aiperf is not None:
        _write(aiperf, (json.dumps(row) for row in aiperf_rows(frames)))
        print(f"wrote {aiperf}")  # noqa: T201


def _write(file: Path, lines: Iterable[str]) -> None:
    try:
        with file.open("w") as opened:
            opened.writelines(f"{line}\n" for line in lines)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error}") from error
