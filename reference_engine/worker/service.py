"""The worker process: a loopback port, a thread that serves it, and the step loop on the main one.

The frontend writes the settings as the first line of standard input, and reads the port as the only
line of standard output. When standard input ends, the worker leaves.

One connection is served at a time; a peer that breaks the protocol loses it and its requests:

    accept ─▶ its Hello ─▶ our first word ─▶ messages in, reports out ─▶ it ends ─▶ its requests
      ▲                                                                             are aborted
      └────────────────────────────────────────────────────────────────────────────────┘
"""

import contextlib
import gc
import importlib
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from importlib.util import find_spec
from math import isfinite
from random import Random
from typing import Final

import msgspec

from reference_engine.config import EngineConfig, EngineConfigError
from reference_engine.core.early_stop import QualityHook
from reference_engine.core.scheduler import Scheduler
from reference_engine.model.runners import VOCAB_SIZE, Runner, SimulatedRunner
from reference_engine.model.shapes import MODEL_SHAPES
from reference_engine.model.teacher import read_teacher
from reference_engine.protocol import (
    AddRequest,
    Listening,
    Ready,
    StepReport,
    ToWorker,
    WorkerSettings,
)
from reference_engine.wire import (
    Beat,
    Failed,
    FrameReader,
    Hello,
    ProtocolError,
    check_hello,
    decode_payload,
    encode_frame,
)
from reference_engine.worker.engine import ConnectionLost, EngineIO, Inbox
from reference_engine.worker.faults import FaultIO, FaultyEngine

_STDIN, _STDOUT, _STDERR = 0, 1, 2
_DIED_ON_PURPOSE: Final = 70
_LAST_STEP_S: Final = 2.0  # for the step in progress
_HELLO_BYTES: Final = 1024  # the most that is read of an unknown peer
_HELLO_S: Final = 5.0
_SEND_S: Final = 2  # the step loop waits so long for a frontend that does not read
_RECEIVE_BYTES: Final = 256 * 1024
_MAX_UNSENT: Final = 64  # reports; a worker without a frontend runs out of work at once

FirstWord = Ready | Failed


class Listener:
    """Serves connections on its own thread; the step loop's thread sends the reports.

    A connection waits for `first_word` after its Hello. `_connection` is set after that; it and
    `_unsent` change under `_lock` only.
    """

    def __init__(
        self,
        listening: socket.socket,
        inbox: Inbox,
        *,
        secret: str,
        first_word: Future[FirstWord],
        max_model_len: int,
        hello_s: float = _HELLO_S,
    ) -> None:
        self._listening = listening
        self._inbox = inbox
        self._secret = secret
        self._first_word = first_word
        self._max_model_len = max_model_len
        self._hello_s = hello_s
        self._decoder = msgspec.msgpack.Decoder(ToWorker)
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._unsent: deque[bytes] = deque(maxlen=_MAX_UNSENT)

    def serve(self) -> None:
        try:
            while True:
                with contextlib.suppress(ConnectionError):
                    connection, _ = self._listening.accept()
                    with connection:
                        self._serve(connection)
        finally:
            self._inbox.close()

    def send(self, report: StepReport) -> None:
        frame = encode_frame(report)
        with self._lock:
            if self._connection is None:
                self._unsent.append(frame)
                return
            try:
                self._connection.sendall(frame)
            except ConnectionError:
                self._connection = None  # it has ended, as the reading thread will see
            except OSError as error:
                self._end(f"a report could not be sent: {error}")

    def hang_up(self, why: str) -> None:
        with self._lock:
            if self._connection is not None:
                self._end(why)

    def _end(self, why: str) -> None:
        """Call it under the lock. The reading thread then sees the end and cleans up."""
        assert self._connection is not None
        _say(f"connection ended: {why}")
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection = None

    def _serve(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_S, 0))
        reader = FrameReader()
        try:
            early = self._greet(connection, reader)
            try:
                self._attach(connection)
                self._hear(early)
                while data := connection.recv(_RECEIVE_BYTES):
                    self._hear(reader.feed(data))
            finally:
                self._detach()
        except ConnectionError:
            pass  # the peer has gone
        except (OSError, ProtocolError) as error:
            _say(f"connection ended: {error}")

    def _greet(self, connection: socket.socket, reader: FrameReader) -> list[bytes]:
        num_received, ends = 0, time.monotonic() + self._hello_s
        while True:
            connection.settimeout(max(0.001, ends - time.monotonic()))
            try:
                data = connection.recv(_HELLO_BYTES - num_received)
            except TimeoutError:
                data = b""
            if not data:
                raise ProtocolError(f"no Hello within {self._hello_s:g} s and {_HELLO_BYTES} bytes")
            num_received += len(data)
            if payloads := reader.feed(data):
                break
        connection.settimeout(None)
        check_hello(decode_payload(self._decoder, payloads[0]), self._secret)
        return payloads[1:]

    def _attach(self, connection: socket.socket) -> None:
        first_word = self._first_word.result()
        with self._lock:
            connection.sendall(encode_frame(first_word))
            while self._unsent:
                connection.sendall(self._unsent.popleft())
            self._connection = connection

    def _detach(self) -> None:
        with self._lock:
            self._connection = None
        lost = ConnectionLost(threading.Event())
        self._inbox.put(lost)
        lost.applied.wait()

    def _hear(self, payloads: list[bytes]) -> None:
        for payload in payloads:
            message = decode_payload(self._decoder, payload)
            if isinstance(message, Beat):
                continue
            if isinstance(message, Hello):
                raise ProtocolError("a second Hello")
            if isinstance(message, AddRequest):
                self._check(message, self._first_word.result())
            self._inbox.put(message)

    def _check(self, add: AddRequest, first_word: FirstWord) -> None:
        prompt, sampling = add.prompt_token_ids, add.sampling
        vocab_size = first_word.vocab_size if isinstance(first_word, Ready) else 0
        if not prompt or min(prompt) < 0 or max(prompt) >= vocab_size:
            raise ProtocolError(f"request {add.request_id}: no prompt, or tokens that do not exist")
        if not 1 <= sampling.max_tokens <= self._max_model_len - len(prompt):
            raise ProtocolError(f"request {add.request_id}: max_tokens is {sampling.max_tokens}")
        if not (isfinite(sampling.temperature) and sampling.temperature >= 0):
            raise ProtocolError(f"request {add.request_id}: temperature {sampling.temperature}")


