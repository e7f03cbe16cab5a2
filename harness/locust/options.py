"""The command line of plain Locust: a plan in a file (`walkaway run` starts this process so), or a
few options that describe one, also in the start form of the web page.
"""

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from harness.errors import ConfigError, in_words
from harness.http_client import check_ca_file, parse_headers, typed_command
from harness.workload.form import (
    BY_HAND,
    FIELDS,
    OURS,
    about_fields,
    by_flag,
    form_settings,
)
from harness.workload.plan import LoadPlan, read_plan
from harness.workload.workload import choose_protocol, load_target, load_workload

DEFAULT_URL: Final = "http://127.0.0.1:8000"
_STDIN: Final = 0
_PIPE_BYTES: Final = 1 << 16
_NOW: Final = "walkaway_now"
_RAISED_BY: Final = {
    "run.most_streams": "--walkaway-most-streams",
    "run.most_rate": "--walkaway-most-rate",
}
_HEADER: Final = "--walkaway-header"
_CA_FILE: Final = "--walkaway-ca-file"


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """Declare our options, with plain values: a Locust master sends them to its workers."""
    add = group.add_argument
    add("--walkaway-plan", metavar="FILE", help="a complete plan, -: standard input")
    add(
        "--walkaway-exit-with",
        type=int,
        metavar="FD",
        help="end in good order when this open file reaches its end; 0: standard input",
    )
    add(
        "--walkaway-rows",
        metavar="DIR",
        help="keep one row a request in this folder; of a master, the list of its workers",
    )
    add("--walkaway-order", metavar="FILE", help="web page: what each run begins with")
    add("--walkaway-path", default="", help="instead of what the kind of server has")
    add("--walkaway-api-key-env", metavar="VARIABLE", help="variable that holds the API key")
    add(_CA_FILE, metavar="FILE", help="CAs to trust over TLS (PEM)")
    add(
        _HEADER,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="sent with each request; may be given several times",
    )
    for one in FIELDS.values():
        if not one.is_ours:
            continue
        option = add(
            one.flag,
            default=one.default,
            choices=one.choices or None,
            help=one.hint,
        )
        # Locust's parser takes this as an argument, but not for an option in a group.
        setattr(option, "include_in_web_ui", one.is_shown)  # noqa: B010


def check_host_is_named(options: argparse.Namespace) -> None:
    """Raise ConfigError if a load would begin by itself, and at a server that was not named. A page
    asks for the host, and a worker gets its master's."""
    begins_by_itself = options.headless or options.autostart
    if begins_by_itself and not (options.worker or options.host or options.walkaway_plan):
        raise ConfigError(
            "no server is named, and without the web page none is started: name it with --host, "
            f"such as --host {DEFAULT_URL}"
        )


def load_plan(options: argparse.Namespace) -> LoadPlan:
    if options.walkaway_plan is None:
        return _described(options)
    try:
        if options.walkaway_plan == "-":
            return LoadPlan.model_validate_json(_first_line(_STDIN))
        return read_plan(Path(options.walkaway_plan))
    except OSError as error:
        raise ConfigError(f"--walkaway-plan: cannot read the plan: {in_words(error)}") from error
    except ValueError as error:
        raise ConfigError(f"{options.walkaway_plan} is not a load plan: {error}") from error


def _first_line(file: int) -> bytes:
    parts: list[bytes] = []
    while part := os.read(file, _PIPE_BYTES):
        parts.append(part)
        if part.endswith(b"\n"):
            break
    return b"".join(parts)


def plan_of_the_page(options: argparse.Namespace) -> LoadPlan | None:
    """The plan of a load that a web page has started: the page puts it among the options, which a
    Locust master sends to its workers."""
    now = getattr(options, _NOW, None)
    return None if now is None else LoadPlan.model_validate_json(now)


def put_in_force(options: argparse.Namespace, plan: LoadPlan) -> None:
    setattr(options, _NOW, plan.model_dump_json())


def read_order(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of `harness.run.run_config.RunConfig` for each run of a web page. Raises
    ConfigError for an unreadable file."""
    if options.walkaway_order is None:
        return {
            "workload": BY_HAND,
            "api_key_env": options.walkaway_api_key_env,
            "headers": parse_headers(options.walkaway_header, flag=_HEADER),
            "ca_file": check_ca_file(options.walkaway_ca_file, flag=_CA_FILE),
            "command": typed_command(options.walkaway_header, program=sys.argv[0]),
        }
    try:
        order: dict[str, Any] = msgspec.json.decode(Path(options.walkaway_order).read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"--walkaway-order: cannot read the order: {in_words(error)}") from error
    return order


def form_fields(options: argparse.Namespace) -> dict[str, str]:
    shown: Mapping[str, object] = vars(options)
    fields = {name: str(value) for name, value in shown.items() if name.startswith(OURS)}
    others = {
        "user_count": options.num_users,
        "run_time": options.run_time,
        "host": options.host,
    }
    return fields | {name: str(value) for name, value in others.items() if value}


def _described(options: argparse.Namespace) -> LoadPlan:
    target = load_target(options.walkaway_engine)
    if options.walkaway_path:
        target = target.model_copy(update={"path": options.walkaway_path})
    fields = {"user_count": "1", **form_fields(options)}
    try:
        workload = load_workload(BY_HAND, form_settings(fields, by_flag))
    except ConfigError as error:
        refusal = about_fields(str(error), by_flag)
        for cap, flag in _RAISED_BY.items():
            refusal = refusal.replace(f"--set {cap}", flag)
        raise ConfigError(refusal) from error
    if options.walkaway_rows is not None:
        Path(options.walkaway_rows).mkdir(parents=True, exist_ok=True)
    return LoadPlan(
        url=options.host or DEFAULT_URL,
        model=options.walkaway_model or "tiny",
        target=target,
        run=workload.run,
        load=workload.load,
        protocol=choose_protocol(workload, target),
        arrivals=workload.arrivals,
        api_key_env=options.walkaway_api_key_env,
        headers=parse_headers(options.walkaway_header, flag=_HEADER),
        ca_file=check_ca_file(options.walkaway_ca_file, flag=_CA_FILE),
        rows_dir=options.walkaway_rows,
    )
