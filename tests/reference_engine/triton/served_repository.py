"""The test's model repository, served over gRPC by a thread, and Triton's client for it."""

import asyncio
import json
import queue
import shutil
import socket
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tritonclient.grpc import InferenceServerClient, InferInput, InferResult
from tritonclient.grpc.service_pb2 import ModelInferRequest
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from reference_engine.config import FrontendSettings
from reference_engine.triton.in_process import InferenceServer
from reference_engine.triton.python_model import PythonModel
from reference_engine.triton.server import InferenceService, grpc_server

FOLDER = Path(__file__).parent / "repository"
TIMEOUT_S = 20.0
STEPS = {"N": 1, "ITL_MS": -1, "CHECK": 1}
BATCHED = ("batched", "queued", "single", "oldest", "direct")
_CONTROLS = """
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] } }
  control_input { name: "END" control { kind: CONTROL_SEQUENCE_END int32_false_true: [0, 1] } }
  control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY int32_false_true: [0, 1] } }
  control_input { name: "CORRID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }
"""
_SEQUENCES = " sequence_batching { max_sequence_idle_microseconds: 60000000 %s }"
LIKE_UNARY = {  # its model behind other schedulers: what each adds to its configuration
    "second": "",
    "batched": "max_batch_size: 4 dynamic_batching { }",
    "single": "max_batch_size: 1 dynamic_batching { }",
    "queued": """max_batch_size: 1
        dynamic_batching { default_queue_policy { timeout_action: REJECT max_queue_size: 3
          default_timeout_microseconds: 60000000 allow_timeout_override: true } }""",
    "oldest": "max_batch_size: 2"
    + _SEQUENCES % ("oldest { max_candidate_sequences: 4 }" + _CONTROLS),
    "direct": "max_batch_size: 2" + _SEQUENCES % ("direct { }" + _CONTROLS),
}


def write_repository(folder: Path) -> Path:
    shutil.copytree(FOLDER, folder)
    for name, scheduler in LIKE_UNARY.items():
        shutil.copytree(folder / "unary", folder / name)
        config = folder / name / "config.pbtxt"
        config.write_text(f"{config.read_text()}{scheduler}\n")
    return folder


