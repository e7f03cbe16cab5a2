"""What a made-up run shows from outside, and a figure taken for what it must be."""

from collections.abc import Callable

from harness.analysis.black_box import Outside, seen_from_outside
from harness.analysis.facts import run_facts
from tests.made_up.run import RunBuilder
from tests.made_up.servers import lonely


def seen(run: RunBuilder) -> Outside:
    frames = run.frames()
    return seen_from_outside(frames, run_facts(frames))


def lonely_run(make_run: Callable[[], RunBuilder]) -> RunBuilder:
    run = make_run()
    lonely(run)
    return run
