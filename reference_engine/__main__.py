"""`python -m reference_engine`: the bundled engine's command line."""

import argparse
import sys

from reference_engine.config import EngineConfig, EngineConfigError, StepCost
from reference_engine.faults import FaultError, fault_names, parse_faults
from reference_engine.frontend.process import ListenError, ServeSettings, run
from reference_engine.frontend.worker_link import EngineStoppedError
from reference_engine.model.shapes import MODEL_SHAPES


def build_parser() -> argparse.ArgumentParser:
    """Every setting of the engine, with its default."""
    parser = argparse.ArgumentParser(
        prog="walkaway engine",
        description="Serve the reference engine: OpenAI's dialect, and a log of all that happens.",
        epilog="example: walkaway engine --port 8000 --runner simulated --sim-fixed-ms 20",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    defaults, cost = EngineConfig(), StepCost()
    serve = parser.add_argument_group("server")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on")
    serve.add_argument("--port", type=_port, default=8000, help="port to listen on; 0: a free one")
    serve.add_argument(
        "--exit-with-stdin", action="store_true", help="stop when standard input ends"
    )
    model = parser.add_argument_group("model")
    model.add_argument("--runner", choices=["torch", "simulated"], default=defaults.runner)
    model.add_argument("--model", choices=sorted(MODEL_SHAPES), default=defaults.model)
    model.add_argument("--device", choices=["auto", "cpu", "cuda"], default=defaults.device)
    model.add_argument("--seed", type=int, default=defaults.seed, help="of weights and sampling")
    sizes = parser.add_argument_group("sizes")
    for flag, text in (
        ("max_num_seqs", "batch slots"),
        ("num_blocks", "blocks of the KV cache"),
        ("block_size", "tokens in a block"),
        ("max_model_len", "tokens in a context"),
        ("max_num_batched_tokens", "token budget of a step"),
    ):
        name = "--" + flag.replace("_", "-")
        sizes.add_argument(name, type=int, default=getattr(defaults, flag), help=text)
    sim = parser.add_argument_group("simulated runner: milliseconds a step takes")
    sim.add_argument("--sim-fixed-ms", type=float, default=cost.fixed_s * 1e3)
    sim.add_argument("--sim-prefill-token-ms", type=float, default=cost.prefill_token_s * 1e3)
    sim.add_argument("--sim-decode-token-ms", type=float, default=cost.decode_token_s * 1e3)
    faults = parser.add_argument_group("faults")
    faults.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help=f"be wrong on purpose: {', '.join(fault_names())}",
    )
    faults.add_argument("--allow-faults", action="store_true", help="also over HTTP")
    return parser


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"a port is a number from 0 to 65535, not {text!r}")
    return int(text)


def read_settings(arguments: list[str]) -> ServeSettings:
    """Parse the command line. Raises EngineConfigError or FaultError."""
    args = build_parser().parse_args(arguments)
    config = EngineConfig(
        model=args.model,
        device=args.device,
        runner=args.runner,
        seed=args.seed,
        max_num_seqs=args.max_num_seqs,
        num_blocks=args.num_blocks,
        block_size=args.block_size,
        max_model_len=args.max_model_len,
        max_num_batched_tokens=args.max_num_batched_tokens,
        step_cost=StepCost(
            fixed_s=args.sim_fixed_ms / 1e3,
            prefill_token_s=args.sim_prefill_token_ms / 1e3,
            decode_token_s=args.sim_decode_token_ms / 1e3,
        ),
    )
    return ServeSettings(
        host=args.host,
        port=args.port,
        config=config,
        faults=parse_faults(args.fault),
        allow_faults=args.allow_faults,
        exit_with_stdin=args.exit_with_stdin,
    )


def main() -> int:
    """Run the engine; 2 for settings that cannot work, 1 when it could not serve."""
    try:
        settings = read_settings(sys.argv[1:])
        return run(settings)
    except (EngineConfigError, FaultError) as error:
        print(f"walkaway engine: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except (ListenError, EngineStoppedError) as error:
        print(f"walkaway engine: {error}", file=sys.stderr)  # noqa: T201
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
