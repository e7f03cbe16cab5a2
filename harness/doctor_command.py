"""`walkaway doctor`: look, judge, show."""

import json
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from harness.doctor import Finding, State, examine, missing
from harness.errors import ConfigError
from harness.machine import look_at_machine
from harness.run import RESULTS

MARKS: Final = {State.GOOD: "ok", State.LIMITED: "less", State.MISSING: "MISSING"}
WIDEST: Final = 100
INDENT: Final = " " * 23


def show_machine(*, as_json: bool) -> None:
    """Print what this machine can do. Raises ConfigError where the demo cannot run on it."""
    findings = examine(look_at_machine(RESULTS))
    lacking = missing(findings)
    if as_json:
        shown = {"can_run_demo": not lacking, "findings": msgspec.to_builtins(findings)}
        print(json.dumps(shown, indent=2))  # noqa: T201
    else:
        width = min(shutil.get_terminal_size().columns, WIDEST)
        print("\n".join(lines(findings, width=width)))  # noqa: T201
    if lacking:
        names = ", ".join(one.name for one in lacking)
        raise ConfigError(
            f"`walkaway demo` cannot run here for want of: {names}; mend it as said above (exit "
            f"code {ConfigError.exit_code}: what it runs on is not set up for it)"
        )


def lines(findings: Sequence[Finding], *, width: int) -> Iterator[str]:
    """The findings as text, no wider than `width`."""
    for one in findings:
        head = f"{MARKS[one.state]:<9}{one.name:<14}"
        yield from textwrap.wrap(one.text, width, initial_indent=head, subsequent_indent=INDENT)
        if one.mend is not None:
            yield from textwrap.wrap(
                one.mend, width, initial_indent=f"{INDENT}-> ", subsequent_indent=f"{INDENT}   "
            )
    if not missing(findings):
        yield "`walkaway demo` can run here."
