"""The child process of one run of a web page: `python -m harness.commands.page_run`.

`harness.web.recorder` measures it. Then the terminal shows its result, as after `walkaway run`.
"""

import os
import sys

from harness.errors import WalkawayError
from harness.web.recorder import record_as_ordered

_STDOUT, _STDERR = 1, 2


def main() -> None:
    if (finished := record_as_ordered()) is None:
        return
    from harness.commands.run_and_show import show_finished  # it takes a while to import

    os.dup2(_STDERR, _STDOUT)  # the page has heard all: from here on it is the terminal's
    try:
        show_finished(finished, is_interrupted=False, as_json=False, shows_all=False)
    except (WalkawayError, RuntimeError) as error:
        sys.stderr.write(f"error: {error}\n")


if __name__ == "__main__":
    main()
