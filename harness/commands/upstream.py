"""`walkaway upstream`: its flags."""

import json
import os
import signal
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Final

import typer

from harness.errors import ConfigError, InterruptedRunError
from harness.run.process import check_can_listen
from harness.store.output import cannot_write, check_output, is_stdout

if TYPE_CHECKING:
    from harness.upstream.truth import Truth

_place = partial(typer.Option, rich_help_panel="Where it listens")
_serving = partial(typer.Option, rich_help_panel="How it serves")
_log = partial(typer.Option, rich_help_panel="The log")
_LOG_MARK: Final = b'{"event":"upstream"'
_MOST_MS: Final = 3_600_000.0

Port = Annotated[
    int,
    _place(
        metavar="P",
        min=0,
        max=65535,
        show_default=False,
        help="Default: a free one, which it prints.",
    ),
]
Host = Annotated[str, _place(metavar="HOST", help="Where it listens.")]
Slots = Annotated[int, _serving(metavar="N", min=1, help="Requests that it computes at once.")]
StepMs = Annotated[
    float, _serving(metavar="MS", min=0.1, max=_MOST_MS, help="From one token to the next.")
]
PrefillMs = Annotated[
    float, _serving(metavar="MS", min=0, max=_MOST_MS, help="In a slot, before the first token.")
]
PrefillTokenMs = Annotated[
    float, _serving(metavar="MS", min=0, max=_MOST_MS, help="And more a token of the prompt.")
]
Head = Annotated[
    str,
    _serving("--headers", metavar="early|late", help="At arrival, or with the first token."),
]
EndMs = Annotated[
    float,
    _serving(metavar="MS", min=0, max=_MOST_MS, help="From the last token to usage and end."),
]
HalfClose = Annotated[
    str,
    _serving(metavar="stop|keep", help="After a FIN: stop, or continue until a write fails."),
]
ModelName = Annotated[
    str, _serving("--model", metavar="NAME", help="In its list of models; it serves any name.")
]
LogFile = Annotated[
    Path | None, _log("--log", metavar="FILE", help="Write each event there as a line of JSON.")
]
Keep = Annotated[
    int, _log(metavar="N", min=1, max=1_000_000, help="Requests kept for /walkaway/truth.")
]
ExitWithStdin = Annotated[bool, _place("--exit-with-stdin", help="Stop when standard input ends.")]


def upstream(  # noqa: PLR0913  one argument a flag
    *,
    port: Port = 0,
    host: Host = "127.0.0.1",
    exit_with_stdin: ExitWithStdin = False,
    slots: Slots = 4,
    step_ms: StepMs = 20.0,
    prefill_ms: PrefillMs = 0.0,
    prefill_token_ms: PrefillTokenMs = 0.0,
    headers: Head = "early",
    end_ms: EndMs = 0.0,
    half_close: HalfClose = "stop",
    model: ModelName = "upstream",
    log: LogFile = None,
    keep: Keep = 10_000,
) -> None:
    """Serve behind a gateway, and write down what arrives there.

    It answers completions, chat, responses and messages with numbered words, and sees how each
    client leaves: GET /walkaway/truth shows when connections were closed or reset, and which tokens
    were made after that. A line in a prompt tells it to break, fail or be silent.

    Example: walkaway upstream --port 9100 --log upstream.jsonl
    """
    import asyncio

    from harness.client.fd_limit import allow_streams
    from harness.upstream.scheduler import ServingPace
    from harness.upstream.server import Settings, serve

    settings = Settings(
        pace=ServingPace(
            slots=slots,
            step_ms=step_ms,
            prefill_ms=prefill_ms,
            prefill_token_ms=prefill_token_ms,
        ),
        model=model,
        has_early_headers=_one_of("--headers", headers, ("early", "late")) == "early",
        end_ms=end_ms,
        keeps_half_closed=_one_of("--half-close", half_close, ("stop", "keep")) == "keep",
        kept=keep,
    )
    allow_streams(0)
    check_can_listen(host, port, flag="--port")
    with ExitStack() as stack:
        truth, number = asyncio.run(
            serve(
                settings,
                host=host,
                port=port,
                file=_open(log, stack),
                announce=_announce,
                ends_with_stdin=exit_with_stdin,
            )
        )
    if truth.failure is not None:
        raise cannot_write(log or "", truth.failure)
    _say(seen(truth))
    if number == signal.SIGINT:
        raise InterruptedRunError("interrupted")
    raise typer.Exit(128 + number if number else 0)


def _one_of(flag: str, given: str, allowed: tuple[str, ...]) -> str:
    if given not in allowed:
        raise ConfigError(f"{flag} {given}: must be {' or '.join(allowed)}")
    return given


def _open(log: Path | None, stack: ExitStack) -> IO[bytes] | None:
    """Unbuffered: a reader of the file sees each event at once."""
    if log is None:
        return None
    if is_stdout(log):
        return stack.enter_context(open(sys.stdout.fileno(), "wb", buffering=0, closefd=False))
    check_output(log, ours=_LOG_MARK)
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        return stack.enter_context(log.open("wb", buffering=0))
    except OSError as error:
        raise cannot_write(log, error) from error


def _announce(url: str) -> None:
    ready = {"event": "ready", "url": url, "pid": os.getpid()}
    print(json.dumps(ready), flush=True)  # noqa: T201
    _say(f"point the gateway at {url} (OpenAI: {url}/v1); the log is at {url}/walkaway/truth")


def seen(truth: "Truth") -> str:
    why = ", ".join(f"{name} {number}" for name, number in truth.stops.most_common())
    came = "1 request came" if truth.num_asked == 1 else f"{truth.num_asked} requests came"
    return f"{came}; why they stopped: {why}" if why else came


def _say(text: str) -> None:
    print(f"walkaway: {text}", file=sys.stderr, flush=True)  # noqa: T201
