"""The worker process: a loopback port, a thread that serves it, and the step loop on the main one.

Started by the frontend, which writes the settings as the first line of our standard input and reads
the port that we listen on as the only line of our standard output. The rest of standard input is
our lifeline: it ends with the frontend, however that ended, and then we leave. Ctrl-C is the
frontend's to act on.
"""

import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import Future
from importlib.util import find_spec
from random import Random
from typing import Final

import msgspec

from reference_engine.config import EngineConfig, EngineConfigError
from reference_engine.core.scheduler import Scheduler
from reference_engine.model.runner import Runner
from reference_engine.model.simulated import SimulatedRunner
from reference_engine.model.tokenizer import EOS_TOKEN_ID
from reference_engine.protocol import Failed, Ready, WorkerSettings
from reference_engine.worker.engine import Engine, World
from reference_engine.worker.inbox import Inbox
from reference_engine.worker.listener import FirstWord, Listener

_STDIN, _STDOUT, _STDERR = 0, 1, 2
_DIED_ON_PURPOSE: Final = 70
_LAST_STEP_S: Final = 2.0  # what is computed at the end may end, if it is quick about it


def build_runner(config: EngineConfig) -> Runner:
    """The runner that the configuration names. Raises EngineConfigError where it cannot run.

    Torch is imported only for its own runner.
    """
    if config.runner == "simulated":
        return SimulatedRunner(config.step_cost, sleep=time.sleep)  # noqa: TID251 an edge: real time
    if find_spec("torch") is None:
        raise EngineConfigError(
            "the torch runner needs torch, which is not installed: pip install 'walkaway[engine]', "
            "or take --runner simulated"
        )
    from reference_engine.model.torch_runner import TorchRunner

    return TorchRunner(config)


def build_engine(settings: WorkerSettings, runner: Runner, listener: Listener) -> Engine:
    """The engine in the real world."""
    return Engine(
        Scheduler(settings.config, EOS_TOKEN_ID),
        runner,
        faults=settings.faults,
        world=World(
            now_ns=time.perf_counter_ns,
            random=Random(settings.config.seed),
            sleep=time.sleep,  # noqa: TID251 an edge: a fault that stalls the engine
            die=lambda: os._exit(_DIED_ON_PURPOSE),
            hang_up=listener.hang_up,
        ),
        report=listener.send,
    )


def compute(
    settings: WorkerSettings, listener: Listener, inbox: Inbox, first_word: Future[FirstWord]
) -> None:
    """Build the model, have the frontend told, and run steps until the inbox closes."""
    try:
        runner = build_runner(settings.config)
    except EngineConfigError as error:
        first_word.set_result(Failed(message=str(error)))
        while inbox.drain(timeout_s=None) is not None:
            pass  # the frontend will have us leave
        return
    engine = build_engine(settings, runner, listener)
    info = runner.info
    ready = Ready(
        pid=os.getpid(),
        device=info.device,
        vocab_size=info.vocab_size,
        gpu_name=info.gpu_name,
    )
    first_word.set_result(ready)
    engine.run(inbox)


def leave_with_the_frontend(inbox: Inbox) -> None:
    """Wait for the end of standard input, then have the worker leave, whatever it is doing."""
    while os.read(_STDIN, 4096):
        pass
    inbox.close()
    threading.Event().wait(_LAST_STEP_S)
    os._exit(0)


def main() -> None:
    """`python -m reference_engine.worker.service`, settings on standard input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The reading thread must not wait long for the interpreter while the model's Python runs:
    # the default of 5 ms would be a stage of the cancel latency.
    sys.setswitchinterval(0.0005)
    try:
        settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerSettings)
    except msgspec.DecodeError as error:
        sys.exit(f"worker: its settings, the first line of standard input: {error}")
    inbox, first_word = Inbox(time.perf_counter_ns), Future[FirstWord]()
    # Closed by the end of the process, not before: a thread waits in it.
    listening = socket.create_server(("127.0.0.1", 0))
    listener = Listener(
        listening,
        inbox,
        secret=settings.secret,
        first_word=first_word,
        max_model_len=settings.config.max_model_len,
    )
    threading.Thread(target=leave_with_the_frontend, args=(inbox,), daemon=True).start()
    threading.Thread(target=listener.serve, daemon=True).start()
    print(listening.getsockname()[1], flush=True)  # noqa: T201
    os.dup2(_STDERR, _STDOUT)  # whatever a library has to say is not for the frontend
    # Where cores are scarce, noticing that a client has left goes before computing for it: the two
    # threads above are as urgent as the frontend, this one and all that the model starts are not.
    os.nice(10)
    compute(settings, listener, inbox, first_word)


if __name__ == "__main__":
    main()
