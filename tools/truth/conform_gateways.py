"""`walkaway conform --upstream` on a gateway whose faults are known:
`python -m tools.truth.conform_gateways [FAULT...] [--dialects completions,chat]`.

Each row of the table is a gateway with some faults (tools/truth/gateway_faults.py), and the cases
that must be red, in the way of the fault, in each dialect; no other may be. The page is
docs/conform/gateways.md. The exit status is 1 if a verdict is another than the table's.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from harness.conform.gateway.case import DIALECTS
from harness.conform.gateway.cases import gateway_cases
from harness.run.process import free_port
from harness.store.conform_result import CONFORM_FILE, ConformResult, Failure, Verdict, read_conform
from harness.store.manifest import utc_now
from tests.e2e.running import faulty_gateway
from tools.truth.conform_kinds import revision

PAGE: Final = Path(__file__).parents[2] / "docs" / "conform" / "gateways.md"
LATE, NEVER, HARM = Failure.LATE, Failure.NEVER, Failure.HARM
Reds = Mapping[str, Failure]

TOLD = ("before-headers", "silent-prefill", "queue")  # where nothing is written
IN_ONE_PIECE = ("unary", "last-token")  # where nothing is written before the end
LEAVES = (*TOLD, *IN_ONE_PIECE, "fin-decode", "rst-decode", "stalled", "crowd")


def reds(names: Sequence[str], how: Failure) -> dict[str, Failure]:
    return {f"hop/{name}": how for name in names}


ALL_NEVER: Final = reds(LEAVES, NEVER)
ALL_LATE: Final = reds(LEAVES, LATE)
AT_NEXT_WRITE: Final = reds(TOLD, LATE) | reds(IN_ONE_PIECE, NEVER)
BILL: Final = {"bill/left": HARM}


class Row(NamedTuple):
    """`is_open`: other cases may be undecided, as no request is served any more. `has_bill`: the
    gateway's page of usage is read, too."""

    faults: Mapping[str, Any]
    reds: Reds
    is_open: bool = False
    has_bill: bool = False

    @property
    def name(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in self.faults.items()) or "none"


ROWS: Final = (
    Row({}, {}, has_bill=True),
    Row({"late_s": 1.0}, ALL_LATE),
    Row({"late_s": 3.0}, ALL_LATE | reds(["last-token"], NEVER)),
    Row({"at_next_write": True}, AT_NEXT_WRITE),
    Row({"half_closed": True}, AT_NEXT_WRITE),
    Row({"drain_s": 3.0}, ALL_LATE | reds(["last-token"], NEVER)),
    Row({"drain_s": -1}, ALL_NEVER),
    Row({"never": True}, ALL_NEVER, has_bill=True),
    Row({"leaked_connection": True}, ALL_NEVER | reds(["connections"], NEVER)),
    Row({"leaked_gauge": True}, reds(["gauges"], NEVER)),
    Row({"retries": True}, reds(["no-retry"], NEVER)),
    Row({"early_retries": True, "backoff_s": 1.0}, reds(["no-retry"], NEVER)),
    Row({"penalty": 5, "penalty_s": 600.0}, reds(["no-penalty"], HARM), is_open=True),
    Row({"silent_cut": True}, reds(["cut-is-no-end"], HARM)),
    Row({"lost_usage": True}, BILL, has_bill=True),
    Row({"double_usage": True}, BILL, has_bill=True),
    Row({"failure_retries": 2}, {}),
    Row({"renames": "other"}, {}),
    Row({"fewest": 64}, {}),
    Row({"buffers": True}, {}),
    Row({"compresses": True}, {}),
)
USAGE: Final = 'page = "/usage"\ntokens = "completion_tokens"\nsettle_s = 1.0\n'


