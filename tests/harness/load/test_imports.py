"""What a load process loads before its first request, as `walkaway run` starts it for each run."""

import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[3]


def test_a_load_process_loads_no_statistics() -> None:
    """They would take longer than all the rest, and nothing of a load needs them."""
    code = "import sys, workloads.locustfile; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=_ROOT, stdout=subprocess.PIPE, text=True
    )
    assert "harness.load.users" in done.stdout.split()
    assert not {"scipy", "pandas", "pyarrow", "torch", "plotly"} & set(done.stdout.split())
