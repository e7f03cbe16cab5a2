"""`python -m reference_engine.triton.python_backend FD`: one instance of a Python model.

The main thread runs the model, as Triton does; a second one reads what the server says, so a
cancellation reaches the request's context while `execute` runs. When the server is gone, so is this
process: at once if the model is idle, else after a few seconds for the model to notice.
"""

import asyncio
import contextlib
import importlib.util
import inspect
import json
import os
import queue
import signal
import socket
import sys
import threading
import traceback
import weakref
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from tritonclient.grpc.service_pb2 import ModelInferRequest, ModelInferResponse
from tritonclient.utils import triton_to_np_dtype

from reference_engine.context import Context
from reference_engine.triton.python_backend import triton_python_backend_utils as pb_utils
from reference_engine.triton.python_backend.messages import (
    MAX_BYTES,
    BatchItem,
    CancelItem,
    Execute,
    Executed,
    Finalize,
    Initialize,
    LogMessage,
    Response,
    Started,
    ToModel,
    to_model,
)
from reference_engine.triton.tensors import read_inputs, write_output
from reference_engine.wire import FrameReader, encode_frame

GRACE_S: Final = 5.0
_STATUS: Final = {"INVALID_ARG": "INVALID_ARGUMENT", "UNSUPPORTED": "UNIMPLEMENTED"}