def run(row: Row, dialects: Sequence[str], names: Sequence[str] = ()) -> ConformResult:
    """`names`: of cases, without their dialects; all if empty."""
    ids = [
        case
        for case, one in gateway_cases().items()
        if case.endswith(tuple(dialects)) and (not names or case.rpartition("/")[0] in names)
        if row.has_bill or "usage" not in one.case.needs
    ]
    port = free_port()
    with (
        tempfile.TemporaryDirectory() as folder,
        faulty_gateway(f"http://127.0.0.1:{port}", **row.faults) as gateway,
    ):
        usage = Path(folder) / "usage.toml"
        usage.write_text(USAGE)
        flags = ["--target", gateway.url, "--metrics-url", f"{gateway.url}/metrics"]
        flags += ["--usage", str(usage)] if row.has_bill else []
        out = Path(folder) / "out"
        command = [sys.executable, "-m", "harness", "conform", *ids, "--upstream", str(port)]
        done = subprocess.run(
            [*command, *flags, "--quiet", "--out", str(out)],
            capture_output=True,
            text=True,
            check=False,
        )
        if not (out / CONFORM_FILE).exists():
            raise RuntimeError(done.stderr)
        return read_conform(out / CONFORM_FILE)


def wrong(row: Row, result: ConformResult) -> list[str]:
    found = []
    for one in result.cases:
        due = row.reds.get(one.id.rpartition("/")[0])
        if one.kind is not due:
            found.append(f"{one.id} is {one.kind}, not {due}: {one.reason}")
        is_undecided = one.verdict in (Verdict.CANNOT_DECIDE, Verdict.HARNESS)
        if is_undecided and due is None and not row.is_open:
            found.append(f"{one.id} is {one.verdict}: {one.reason}")
    return found


def line(row: Row, result: ConformResult, problems: Sequence[str], took_s: float) -> str:
    verdicts = [one.verdict for one in result.cases]
    cells = [
        _shown(row),
        ", ".join(f"`{case}` {how}" for case, how in row.reds.items()),
        ", ".join(sorted({str(one.dialect) for one in result.cases})),
        *(str(verdicts.count(one)) for one in (Verdict.PASS, Verdict.FAIL, Verdict.CANNOT_DECIDE)),
        f"{took_s:.0f}",
        "no" if problems else "yes",
        f"{utc_now():%Y-%m-%d} {revision()}",
    ]
    return f"| {' | '.join(cells)} |"


HEAD: Final = """# Gateways whose faults are known

`make conform-gateways` runs `walkaway conform --upstream` on a scripted gateway with each fault, in
several dialects, and writes this table. A row is right if these cases are red, in this way, in each
dialect, and no others are.

| faults | must be red | dialects | pass | fail | undecided | s | right | measured |
|---|---|---|---|---|---|---|---|---|
"""


def keep_lines(lines: Sequence[str]) -> None:
    """Writes them on the page, with the lines of other rows that are there."""
    old = PAGE.read_text().splitlines() if PAGE.exists() else []
    known = {_name(one): one for one in [*old, *lines] if one.startswith("| ")}
    kept = [known[name] for name in map(_shown, ROWS) if name in known]
    PAGE.write_text(HEAD + "\n".join(kept) + "\n")


def _name(line: str) -> str:
    return line.removeprefix("| ").partition(" | ")[0]


def _shown(row: Row) -> str:
    return f"`{row.name}`" if row.faults else "none"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("faults", nargs="*", help="of " + ", ".join({*map(_first, ROWS)} - {""}))
    parser.add_argument("--dialects", default=",".join(DIALECTS))
    given = parser.parse_args(arguments)
    dialects = given.dialects.split(",")
    rows = [one for one in ROWS if not given.faults or _first(one) in given.faults]
    lines, problems = [], 0
    for number, row in enumerate(rows, start=1):
        began_s = time.monotonic()
        result = run(row, dialects)
        found = wrong(row, result)
        problems += len(found)
        lines.append(line(row, result, found, time.monotonic() - began_s))
        print("\n".join([lines[-1], *(f"  WRONG: {one}" for one in found)]), flush=True)  # noqa: T201
        print(f"{number}/{len(rows)}", file=sys.stderr)  # noqa: T201
    keep_lines(lines)
    return 1 if problems else 0


def _first(row: Row) -> str:
    return next(iter(row.faults), "")


if __name__ == "__main__":
    sys.exit(main())
