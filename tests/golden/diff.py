"""How what is said of the recorded runs differs from then, as a unified diff.

python -m tests.golden.diff [PATTERN...]     # clean/report.txt, 'pairs/*', '*/gate.txt', ...
"""

import difflib
import sys
import tempfile
from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path

from tests.golden.outputs import EXPECTED, Code, draw_all, judge_all, lay_out

ROOT = Path(__file__).parents[2]


def main(patterns: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder, "runs")
        lay_out(work, judged=True)
        code = Code(ROOT)
        pages = draw_all(code, work, lambda name: _is_asked_for(name, patterns))
        for name, text in chain(judge_all(code, work), pages):
            if _is_asked_for(name, patterns):
                was = (EXPECTED / name).read_text().splitlines(keepends=True)
                now = text.splitlines(keepends=True)
                sys.stdout.writelines(difflib.unified_diff(was, now, f"then/{name}", f"now/{name}"))


def _is_asked_for(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatchcase(name, one) for one in patterns)


if __name__ == "__main__":
    main(sys.argv[1:])
