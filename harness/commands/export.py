"""`walkaway export`: a run in the formats of other tools."""

import json
from pathlib import Path

from harness.errors import ConfigError
from harness.export.chrome_trace import chrome_trace
from harness.export.library import load_run


def export_run(run: Path, *, trace: Path | None, force: bool) -> None:
    """Raises ConfigError where no file is named, one is there already or cannot be written, and
    where the run has no rows."""
    if trace is None:
        raise ConfigError("nothing to write: name a file with --trace")
    if trace.exists() and not force:
        raise ConfigError(f"{trace}: is there already; overwrite it with --force")
    frames = load_run(run).frames
    if frames.requests.empty:
        raise ConfigError(f"{run}: no request was made in this run: nothing to write")
    try:
        trace.write_text(json.dumps(chrome_trace(frames)) + "\n")
    except OSError as error:
        raise ConfigError(f"{trace}: cannot be written: {error}") from error
    print(f"wrote {trace}; open it at https://ui.perfetto.dev")  # noqa: T201
