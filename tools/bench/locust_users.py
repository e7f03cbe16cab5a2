"""Locust's own user, reading by line: `locust -f locust_users.py --times FILE ...`."""

import json
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from locust import FastHttpUser, events, task  # noqa: TID251
from locust.argument_parser import LocustArgumentParser  # noqa: TID251
from locust.env import Environment  # noqa: TID251

from tools.bench.clients import BODY, PATH, Times, headers

TIMES: Times = {}


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]
def add_options(parser: LocustArgumentParser) -> None:
    parser.add_argument("--times", metavar="FILE", required=True)


@events.quitting.add_listener  # type: ignore[untyped-decorator]
def write_times(environment: Environment, **_: Any) -> None:
    assert environment.parsed_options is not None
    Path(environment.parsed_options.times).write_text(json.dumps(TIMES))


class FastHttpLines(FastHttpUser):
    @task
    def ask(self) -> None:
        fields, stamps = headers(TIMES, perf_counter_ns())
        for line in self.client.iter_lines(PATH, "POST", data=BODY, headers=fields):
            if line.startswith("data: {"):
                stamps.append(perf_counter_ns())
