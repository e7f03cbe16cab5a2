"""A server that is not there, and the plan of a load from options of plain Locust."""

import argparse
from collections.abc import Mapping
from typing import Any

from harness.locust.options import add_arguments, load_plan
from harness.run.server import Server
from harness.workload.plan import LoadPlan

ENGINE = {"max_num_seqs": 16, "max_model_len": 4096}


def server(config: Mapping[str, Any] | None = None, **more: Any) -> Server:
    known = None if config is None else dict(config)
    ready = {} if config is None else {"kserve_url": "127.0.0.1:2"}
    return Server(
        url="http://127.0.0.1:1", model="m", config=known, engine=None, ready=ready, **more
    )


def typed(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser.add_argument_group("walkaway"))
    return parser.parse_args(flags)


def typed_plan(*flags: str, users: int = 4) -> LoadPlan:
    """A load of a minute."""
    options = typed(*flags)
    options.num_users, options.run_time, options.host = users, 60, None
    return load_plan(options)
