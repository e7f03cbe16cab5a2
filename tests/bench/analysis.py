"""A million requests of 100 tokens each, analysed: seconds and memory, against what they may take.

The runs are made up, as `made_up_run` says. One of a million requests and a thousand users is seen
from outside only: requests, the load processes' ticks and a scraped page. The other has the exact
logs, too, a tenth of the requests and a hundred users. Each is written by a child process; other,
fresh ones read its folder, write its summary and tell how long that took and how much memory they
had at most. The folders are removed in the end.
"""

from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from tests.bench.large_run import told_by_child, write_by_child
from tests.bench.ratio import Bound, Ratio, share
from tests.made_up.large import Plan

RUNS: Final = {
    "seen from outside": Plan(requests=1_000_000, users=1_000, is_exact=False),
    "with its logs": Plan(requests=100_000, users=100, is_exact=True),
}
FEW: Final = Plan(requests=2_000, users=100, is_exact=True)
MOST_S: Final = 60.0
MOST_GIB: Final = 4.0
ROUNDS: Final = 3


def measure(*, quick: bool = False) -> Iterable[Ratio]:
    runs, rounds = ({"with its logs": FEW}, 1) if quick else (RUNS, ROUNDS)
    for name, plan in runs.items():
        with TemporaryDirectory(prefix="walkaway-bench-") as folder:
            write_by_child(Path(folder), plan)
            told = [told_by_child("analyse", Path(folder)) for _ in range(rounds)]
        for what, unit, key, most in (
            ("time", "s", "seconds", MOST_S),
            ("peak memory", "GiB", "peak_gib", MOST_GIB),
        ):
            yield share(
                f"{plan.requests:,} requests {name}: {what} (theirs: what it may take)",
                unit,
                [one[key] for one in told],
                [most] * rounds,
                Bound("at most", 1.0),
            )