def _say(why: str) -> None:
    print(f"worker: {why}", file=sys.stderr, flush=True)  # noqa: T201


def build_runner(config: EngineConfig) -> Runner:
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

    return TorchRunner(config, _say)


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
            _say(f"--quality-hook {name} failed, and is not asked again: {error!r}")
            return False

    return ask


def compute(
    settings: WorkerSettings, listener: Listener, inbox: Inbox, first_word: Future[FirstWord]
) -> None:
    try:
        runner = build_runner(settings.config)
        hook = load_quality_hook(settings.config.quality_hook)
    except EngineConfigError as error:
        first_word.set_result(Failed(message=str(error)))
        while inbox.drain(timeout_s=None) is not None:
            pass  # the frontend ends this process
        return
    engine = FaultyEngine(
        Scheduler(settings.config, runner.tokenizer.eos_token_ids),
        runner,
        EngineIO(time.perf_counter_ns, listener.send, listener.hang_up, hook, settings.name),
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
    first_word.set_result(msgspec.structs.replace(runner.info, worker=settings.name))
    engine.run(inbox)
    gc.unfreeze()  # some extension modules call what is never collected a leak


def leave_with_the_frontend(inbox: Inbox) -> None:
    while os.read(_STDIN, 4096):
        pass
    inbox.close()
    threading.Event().wait(_LAST_STEP_S)
    os._exit(0)


def main() -> None:
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
    listening = socket.create_server((settings.host, settings.port))
    listener = Listener(
        listening,
        inbox,
        secret=settings.secret,
        first_word=first_word,
        max_model_len=settings.config.max_model_len,
    )
    threading.Thread(target=leave_with_the_frontend, args=(inbox,), daemon=True).start()
    threading.Thread(target=listener.serve, daemon=True).start()
    line = Listening(port=listening.getsockname()[1])
    print(msgspec.json.encode(line).decode(), flush=True)  # noqa: T201
    os.dup2(_STDERR, _STDOUT)  # a library's output is not for the frontend
    # Where cores are scarce, noticing that a client has left goes before computing for it: the two
    # threads above keep the frontend's priority, this one and the model's threads do not.
    os.nice(10)
    compute(settings, listener, inbox, first_word)


if __name__ == "__main__":
    main()
