"""A KServe server that knows the truth: of each call, what came, what was sent, and how it ended.

One handler answers a call: `handle(Served)`. A `Served` waits for what its client does.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import grpc
from tritonclient.grpc.service_pb2 import (
    ModelInferRequest,
    ModelInferResponse,
    ModelStreamInferResponse,
)
from tritonclient.grpc.service_pb2_grpc import (
    GRPCInferenceServiceServicer,
    add_GRPCInferenceServiceServicer_to_server,
)

LONG_S = 30.0


class Served:
    """`has_ended`: the call is over for this server; `ended_ns`, since when. `is_cancelled`: it
    ended before the answer did. `has_half_closed`: no further request comes, or the call ended."""

    def __init__(self, requests: Iterator[ModelInferRequest], context: Any) -> None:
        self.request = next(requests)
        self.metadata = dict(context.invocation_metadata())
        self.peer: str = context.peer()
        self.time_left_s: float | None = context.time_remaining()
        self.ended_ns: int | None = None
        self.has_half_closed, self.has_ended = threading.Event(), threading.Event()
        self.tokens_sent = 0
        self.is_whole = self.is_cancelled = False
        context.add_callback(self._note_end)
        self.abort: Callable[[grpc.StatusCode, str], None] = context.abort
        self._requests = requests
        threading.Thread(target=self._wait_for_half_close, daemon=True).start()

    def _note_end(self) -> None:
        self.ended_ns = time.perf_counter_ns()
        self.is_cancelled = not self.is_whole
        self.has_ended.set()

    def _wait_for_half_close(self) -> None:
        with suppress(grpc.RpcError):
            assert next(self._requests, None) is None, "one request a stream"
        self.has_half_closed.set()

    @property
    def max_tokens(self) -> int:
        tensor = next(one for one in self.request.inputs if one.name == "max_tokens")
        return int(tensor.contents.int_contents[0])

    def token(self, *, is_last: bool = False) -> ModelStreamInferResponse:
        self.tokens_sent += 1
        answer = ModelInferResponse(model_name=self.request.model_name, id=self.request.id)
        output = answer.outputs.add(name="text_output", datatype="BYTES", shape=[1])
        output.contents.bytes_contents.append(b"word")
        answer.parameters["triton_final_response"].bool_param = is_last
        return ModelStreamInferResponse(infer_response=answer)

    def end(self) -> ModelStreamInferResponse:
        answer = ModelInferResponse(id=self.request.id)
        answer.parameters["triton_final_response"].bool_param = True
        return ModelStreamInferResponse(infer_response=answer)


Script = Callable[[Served], Iterator[ModelStreamInferResponse]]


class TruthServer(GRPCInferenceServiceServicer):  # type: ignore[misc]
    def __init__(self, script: Script) -> None:
        self.calls: dict[str, Served] = {}
        self._script = script

    def ModelStreamInfer(  # noqa: N802 - gRPC's name
        self, requests: Iterator[ModelInferRequest], context: Any
    ) -> Iterator[ModelStreamInferResponse]:
        served = Served(requests, context)
        self.calls[served.request.id] = served
        yield from self._script(served)
        served.is_whole = not served.has_ended.is_set()


@contextmanager
def serving(
    script: Script, *, tls: grpc.ServerCredentials | None = None
) -> Iterator[tuple[str, TruthServer]]:
    """The server's place, and what it saw."""
    truth = TruthServer(script)
    with ThreadPoolExecutor(max_workers=16) as pool:
        server = grpc.server(pool)
        add_GRPCInferenceServiceServicer_to_server(truth, server)
        place, scheme = "127.0.0.1:0", "grpc" if tls is None else "grpcs"
        port = server.add_secure_port(place, tls) if tls else server.add_insecure_port(place)
        server.start()
        try:
            yield f"{scheme}://127.0.0.1:{port}", truth
        finally:
            server.stop(None).wait(LONG_S)


def until_left(served: Served) -> Iterator[ModelStreamInferResponse]:
    """One token, and then nothing until the client has left."""
    yield served.token()
    assert served.has_ended.wait(LONG_S)


def whole(served: Served) -> Iterator[ModelStreamInferResponse]:
    """All tokens, one each 2 ms, and an empty final response; ends when its client has."""
    for _ in range(served.max_tokens):
        if served.has_ended.wait(0.002):
            return
        yield served.token()
    yield served.end()
    served.has_half_closed.wait(LONG_S)