class Channel:
    """The connection to the server. Any thread may send; `contexts` holds the open requests'.

    `inbox` has whole batches; the end of all is Finalize.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.RLock()  # a finalizer may send at any time
        self.contexts: dict[int, Context] = {}
        self.inbox: queue.SimpleQueue[Initialize | list[BatchItem] | Finalize] = queue.SimpleQueue()
        self._batch: list[BatchItem] = []
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, message: object) -> None:
        if isinstance(message, Response) and message.is_final:
            self.contexts.pop(message.key, None)
        frame = encode_frame(message)
        with self._lock, contextlib.suppress(OSError):  # a server that is gone ends this process
            self._connection.sendall(frame)

    def _read(self) -> None:
        frames = FrameReader()
        frames.max_bytes = MAX_BYTES
        while data := self._receive():
            for payload in frames.feed(data):
                self._take(to_model.decode(payload))
        for context in list(self.contexts.values()):
            context.kill()
        self.inbox.put(Finalize())
        threading.Event().wait(GRACE_S)
        os._exit(1)

    def _receive(self) -> bytes:
        try:
            return self._connection.recv(1 << 20)
        except OSError:
            return b""

    def _take(self, message: ToModel) -> None:
        match message:
            case BatchItem():
                self._open(message)
                self._batch.append(message)
            case Execute():
                self.inbox.put(self._batch)
                self._batch = []
            case CancelItem():
                if context := self.contexts.get(message.key):
                    context.kill()
            case Initialize() | Finalize():
                self.inbox.put(message)

    def _open(self, item: BatchItem) -> None:
        """Makes its context before the main thread sees it: a cancellation may be next."""
        if item.key is not None:
            context = self.contexts[item.key] = Context(str(item.key))
            if item.is_cancelled:
                context.kill()


class ModelProcess:
    def __init__(self, channel: Channel, message: Initialize) -> None:
        self._channel = channel
        config = json.loads(message.arguments["model_config"])
        self._is_decoupled = pb_utils.using_decoupled_model_transaction_policy(config)
        self._outputs = {output["name"] for output in config["output"]}
        self._control_shape = (1, 1) if config["max_batch_size"] > 0 else (1,)
        self._name = message.arguments["model_instance_name"]
        self._model = _import_model(Path(message.file), message.arguments["model_version"])
        if hasattr(self._model, "initialize"):
            self._model.initialize(message.arguments)
        self._loop: asyncio.AbstractEventLoop | None = None
        if inspect.iscoroutinefunction(self._model.execute):
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def execute(self, items: list[BatchItem]) -> None:
        requests = [self._make_request(item) for item in items]
        try:
            if self._loop is None:
                self._answer(requests, self._model.execute(requests))
                return
            future = asyncio.run_coroutine_threadsafe(self._execute_async(requests), self._loop)
            if not self._is_decoupled:
                future.result()
        except Exception as error:  # noqa: BLE001 the model's
            self._fail(requests, error)

    def finalize(self) -> None:
        if hasattr(self._model, "finalize"):
            self._model.finalize()

    async def _execute_async(self, requests: list[pb_utils.InferenceRequest]) -> None:
        try:
            self._answer(requests, await self._model.execute(requests))
        except Exception as error:  # noqa: BLE001 the model's
            self._fail(requests, error)

    def _make_request(self, item: BatchItem) -> pb_utils.InferenceRequest:
        given = ModelInferRequest.FromString(item.request)
        inputs = {name: array.copy() for name, array in read_inputs(given).items()}
        if item.key is None:
            inputs = {name: _zeros(array) for name, array in inputs.items()}
        for name, datatype, value in item.controls:
            dtype = np.dtype(triton_to_np_dtype("BYTES" if datatype == "STRING" else datatype))
            one: Any = str(value).encode() if dtype.kind == "O" else value
            inputs[name] = np.full(self._control_shape, one, dtype)
        request = pb_utils.InferenceRequest(
            request_id=given.id if item.key is not None else "",
            correlation_id=item.sequence,
            inputs=[pb_utils.Tensor(name, array) for name, array in inputs.items()],
            requested_output_names=[output.name for output in given.outputs],
            model_name=given.model_name,
            flags=item.flags,
            timeout=item.timeout_us,
            parameters=item.parameters,
        )
        self._connect(request, item.key)
        return request

    def _connect(self, request: pb_utils.InferenceRequest, key: int | None) -> None:
        """Nothing here refers to the sender, so it goes when the model lets go of it."""
        if key is not None:
            request._context = self._channel.contexts[key]
        deliver = partial(self._deliver, key, request.requested_output_names())
        sender = pb_utils.InferenceResponseSender(
            deliver, request._context, is_decoupled=self._is_decoupled
        )
        request._sender = sender
        if key is not None:
            weakref.finalize(sender, self._let_go, key).atexit = False

    def _let_go(self, key: int) -> None:
        if key in self._channel.contexts:
            message = "the model let go of the request without a final response"
            self._send_error(key, "INTERNAL", message, is_final=True)

    def _deliver(
        self,
        key: int | None,
        requested: list[str],
        response: pb_utils.InferenceResponse | None,
        is_final: bool,  # noqa: FBT001
    ) -> None:
        if key is None or (response is None and not self._is_decoupled):
            return
        is_final = is_final or not self._is_decoupled
        error = None if response is None else response.error()
        if error is not None:
            code = error.code().name
            self._send_error(key, _STATUS.get(code, code), error.message(), is_final=is_final)
        elif response is None:
            self._channel.send(Response(key, is_final=is_final))
        else:
            try:
                body = self._encode(response, requested)
            except Exception as problem:  # noqa: BLE001 the model's tensor
                text = f"a response of model instance '{self._name}': {problem}"
                self._send_error(key, "INTERNAL", text, is_final=is_final)
            else:
                self._channel.send(Response(key, body, is_final=is_final))

    def _encode(self, response: pb_utils.InferenceResponse, requested: list[str]) -> bytes:
        encoded = ModelInferResponse()
        for tensor in response.output_tensors():
            if tensor.name() not in self._outputs:
                raise ValueError(f"its configuration has no output '{tensor.name()}'")
            if not requested or tensor.name() in requested:
                write_output(encoded, tensor.name(), tensor.as_numpy())
        for name, value in response.parameters().items():
            kind = {bool: "bool_param", int: "int64_param", float: "double_param"}
            setattr(encoded.parameters[name], kind.get(type(value), "string_param"), value)
        body: bytes = encoded.SerializeToString()
        return body

    def _answer(self, requests: list[pb_utils.InferenceRequest], responses: Any) -> None:
        """None, of all or of one: a sender answers, now or later."""
        if responses is None:
            return
        if self._is_decoupled:
            raise TypeError("execute of a decoupled model must return None")
        if not isinstance(responses, list) or len(responses) != len(requests):
            given = len(responses) if isinstance(responses, list) else type(responses).__name__
            raise ValueError(f"execute returned {given} for {len(requests)} requests, in a list")
        for request, response in zip(requests, responses, strict=True):
            if response is not None:
                try:
                    request.get_response_sender().send(
                        response, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
                    )
                except Exception as error:  # noqa: BLE001 the model's
                    self._fail([request], error)

    def _fail(self, requests: list[pb_utils.InferenceRequest], error: Exception) -> None:
        message = (
            "Failed to process the request(s) for model instance "
            f"'{self._name}', message: {_sentence(error)}"
        )
        self._channel.send(LogMessage(pb_utils.Logger.ERROR, message))
        response = pb_utils.InferenceResponse(error=pb_utils.TritonError(message))
        for request in requests:
            with contextlib.suppress(pb_utils.TritonModelException):  # it has its last response
                sender = request.get_response_sender()
                sender.send(response, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _send_error(self, key: int, code: str, message: str, *, is_final: bool) -> None:
        self._channel.send(Response(key, code=code, message=message, is_final=is_final))


def _zeros(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.full(array.shape, b"" if array.dtype.kind == "O" else 0, array.dtype)


def _sentence(error: BaseException) -> str:
    """Type, message, and the model's line."""
    frames = traceback.extract_tb(error.__traceback__)
    line = next((f for f in reversed(frames) if f.filename != __file__), None)
    place = f" ({line.filename}:{line.lineno})" if line and "importlib" not in line.filename else ""
    return " ".join(f"{type(error).__name__}: {error}{place}".split())


def _import_model(file: Path, version: str) -> Any:
    sys.modules["triton_python_backend_utils"] = pb_utils
    sys.path += [str(file.parent), str(file.parent.parent), str(Path(__file__).parent)]
    name = f"{version}.{file.stem}"  # Triton's; what looks for the module by its name finds it
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.TritonPythonModel()
    if not callable(getattr(model, "execute", None)):
        raise TypeError("TritonPythonModel has no execute")
    return model


def main(fd: int) -> int:
    signal.signal(signal.SIGTERM, lambda *_: None)  # the server says when to end
    channel = Channel(socket.socket(fileno=fd))
    pb_utils.Logger.write = staticmethod(
        lambda level, text: channel.send(LogMessage(level, str(text)))
    )
    message = channel.inbox.get()
    if not isinstance(message, Initialize):
        return 0
    try:
        process = ModelProcess(channel, message)
    except BaseException as error:  # noqa: BLE001 the model's
        channel.send(Started(_sentence(error)))
        return 1
    channel.send(Started())
    while isinstance(items := channel.inbox.get(), list):
        process.execute(items)
        channel.send(Executed())
    process.finalize()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
