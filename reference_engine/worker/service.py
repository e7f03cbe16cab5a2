"""The worker process: threads that listen and read, and the step loop on the main one.

A worker that a frontend or a launcher starts gets its settings as the first line of standard input,
answers with its ports as the only line of standard output, and leaves when standard input ends.
"""

import contextlib
import gc
import importlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from random import Random
from typing import Final

import msgspec

from reference_engine.config import EngineConfig, EngineConfigError
from reference_engine.core.early_stop import QualityHook
from reference_engine.core.scheduler import Scheduler
from reference_engine.model.runners import (
    VOCAB_SIZE,
    DeviceFailedError,
    OutOfMemoryError,
    Runner,
    SimulatedRunner,
)
from reference_engine.model.shapes import MODEL_SHAPES
from reference_engine.model.teacher import read_teacher
from reference_engine.protocol import LESS_MEMORY, Listening, WorkerSettings
from reference_engine.wire import Beats, Failed, Hello
from reference_engine.worker.engine_io import Compute, EngineIO, ReportStep
from reference_engine.worker.faults import FaultIO, FaultyEngine
from reference_engine.worker.frontend_connections import FirstWord, Frontends, say
from reference_engine.worker.inbox import Inbox
from reference_engine.worker.relay import Relay

_STDIN, _STDOUT, _STDERR = 0, 1, 2
_DIED: Final = 1
_DIED_ON_PURPOSE: Final = 70
_AFTER_A_FAILURE: Final = (
    "if a new start does not help, CUDA_LAUNCH_BLOCKING=1 shows which kernel it was, and --device "
    "cpu needs no device"
)
_LAST_STEP_S: Final = 2.0  # for the step in progress


def build_runner(config: EngineConfig) -> Runner:
    """Raises EngineConfigError."""
    if config.runner == "simulated":
        if config.model not in MODEL_SHAPES:
            raise EngineConfigError(f"--model {config.model} needs the torch runner")
        teacher = config.teacher and read_teacher(config.teacher, VOCAB_SIZE)
        return SimulatedRunner(
            config.step_cost,
            sleep=time.sleep,  # noqa: TID251 an edge: real time
            teacher=teacher or None,
        )
    if find_spec("torch") is None:
        raise EngineConfigError(
            "the torch runner needs torch, which is not installed: pip install 'walkaway[engine]', "
            "or take --runner simulated"
        )
    from reference_engine.model.torch_runner import TorchRunner

    return on_a_device(lambda: TorchRunner(config, say))


def on_a_device(load: Callable[[], Runner]) -> Runner:
    """Raises EngineConfigError where the device has no room, or fails."""
    from reference_engine.model.device_errors import device_errors

    try:
        with device_errors():
            return load()
    except OutOfMemoryError as error:
        advice = f"{LESS_MEMORY}, or take a smaller --model"
        raise EngineConfigError(f"the model does not fit ({error}): {advice}") from error
    except DeviceFailedError as error:
        raise EngineConfigError(f"the device has failed ({error}): {_AFTER_A_FAILURE}") from error


def compute_ahead() -> Callable[[Compute], Compute]:
    """A thread that computes one step after the other, while the loop plans and reports."""
    computing = ThreadPoolExecutor(1, "step")
    return lambda compute: computing.submit(compute).result


def load_quality_hook(name: str | None) -> QualityHook | None:
    """Raises EngineConfigError. An error of the hook is said once, and it is not asked again."""
    if name is None:
        return None
    module, _, function = name.partition(":")
    try:
        hook = getattr(importlib.import_module(module), function)
    except Exception as error:
        raise EngineConfigError(f"--quality-hook {name}: {error}") from error
    if not callable(hook):
        raise EngineConfigError(f"--quality-hook {name}: not a function")
    is_broken = False

    def ask(text: str, token_ids: Sequence[int]) -> bool:
        nonlocal is_broken
        if is_broken:
            return False
        try:
            return bool(hook(text, token_ids))
        except Exception as error:  # noqa: BLE001 as above
            is_broken = True
            say(f"--quality-hook {name} failed, and is not asked again: {error!r}")
            return False

    return ask


