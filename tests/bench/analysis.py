"""A million requests of 100 tokens each, analysed: seconds and memory, against what they may take.

The run is made up: users of a server that is seen from outside only, half of whom leave and half of
whom read to the end, with the load processes' own ticks and a scraped metrics page. It is written
by a child process; another, fresh one reads its folder and computes its summary, and tells how much
memory it had at most. The folder is removed in the end.
"""

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from tests.bench.ratio import Bound, Ratio, share

REQUESTS: Final = 1_000_000
FEW_REQUESTS: Final = 2_000
MOST_S: Final = 60.0
MOST_GIB: Final = 4.0
ROUNDS: Final = 3


def measure(*, quick: bool = False) -> Iterable[Ratio]:
    requests, rounds = (FEW_REQUESTS, 1) if quick else (REQUESTS, ROUNDS)
    with TemporaryDirectory(prefix="walkaway-bench-") as folder:
        _child("write", Path(folder), str(requests))
        told = [_child("analyse", Path(folder)) for _ in range(rounds)]
    for what, unit, key, most in (
        ("time", "s", "seconds", MOST_S),
        ("peak memory", "GiB", "peak_gib", MOST_GIB),
    ):
        yield share(
            f"{requests:,} requests of 100 tokens analysed: {what} (theirs: what it may take)",
            unit,
            [one[key] for one in told],
            [most] * rounds,
            Bound("at most", 1.0),
        )


def _child(*arguments: str | Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.bench.made_up_run", *map(str, arguments)]
    told = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    found: dict[str, Any] = json.loads(told)
    return found
