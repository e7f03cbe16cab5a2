"""A run's folder that was judged: manifest and summary, checked once for whoever reads them.

A folder that is no run's is a mistake of the caller's. One that is a run's but cannot be used (cut
short, damaged, or written by another version) says why and what would help: the library raises it,
and the gate, for which that is a verdict, catches it.
"""

from pathlib import Path
from typing import Any, Final

from harness.errors import ConfigError
from harness.records import SCHEMA_VERSION
from harness.store import RunFolder

WHOLE_FILES: Final = "a run whose files are whole"


class UnusableRunError(ConfigError):
    """A run that cannot be read as it is: the `reason`, and what would help (`remedy`)."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason}; what would help: {remedy}")
        self.reason = reason
        self.remedy = remedy


def open_run(path: Path) -> RunFolder:
    """Raises ConfigError where `path` is no run's folder."""
    if not (path / "manifest.json").is_file():
        raise ConfigError(f"{path}: is not a run's folder (it has no manifest.json)")
    return RunFolder(path)


def read_judged(folder: RunFolder) -> tuple[dict[str, Any], dict[str, Any]]:
    """Manifest and summary, both of our schema version. Raises UnusableRunError."""
    if not (folder.path / "summary.json").is_file():
        saved = f"; for what was saved of this one: walkaway report {folder.path}"
        raise UnusableRunError(
            f"{folder.path}: was cut short before it was judged: there is no summary.json",
            f"a whole run{saved if folder.may_have_requests() else ''}",
        )
    try:
        manifest, summary = folder.read_manifest(), folder.read_summary()
    except ConfigError as error:
        raise UnusableRunError(str(error), WHOLE_FILES) from error
    for name, content in (("manifest.json", manifest), ("summary.json", summary)):
        if said := other_version(content):
            raise UnusableRunError(
                f"{folder.path / name}: {said}",
                "the walkaway that wrote it (see its `versions`), or a new run",
            )
    return manifest, summary


def other_version(content: Any) -> str | None:
    """Said of the content of a file that another schema version wrote; None: it is of ours."""
    found = content.get("schema_version") if isinstance(content, dict) else None
    if found == SCHEMA_VERSION:
        return None
    return f"has schema version {found}, and this walkaway reads version {SCHEMA_VERSION}"