class Worker:
    """Its ports are open, and its model not yet built. Raises EngineConfigError."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self.inbox = Inbox(time.perf_counter_ns)
        self.first_word: Future[FirstWord] = Future()
        self.frontends = Frontends(
            self.inbox,
            time.perf_counter_ns,
            secret=settings.secret,
            first_word=self.first_word,
            max_model_len=settings.config.max_model_len,
            beats=Beats.within(settings.peer_timeout_s),
        )
        self._report: ReportStep = self.frontends.report
        metrics_port = None
        if settings.metrics_port is not None:
            from reference_engine.worker.status import StatusServer, WorkerStatus

            status = WorkerStatus(settings, self.frontends, self.inbox)
            listening = listen(settings.host, settings.metrics_port)
            server = StatusServer(status, listening)
            threading.Thread(target=server.serve_forever, daemon=True).start()
            metrics_port = listening.getsockname()[1]
            self._report = status.report
        self._relay: Relay | None = None
        if settings.decode_worker is not None:
            self._relay = self._hand_over_to(settings.decode_worker)
        # Closed by the end of the process, not before: a thread waits in it.
        listening = listen(settings.host, settings.port)
        threading.Thread(target=self.frontends.accept, args=(listening,), daemon=True).start()
        self.listening = Listening(port=listening.getsockname()[1], metrics_port=metrics_port)

    def _hand_over_to(self, address: tuple[str, int]) -> Relay:
        settings, frontends = self.settings, self.frontends
        relay = Relay(
            Hello(peer=settings.name, secret=settings.secret),
            address,
            inbox=self.inbox,
            frontends=frontends,
            beats=Beats.within(settings.peer_timeout_s),
        )
        frontends.set_faults = relay.set_faults
        relay.start()
        return relay

    def compute(self, build: Callable[[EngineConfig], Runner] = build_runner) -> None:
        """Build the model, then step until the inbox is closed. Raises EngineConfigError.

        A device that fails ends the process.
        """
        settings, frontends = self.settings, self.frontends
        try:
            runner = build(settings.config)
            hook = load_quality_hook(settings.config.quality_hook)
        except EngineConfigError as error:
            self.first_word.set_result(Failed(message=str(error)))
            raise
        engine = FaultyEngine(
            Scheduler(settings.config, runner.tokenizer.eos_token_ids),
            runner,
            EngineIO(
                time.perf_counter_ns,
                self._report,
                frontends.hang_up,
                hook,
                settings.name,
                None if self._relay is None else self._relay.hand_over,
                say=say,
                ahead=compute_ahead() if settings.config.async_scheduling else None,
            ),
            faults=settings.faults,
            by=FaultIO(
                Random(settings.config.seed),
                sleep=time.sleep,  # noqa: TID251 an edge: a fault that stalls the engine
                die=lambda: os._exit(_DIED_ON_PURPOSE),
            ),
        )
        # Collections that walk through all of torch would be steps that take long.
        gc.collect()
        gc.freeze()
        ready = msgspec.structs.replace(runner.info, worker=settings.name, config=settings.config)
        self.first_word.set_result(ready)
        try:
            engine.run(self.inbox)
        except DeviceFailedError as error:
            say(f"the device has failed, and this process ends: {error}; {_AFTER_A_FAILURE}")
            frontends.leave()
            os._exit(_DIED)  # what torch does at an end needs the device
        gc.unfreeze()  # some extension modules call what is never collected a leak

    def leave_with_stdin(self) -> None:
        def read_to_the_end() -> None:
            while os.read(_STDIN, 4096):
                pass
            self.inbox.close()
            threading.Event().wait(_LAST_STEP_S)
            os._exit(0)

        threading.Thread(target=read_to_the_end, daemon=True).start()


def listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise EngineConfigError(f"a worker cannot listen on {host}:{port}: {error}") from error


def put_readers_first() -> None:
    # Where cores are scarce, noticing that a client has left goes before computing for it: the
    # threads that read keep the frontend's priority, this one and the model's do not.
    os.nice(10)
    # The default of 5 ms, for which a reading thread may wait for the interpreter while the model's
    # Python runs, would be a stage of the cancel latency.
    sys.setswitchinterval(0.0005)


def main(build: Callable[[EngineConfig], Runner] = build_runner) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerSettings)
    except msgspec.DecodeError as error:
        sys.exit(f"worker: its settings, the first line of standard input: {error}")
    try:
        worker = Worker(settings)
    except EngineConfigError as error:
        sys.exit(str(error))
    worker.leave_with_stdin()
    with contextlib.suppress(BrokenPipeError):  # then standard input has ended, too
        os.write(_STDOUT, msgspec.json.encode(worker.listening) + b"\n")
    os.dup2(_STDERR, _STDOUT)  # a library's output is not for the frontend
    put_readers_first()
    try:
        worker.compute(build)
    except EngineConfigError as error:
        if (
            settings.is_restarted
        ):  # the frontends wait for a worker that can load, and do not say so
            say(f"{settings.name} cannot load, and serves no frontend: {error}")
        while worker.inbox.drain(timeout_s=None) is not None:
            pass  # frontends that start hear why, and end this process


if __name__ == "__main__":
    main()
