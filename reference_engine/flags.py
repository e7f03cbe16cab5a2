"""The engine's flags, group by group, each with its default."""

import argparse
from collections.abc import Mapping
from typing import Any, get_args

import msgspec

from reference_engine.config import (
    EngineConfig,
    FrontendSettings,
    RateLimits,
    ReclaimPolicy,
    SchedulingPolicy,
    ShutdownPolicy,
    StepCost,
    VictimPolicy,
)
from reference_engine.faults import fault_names, parse_faults
from reference_engine.model.shapes import MODEL_SHAPES
from reference_engine.serve.access import read_api_keys
from reference_engine.serve.process import ServeSettings


def build_parser() -> argparse.ArgumentParser:
    """Every setting of the engine, with its default."""
    parser = argparse.ArgumentParser(
        prog="walkaway engine",
        description="Serve the reference engine: OpenAI's dialect, and a log of all that happens.",
        epilog="example: walkaway engine --port 8000 --runner simulated --sim-fixed-ms 20",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    config, frontend = EngineConfig(), FrontendSettings()
    _add_server(parser, frontend)
    _add_clients(parser, frontend)
    _add_access(parser, frontend.rate_limits)
    _add_model(parser, config)
    _add_sizes(parser, config)
    _add_simulation(parser, config.step_cost)
    _add_scheduling(parser, config)
    _add_faults(parser)
    return parser


def read_settings(arguments: list[str], environment: Mapping[str, str]) -> ServeSettings:
    """Parse the command line. Raises EngineConfigError or FaultError."""
    args = build_parser().parse_args(arguments)
    keys = () if args.api_key_env is None else read_api_keys(environment, args.api_key_env)
    step_cost = StepCost(
        fixed_s=args.sim_fixed_ms / 1e3,
        prefill_token_s=args.sim_prefill_token_ms / 1e3,
        decode_token_s=args.sim_decode_token_ms / 1e3,
    )
    limits = RateLimits(**_flags_of(RateLimits, args))
    return ServeSettings(
        host=args.host,
        port=args.port,
        config=EngineConfig(**_flags_of(EngineConfig, args), step_cost=step_cost),
        frontend=FrontendSettings(
            **_flags_of(FrontendSettings, args), api_keys=keys, rate_limits=limits
        ),
        faults=parse_faults(args.fault),
        allow_faults=args.allow_faults,
        exit_with_stdin=args.exit_with_stdin,
    )


def _flags_of(struct: type[msgspec.Struct], args: argparse.Namespace) -> dict[str, Any]:
    """The fields of a struct that there are flags for: those have their names."""
    names = (field.name for field in msgspec.structs.fields(struct))
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def _add_settings(
    group: argparse._ArgumentGroup, defaults: msgspec.Struct, *flags: tuple[str, type, str]
) -> None:
    """Flags that are named after a field, and have its default."""
    for field, kind, text in flags:
        name = "--" + field.replace("_", "-")
        group.add_argument(name, type=kind, default=getattr(defaults, field), help=text)


def _add_server(parser: argparse.ArgumentParser, defaults: FrontendSettings) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on")
    group.add_argument("--port", type=_port, default=8000, help="port to listen on; 0: a free one")
    group.add_argument(
        "--exit-with-stdin", action="store_true", help="stop when standard input ends"
    )
    group.add_argument(
        "--shutdown",
        choices=get_args(ShutdownPolicy),
        default=defaults.shutdown,
        help="what becomes of running requests when told to stop",
    )
    _add_settings(
        group,
        defaults,
        ("drain_timeout_s", float, "how long running requests may drain"),
        ("keep_results", int, "ended requests that can be asked for"),
        ("keep_results_s", float, "and for how long"),
    )


def _add_clients(parser: argparse.ArgumentParser, defaults: FrontendSettings) -> None:
    group = parser.add_argument_group("clients: when one is gone")
    _add_settings(
        group,
        defaults,
        ("heartbeat_s", float, "a stream silent for so long gets a comment; 0: never"),
        ("request_timeout_s", float, "its request has not come whole in so long"),
        ("ack_timeout_s", float, "its machine acknowledged nothing for so long"),
        ("stall_timeout_s", float, "it read nothing for so long"),
        ("send_buffer_bytes", int, "most that is held for a slow one"),
        ("default_deadline_s", float, "of requests that ask for none"),
    )


def _add_access(parser: argparse.ArgumentParser, defaults: RateLimits) -> None:
    group = parser.add_argument_group("access")
    group.add_argument(
        "--api-key-env",
        metavar="VAR",
        help="environment variable with the API keys, separated by commas; none: no key is needed",
    )
    _add_settings(
        group,
        defaults,
        ("requests_per_minute", int, "of each key; none: no limit"),
        ("tokens_per_minute", int, "generated for each key; none: no limit"),
    )
    group.add_argument(
        "--rate-limit-kill",
        action="store_true",
        dest="kills",
        help="who runs out of tokens also loses the requests being generated",
    )


def _add_model(parser: argparse.ArgumentParser, defaults: EngineConfig) -> None:
    group = parser.add_argument_group("model")
    group.add_argument("--runner", choices=["torch", "simulated"], default=defaults.runner)
    group.add_argument("--model", choices=sorted(MODEL_SHAPES), default=defaults.model)
    group.add_argument("--device", choices=["auto", "cpu", "cuda"], default=defaults.device)
    group.add_argument("--seed", type=int, default=defaults.seed, help="of weights and sampling")


def _add_sizes(parser: argparse.ArgumentParser, defaults: EngineConfig) -> None:
    _add_settings(
        parser.add_argument_group("sizes"),
        defaults,
        ("max_num_seqs", int, "batch slots"),
        ("num_blocks", int, "blocks of the KV cache"),
        ("block_size", int, "tokens in a block"),
        ("max_model_len", int, "tokens in a context"),
        ("max_num_batched_tokens", int, "token budget of a step"),
    )


def _add_simulation(parser: argparse.ArgumentParser, cost: StepCost) -> None:
    group = parser.add_argument_group("simulated runner: milliseconds a step takes")
    group.add_argument("--sim-fixed-ms", type=float, default=cost.fixed_s * 1e3)
    group.add_argument("--sim-prefill-token-ms", type=float, default=cost.prefill_token_s * 1e3)
    group.add_argument("--sim-decode-token-ms", type=float, default=cost.decode_token_s * 1e3)


def _add_scheduling(parser: argparse.ArgumentParser, defaults: EngineConfig) -> None:
    """How requests are admitted, chunked, preempted and let go."""
    group = parser.add_argument_group("scheduling")
    policies, victims = get_args(SchedulingPolicy), get_args(VictimPolicy)
    group.add_argument("--scheduling-policy", choices=policies, default=defaults.scheduling_policy)
    group.add_argument(
        "--victim",
        choices=victims,
        default=defaults.victim,
        help="whom to preempt: whom the policy ranks last, or who costs least to rebuild",
    )
    group.add_argument("--reclaim", choices=get_args(ReclaimPolicy), default=defaults.reclaim)
    _add_settings(
        group,
        defaults,
        ("long_prefill_token_threshold", int, "most tokens of one prompt in a step; 0: none"),
        ("max_num_partial_prefills", int, "prompts in progress at once"),
        ("watermark", float, "share of blocks that admissions leave free"),
        ("force_reclaim_above", float, "KV usage above which cancelled prompts are not retained"),
    )
    for field, text in (
        ("enable_chunked_prefill", "compute long prompts in several steps"),
        ("reserve_full_isl", "admit only what fits whole"),
        ("enable_prefix_caching", "find the beginnings of prompts in the cache"),
        ("batch_invariant", "outputs that do not depend on the batch, bit by bit; slower"),
    ):
        name = "--" + field.replace("_", "-")
        action = argparse.BooleanOptionalAction
        group.add_argument(name, action=action, default=getattr(defaults, field), help=text)


def _add_faults(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("faults")
    group.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help=f"be wrong on purpose: {', '.join(fault_names())}",
    )
    group.add_argument("--allow-faults", action="store_true", help="also over HTTP")


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"a port is a number from 0 to 65535, not {text!r}")
    return int(text)
