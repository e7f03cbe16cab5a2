"""The figures of a GPU by one command of at most 8 minutes: `python -m tools.gpu [STAGE...]`.

Each stage (stages.py) is a process with a box of time, and keeps what it has when the box is over.
The results are in a folder of the card, results/gpu/CARD; its README.md is the table, written again
after each stage. `rest` takes the stages that are not good there yet, `table` writes the tables of
all cards again. With `--rehearse` the same stages run on the CPU, short, in build/gpu-rehearsal.

Exit status: 0 good, also if a stage was skipped, or was too slow and kept what it had · 1 a stage
failed, or was too slow and left nothing · 2 nothing can run here · 130 interrupted.
"""

import argparse
import signal
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from reference_engine.device import look_for_tools
from tools.gpu.packages import NVML, PAGE, Find, lacking, missing_of, what_is_missing
from tools.gpu.stages import DEVICE, ROOT, STAGES

if TYPE_CHECKING:
    from tools.gpu.boxed import RunInBox

REST: Final = "rest"
TABLE: Final = "table"
_STARTED: Final = time.monotonic()


def main(
    argv: Sequence[str] | None = None,
    *,
    run: "RunInBox | None" = None,
    find: Find = find_spec,
    look_for_tools: Callable[[], Sequence[str]] = look_for_tools,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> int:
    given = _parse(argv)
    base = given.out or ROOT / ("build/gpu-rehearsal" if given.rehearse else "results/gpu")
    if given.stages == [TABLE]:
        return _write_tables(base, find)
    chosen = [name for name in STAGES if name in (DEVICE, *given.stages)]
    asked = list(STAGES) if given.stages in ([], [REST]) else chosen
    missing = missing_of([STAGES[name] for name in asked], rehearses=given.rehearse, find=find)
    lacks_nvml = not given.rehearse and bool(lacking([NVML], find))
    tools = () if given.rehearse else look_for_tools()
    if sentence := what_is_missing(missing, tools, lacks_nvml=lacks_nvml):
        _say(sentence)
    if missing[DEVICE]:
        return 2
    # Imported only now, as they need packages.
    from tools.gpu.boxed import run_in_box
    from tools.gpu.session import NoDeviceError, Session

    session = Session(
        base=base.resolve(),
        rehearses=given.rehearse,
        missing={
            name: [*lacks, *(tools if name != DEVICE else ())] for name, lacks in missing.items()
        },
        run=run or run_in_box,
        say=_say,
        now=now,
    )
    try:
        return session.measure(asked, only_not_good=given.stages == [REST])
    except NoDeviceError as error:
        _say(f"{error}; `make gpu REHEARSE=1` rehearses on the CPU")
        return 2


def _write_tables(base: Path, find: Find) -> int:
    if lacks := lacking(PAGE, find):
        _say(f"this Python lacks {', '.join(lacks)}: install with pip")
        return 2
    from tools.gpu.session import write_tables

    written = ", ".join(map(str, write_tables(base)))
    _say(f"the tables: {written}" if written else f"{base} has no card's folder yet")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    words = (*STAGES, REST, TABLE)
    parser = argparse.ArgumentParser(prog="python -m tools.gpu")
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"{', '.join(words)}")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, and short")
    parser.add_argument("--out", type=Path, help="default: results/gpu, or build/gpu-rehearsal")
    given = parser.parse_args(argv)
    if unknown := set(given.stages) - set(words):
        parser.error(f"no stage {', '.join(sorted(unknown))}; there are {', '.join(words)}")
    if len(given.stages) > 1 and {REST, TABLE} & set(given.stages):
        parser.error(f"{REST} and {TABLE} stand alone: name no other stage with them")
    return given


def _say(text: str) -> None:
    minutes, seconds = divmod(int(time.monotonic() - _STARTED), 60)
    print(f"[{minutes}:{seconds:02}] {text}", flush=True)  # noqa: T201


if __name__ == "__main__":
    # A process that began with SIGINT ignored would pass that on to its stages.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        _say("interrupted; STAGE=rest runs what is not good yet")
        sys.exit(130)
