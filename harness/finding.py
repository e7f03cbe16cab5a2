"""The server of a run: at its URL, started by an arm's command, or the bundled engine."""

from contextlib import ExitStack
from pathlib import Path

import httpx

from harness.arms import unused_engine_settings
from harness.collect.source import Notes
from harness.interruption import Interruption
from harness.order import ResolvedOrder
from harness.process import Child
from harness.progress import Progress
from harness.server import Server, attach, choose_runner, engine_command, started_engine
from harness.server_command import started_command


def find_server(
    resolved: ResolvedOrder,
    log: Path,
    stack: ExitStack,
    *,
    client: httpx.Client,
    notes: Notes,
    progress: Progress,
    interruption: Interruption,
) -> Server:
    """A server that answers. One that is started writes into `log` and ends with the `stack`.

    Raises TargetError, ConfigError and InterruptedRunError.
    """
    order, command = resolved.order, resolved.order.target_command
    engine: Child | None = None
    if resolved.url is None and command is None:
        engine, url = _start_ours(resolved, log, stack, notes, progress, interruption)
        return attach(url, resolved.target, model=order.model, client=client, engine=engine)
    if (note := unused_engine_settings(resolved.workload)) is not None:
        notes.add(note)
    if command is not None:
        progress.phase(f"starting {command[0]}")
        started = started_command(
            command,
            log,
            client=client,
            ready_s=order.ready_s,
            interrupted=lambda: interruption.requested,
        )
        engine, url = stack.enter_context(started)
    else:
        assert resolved.url is not None
        url = resolved.url
        progress.phase(f"connecting to {url}")
    return attach(url, resolved.target, model=order.model, client=client, engine=engine)


def _start_ours(
    resolved: ResolvedOrder,
    log: Path,
    stack: ExitStack,
    notes: Notes,
    progress: Progress,
    interruption: Interruption,
) -> tuple[Child, str]:
    settings = resolved.workload.engine
    runner = choose_runner(settings)
    if settings.runner == "auto" and runner == "simulated":
        text = "torch is not installed: the engine simulates its model (steps of a set length)"
        notes.add(text)
        progress.phase(text)
    progress.phase(f"starting the reference engine ({runner} runner)")
    command = engine_command(settings, runner, model=resolved.order.model)
    return stack.enter_context(
        started_engine(command, log, interrupted=lambda: interruption.requested)
    )
