"""Who holds the connections that users left open, once the load is over.

A load process takes its connections with it when it ends, and the kernel's reset would tell the
server what it had not noticed by itself. So a small process inherits them and holds them until
standard input ends, which it shares with the load: when the harness has seen the server settle, or
is gone itself.
"""

import subprocess
import sys
from collections.abc import Sequence
from typing import Final

_PROGRAM: Final = "import os\nwhile os.read(0, 4096): pass"


def hold(descriptors: Sequence[int]) -> None:
    """Keep these open until standard input ends. The caller may close its own at once."""
    subprocess.Popen([sys.executable, "-I", "-S", "-c", _PROGRAM], pass_fds=descriptors)