class Watched:
    """A copy of a repository, whose models report what they do, and wait at gates.

    `events` holds what the models have said, in order: model, what, request id.
    """

    def __init__(self, folder: Path, source: Path | None = None) -> None:
        self.gates = folder / "gates"
        self.gates.mkdir()
        self.events: list[tuple[str, str, str]] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(folder / "events"))
        self._said: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()
        self.folder = folder / "repository"
        if source is None:
            write_repository(self.folder)
        else:
            shutil.copytree(source, self.folder)
        for config in self.folder.glob("*/config.pbtxt"):
            for key, path in (("gates", self.gates), ("events", folder / "events")):
                value = f'parameters {{ key: "{key}" value {{ string_value: "{path}" }} }}\n'
                config.write_text(config.read_text() + value)

    def _listen(self) -> None:
        with self._socket:
            while said := self._socket.recv(4096):
                self._said.put(said)

    def stop_listening(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.sendto(b"", self._socket.getsockname())

    def open(self, *request_ids: str) -> None:
        for request_id in request_ids:
            (self.gates / request_id).touch()

    def expect(self, model: str, what: str, request_id: str) -> None:
        """Read the models' events up to this one."""
        while (model, what, request_id) not in self.events:
            name, said, about = json.loads(self._said.get(timeout=TIMEOUT_S))
            self.events.append((name, said, about))

    def said(self, request_id: str) -> list[str]:
        return [what for _, what, about in self.events if about == request_id]


class Served(Watched):
    """`InferenceService` over the repository of a server in process."""

    def __init__(
        self, folder: Path, *, is_faithful: bool = False, source: Path | None = None
    ) -> None:
        super().__init__(folder, source)
        self.is_faithful = is_faithful
        self.url = ""

    def start(self) -> None:
        self.in_process = InferenceServer(self.folder, is_faithful=self.is_faithful)
        self.repository = self.in_process._repository
        self.do(self._open())

    async def _open(self) -> None:
        service = InferenceService(
            self.repository.models, set(), stall_timeout_s=TIMEOUT_S, is_allowed=lambda _: True
        )
        self._server = grpc_server(service, FrontendSettings())
        self.url = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()

    def close(self) -> None:
        if self.url:
            self.do(self._server.stop(0))
            self.in_process.close()
        self.stop_listening()

    def do(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.in_process._loop).result(TIMEOUT_S)

    def model(self, name: str) -> PythonModel:
        model = self.repository.models[name]
        assert isinstance(model, PythonModel)
        return model

    def until(self, is_true: Callable[[], bool]) -> None:
        """Returns when the server's thread sees it."""

        async def look() -> None:
            async with asyncio.timeout(TIMEOUT_S):
                while not is_true():  # noqa: ASYNC110 the server has no events for tests
                    await asyncio.sleep(0.001)

        self.do(look())

    def waiting(self, name: str, number: int) -> None:
        self.until(lambda: self.model(name)._scheduler.num_waiting == number)

    def idle(self) -> None:
        """Every request and its place are gone, and the books agree."""
        models = self.repository.python_models
        self.until(lambda: not any(m._answers or m._scheduler.num_running for m in models))
        self.repository.check_integrity()

    def answers(self, request_id: str) -> list[Any]:
        """Open ones, of all models."""
        models = [model._answers for model in self.repository.python_models]
        return [
            a
            for open_ones in models
            for a in list(open_ones.values())
            if a.request.id == request_id
        ]

    def cancelled(self, request_id: str) -> None:
        """The server has seen that this request is cancelled, or has ended it."""
        self.until(lambda: all(answer.queued.is_cancelled for answer in self.answers(request_id)))

    def client(self) -> "Client":
        return Client(self.url)


def tensor(name: str, array: Any) -> InferInput:
    given = InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
    given.set_data_from_numpy(array)
    return given


def request_of(*given: InferInput, model: str = "") -> ModelInferRequest:
    """As the client would send it."""
    return ModelInferRequest(
        model_name=model,
        inputs=[one._get_tensor() for one in given],
        raw_input_contents=[one._get_content() for one in given],
    )


def inputs_for(model: str, **values: int) -> list[InferInput]:
    shape = [1, 1] if model in BATCHED else [1]
    asked = {**STEPS, **values}
    return [tensor(name, np.full(shape, value, np.int32)) for name, value in asked.items()]


class Pending:
    """A call: `wait` gives the steps done, or the end's error."""

    def __init__(self) -> None:
        self._ends: queue.SimpleQueue[tuple[InferResult | None, Any]] = queue.SimpleQueue()
        self.cancel: Callable[[], object] = lambda: None

    def note(self, result: InferResult | None, error: InferenceServerException | None) -> None:
        self._ends.put((result, error))

    def next(self) -> int | str:
        """`STATUS message` for an error, and "final" for an empty final response. Triton's own
        package answers with empty tensors: these count as 1.
        """
        result, error = self._ends.get(timeout=TIMEOUT_S)
        if error is not None:
            return f"{(error.status() or '').removeprefix('StatusCode.')} {error.message()}"
        assert result is not None
        contents = result.get_response().raw_output_contents
        return int.from_bytes(contents[0] or b"\1", "little") if contents else "final"

    def is_silent(self) -> bool:
        return self._ends.empty()


class Client(InferenceServerClient):  # type: ignore[misc]
    """On a connection of its own."""

    def __init__(self, url: str) -> None:
        alone = ("grpc.use_local_subchannel_pool", 1)
        super().__init__(url, channel_args=[alone, ("grpc.max_receive_message_length", -1)])

    def ask(self, model: str, request_id: str, values: Any = None, **options: Any) -> Pending:
        pending = Pending()
        call = self.async_infer(
            model,
            inputs_for(model, **(values or {})),
            pending.note,
            request_id=request_id,
            **options,
        )
        pending.cancel = call.cancel
        return pending

    def stream(self, **options: Any) -> Pending:
        pending = Pending()
        self.start_stream(pending.note, **options)
        pending.cancel = partial(self.stop_stream, cancel_requests=True)
        return pending

    def send(self, request_id: str, model: str = "stream", **values: int) -> None:
        self.async_stream_infer(
            model,
            inputs_for(model, **values),
            request_id=request_id,
            enable_empty_final_response=True,
        )
