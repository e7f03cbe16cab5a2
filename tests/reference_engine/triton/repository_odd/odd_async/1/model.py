"""Decoupled, and a coroutine: a request that `waits` ends after one that `wakes`."""

import asyncio

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.woken = asyncio.Event()

    async def execute(self, requests):
        for request in requests:
            do = pb_utils.get_input_tensor_by_name(request, "DO")
            if do.as_numpy()[0] == b"waits":
                await self.woken.wait()
            else:
                self.woken.set()
            said = pb_utils.InferenceResponse([pb_utils.Tensor("SAID", do.as_numpy())])
            request.get_response_sender().send(said, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
