"""walkaway's users under Locust: `locust -f workloads/locustfile.py --host http://127.0.0.1:8000`.

With the web page or `--headless`, alone or as master and workers. `walkaway run` starts this same
file with a complete plan (`--walkaway-plan`).
"""

import sys
from typing import Any

from locust import events  # noqa: TID251  # Locust itself loads this file
from locust.argument_parser import LocustArgumentParser  # noqa: TID251
from locust.env import Environment  # noqa: TID251
from locust.runners import WorkerRunner  # noqa: TID251

from harness.errors import ConfigError
from harness.locust.directors import OccupancyDirector, SlotRecoveryDirector
from harness.locust.open_loop import OpenLoopDirector, deal_out, share_out
from harness.locust.options import add_arguments, check_host_is_named, load_plan, read_order
from harness.locust.scenarios import CancelStormDirector, ChunkFrontierDirector
from harness.locust.users import AbandoningUser, PlannedUser, prepare
from harness.web.page import extend_page, report_outcomes
from harness.workload.load import (
    AbandonLoad,
    CancelStormLoad,
    ChunkFrontierLoad,
    OccupancyLoad,
    SlotRecoveryLoad,
)

__all__ = [
    "AbandoningUser",
    "CancelStormDirector",
    "ChunkFrontierDirector",
    "OccupancyDirector",
    "OpenLoopDirector",
    "SlotRecoveryDirector",
]

USERS: dict[type, type[PlannedUser]] = {
    AbandonLoad: AbandoningUser,
    SlotRecoveryLoad: SlotRecoveryDirector,
    OccupancyLoad: OccupancyDirector,
    ChunkFrontierLoad: ChunkFrontierDirector,
    CancelStormLoad: CancelStormDirector,
}


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]
def add_options(parser: LocustArgumentParser) -> None:
    """Let `locust --help` show our options in a group of their own."""
    add_arguments(parser.add_argument_group("walkaway"))


def _may_have_page(environment: Environment) -> bool:
    """Whether a page says what each load is: its own, or that of the master of this worker."""
    options = environment.parsed_options
    assert options is not None
    has_page = environment.web_ui is not None or isinstance(environment.runner, WorkerRunner)
    return has_page and options.walkaway_plan is None


@events.init.add_listener  # type: ignore[untyped-decorator]
def follow_plan(environment: Environment, **_: Any) -> None:
    """Make a plan of the options and let Locust follow it; a mistake in them ends here."""
    options = environment.parsed_options
    assert options is not None
    try:
        check_host_is_named(options)
        plan = load_plan(options)
        if _may_have_page(environment):
            prepare(environment, options, plan, AbandoningUser, OpenLoopDirector)
            deal_out(environment)
            if environment.web_ui is not None:
                extend_page(environment, read_order(options))
            else:
                report_outcomes(environment)
        elif plan.schedule is None:
            prepare(environment, options, plan, USERS[type(plan.load)])
        else:
            prepare(environment, options, plan, OpenLoopDirector)
            share_out(environment, plan.schedule)
    except ConfigError as error:
        sys.stderr.write(f"walkaway: {error}\n")
        sys.exit(error.exit_code)
