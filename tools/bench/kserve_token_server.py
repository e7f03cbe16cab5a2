"""The server of tokens over gRPC: `python -m tools.bench.kserve_token_server JSON`.

JSON, standard output, log and the times of tokens are as in `token_server.py`. It answers each
request of a stream of KServe with the bundled engine's responses, encoded beforehand: a handler
sends bytes.
"""

import asyncio
import json
import sys
from pathlib import Path
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any, TextIO

import grpc
from tritonclient.grpc.service_pb2 import (
    ModelInferRequest,
    ModelInferResponse,
    ModelStreamInferResponse,
)

from tools.bench.token_server import say


def answer(num_tokens: int) -> list[bytes]:
    """A response for each token, then the empty last one."""
    sends = []
    for number in range(1, num_tokens + 2):
        is_last = number > num_tokens
        one = ModelInferResponse(model_name="generate", model_version="1", id="request-4f1c2a9e")
        one.parameters["triton_final_response"].bool_param = is_last
        if not is_last:
            one.parameters["completion_tokens"].int64_param = number
            one.outputs.add(name="text_output", datatype="BYTES", shape=[1])
            one.raw_output_contents.append(b"\5\0\0\0 word")
        sends.append(ModelStreamInferResponse(infer_response=one).SerializeToString())
    return sends


class TokenService:
    def __init__(self, options: SimpleNamespace, log: TextIO) -> None:
        self._options = options
        self._period_ns = round(1e9 / options.rate)
        self._sends = answer(options.tokens)
        self._num_asked = 0
        self._log = log

    async def stream(self, requests: Any, call: Any) -> None:
        async for request in requests:
            received_ns, options = perf_counter_ns(), self._options
            slot = self._num_asked % options.streams
            is_cut = options.is_staggered and self._num_asked < options.streams
            self._num_asked += 1
            if self._num_asked == options.streams:
                say("open")
            phase_ns = 0 if options.is_aligned else self._period_ns * slot // options.streams
            due_ns = received_ns + (phase_ns - received_ns) % self._period_ns
            sent_ns: list[int] = []
            try:
                await self._send(
                    call, options.tokens * slot // options.streams * is_cut, due_ns, sent_ns
                )
            finally:
                line = {"request_id": request.id, "received_ns": received_ns, "sent_ns": sent_ns}
                self._log.write(json.dumps(line) + "\n")

    async def _send(self, call: Any, first: int, due_ns: int, sent_ns: list[int]) -> None:
        for token in self._sends[first:-1]:
            await asyncio.sleep(max(0.0, (due_ns - perf_counter_ns()) / 1e9))
            sent_ns.append(perf_counter_ns())
            await call.write(token)
            due_ns += self._period_ns
        await call.write(self._sends[-1])


async def serve(options: SimpleNamespace, log: TextIO) -> None:
    service, server = TokenService(options, log), grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(
        service.stream, request_deserializer=ModelInferRequest.FromString
    )
    methods = {"ModelStreamInfer": handler}
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("inference.GRPCInferenceService", methods),)
    )
    say(server.add_insecure_port("127.0.0.1:0"))
    await server.start()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.stop(0)


def main() -> None:
    options = SimpleNamespace(**json.loads(sys.argv[1]))
    with Path(options.log).open("w") as log:
        asyncio.run(serve(options, log))


if __name__ == "__main__":
    main()
