"""The command line of plain Locust: `locust -f workloads/locustfile.py`, with options of our own.

Either a plan comes in a file (that is how `walkaway run` starts this process), or a few options
make one, good for trying things out against a server on this machine.
"""

import argparse
from pathlib import Path
from typing import Final

import msgspec

from harness.errors import ConfigError
from harness.load.mix import AfterTokens, LeavePlan, Never, Slice
from harness.load.plan import AbandonLoad, LoadPlan, Timeouts, read_plan
from harness.records import Delivery, Way

DEFAULT_URL: Final = "http://127.0.0.1:8000"
_NO_LIMIT_SECONDS: Final = 10 * 365 * 86400.0  # plain Locust has its own --run-time


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """Declare our options, with plain values: a Locust master sends them to its workers."""
    add = group.add_argument
    add("--walkaway-plan", metavar="FILE", help="a complete plan; wins over the rest")
    add(
        "--walkaway-exit-with-stdin",
        action="store_true",
        help="end the load when standard input reaches its end",
    )
    add("--walkaway-rows", metavar="DIR", help="keep one row a request in this folder")
    add("--walkaway-path", default="/v1/completions", help="or /v1/chat/completions")
    add("--walkaway-model", default="tiny", help="the model's name on the server")
    add("--walkaway-tokens", default="1,16,64", help="leave after so many tokens: one of these")
    add("--walkaway-stay-share", type=float, default=0.25, help="share of those who never leave")
    add("--walkaway-think", default="step", help='pause before leaving: "step", "none" or seconds')
    add("--walkaway-prompt-tokens", type=int, default=64)
    add("--walkaway-answer-tokens", type=int, default=1000, help="max_tokens of those who leave")
    add("--walkaway-stay-tokens", type=int, default=128, help="max_tokens of those who stay")
    add("--walkaway-timeout", type=float, default=60.0, metavar="SECONDS")
    add("--walkaway-seed", type=int, default=0)
    add("--walkaway-api-key-env", metavar="VARIABLE", help="variable that holds the API key")


def load_plan(options: argparse.Namespace) -> LoadPlan:
    """The plan that the options name or describe. Raises ConfigError when there is none in them."""
    if options.walkaway_plan is None:
        return _described(options)
    try:
        return read_plan(Path(options.walkaway_plan))
    except OSError as error:
        raise ConfigError(f"--walkaway-plan: cannot read the plan: {error}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{options.walkaway_plan} is not a load plan: {error}") from error


def _described(options: argparse.Namespace) -> LoadPlan:
    rows_dir: str | None = options.walkaway_rows
    if rows_dir is not None:
        Path(rows_dir).mkdir(parents=True, exist_ok=True)
    share = _stay_share(options.walkaway_stay_share)
    return LoadPlan(
        url=options.host or DEFAULT_URL,
        path=options.walkaway_path,
        model=options.walkaway_model,
        api_key_env=options.walkaway_api_key_env,
        headers={},
        extra_body={"ignore_eos": True},
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        continuous_usage=True,
        rows_dir=rows_dir,
        seed=options.walkaway_seed,
        arm="main",
        users=options.num_users or 1,
        timeouts=Timeouts(connect_s=options.walkaway_timeout, next_byte_s=options.walkaway_timeout),
        max_seconds=options.run_time or _NO_LIMIT_SECONDS,
        load=AbandonLoad(
            mix=[
                _slice(1 - share, AfterTokens(tokens=_token_counts(options.walkaway_tokens))),
                _slice(share, Never()),
            ],
            think=_think(options.walkaway_think),
            prompt_tokens=(options.walkaway_prompt_tokens, options.walkaway_prompt_tokens),
            answer_tokens=options.walkaway_answer_tokens,
            stay_tokens=options.walkaway_stay_tokens,
            shared_prefix_tokens=0,
            stop_after_abandons=None,
        ),
    )


def _slice(weight: float, leave: LeavePlan) -> Slice:
    return Slice(weight=weight, leave=leave, way=Way.FIN, delivery=Delivery.STREAM, n=1)


def _stay_share(share: float) -> float:
    if not 0 <= share <= 1:
        raise ConfigError(f"--walkaway-stay-share: must be from 0 to 1, not {share}")
    return share


def _token_counts(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ConfigError(
            f"--walkaway-tokens: {text!r} is not a list of token counts; write for example 1,16,64"
        )
    return [int(part) for part in parts]


def _think(text: str) -> str | float:
    if text in ("step", "none"):
        return text
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ConfigError(
            f'--walkaway-think: {text!r} is not a pause; write "step", "none" or seconds from 0'
        )
    return seconds
