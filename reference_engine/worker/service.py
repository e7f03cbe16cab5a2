"""The worker process: a socket, a thread that reads it, and the step loop on the main thread.

Started by the frontend with one end of a socket pair. It ends when that socket ends, so it cannot
outlive its frontend; it ignores Ctrl-C, which is the frontend's to act on.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from importlib.util import find_spec
from random import Random

import msgspec

from reference_engine.config import EngineConfig, EngineConfigError
from reference_engine.core.scheduler import Scheduler
from reference_engine.model.runner import Runner
from reference_engine.model.simulated import SimulatedRunner
from reference_engine.model.tokenizer import EOS_TOKEN_ID
from reference_engine.protocol import (
    Failed,
    FrameReader,
    ProtocolError,
    Ready,
    StepReport,
    ToWorker,
    WorkerSettings,
    encode_frame,
)
from reference_engine.worker.engine import Engine
from reference_engine.worker.inbox import Inbox

_RECEIVE_BYTES = 256 * 1024


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


def read_messages(connection: socket.socket, inbox: Inbox) -> None:
    """Feed the inbox until the frontend closes the connection or breaks the protocol."""
    reader = FrameReader()
    decoder = msgspec.msgpack.Decoder(ToWorker)
    try:
        while data := connection.recv(_RECEIVE_BYTES):
            for payload in reader.feed(data):
                inbox.put(decoder.decode(payload))
    except ConnectionError:
        return  # the frontend is gone
    except (OSError, ProtocolError, msgspec.DecodeError) as error:
        print(f"worker: connection to the frontend: {error}", file=sys.stderr)  # noqa: T201
    finally:
        inbox.close()


def serve(connection: socket.socket, settings: WorkerSettings) -> None:
    """Build the model, say so, and run steps until the connection ends."""
    try:
        runner = build_runner(settings.config)
    except EngineConfigError as error:
        connection.sendall(encode_frame(Failed(message=str(error))))
        return
    scheduler = Scheduler(settings.config, EOS_TOKEN_ID)
    inbox = Inbox(time.perf_counter_ns)

    def send_report(report: StepReport) -> None:
        connection.sendall(encode_frame(report))

    engine = Engine(
        scheduler,
        runner,
        faults=settings.faults,
        now_ns=time.perf_counter_ns,
        random=Random(settings.config.seed),
        report=send_report,
    )
    info = runner.info
    ready = Ready(
        pid=os.getpid(),
        device=info.device,
        vocab_size=info.vocab_size,
        gpu_name=info.gpu_name,
    )
    connection.sendall(encode_frame(ready))
    thread = threading.Thread(target=read_messages, args=(connection, inbox), daemon=True)
    thread.start()
    engine.run(inbox)


def main() -> None:
    """`python -m reference_engine.worker.service FD SETTINGS_JSON`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Where cores are scarce, noticing that a client has left goes before computing for it.
    os.nice(10)
    # The reading thread must not wait long for the interpreter while the model's Python runs:
    # the default of 5 ms would be a stage of the cancel latency.
    sys.setswitchinterval(0.0005)
    settings = msgspec.json.decode(sys.argv[2], type=WorkerSettings)
    # A broken connection means that the frontend is gone, and then so are we.
    with contextlib.suppress(ConnectionError), socket.socket(fileno=int(sys.argv[1])) as connection:
        serve(connection, settings)


if __name__ == "__main__":
    main()
