"""N steps of ITL_MS each for every request of a batch, side by side; one answer, the steps done.

With CHECK, a request looks for its cancellation in each step, and stops. An ITL_MS below 0 ends a
step when the folder `gates` has a file of the request's id. The socket `events` gets what happens.
"""

import json
import socket
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        parameters = config["parameters"]
        self.name = args["model_name"]
        self.gates = Path(parameters.get("gates", {}).get("string_value", "/nowhere"))
        self.to = parameters.get("events", {}).get("string_value")
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.type = pb_utils.triton_string_to_numpy(
            pb_utils.get_output_config_by_name(config, "STEPS")["data_type"]
        )

    def tell(self, what, request_id):
        if self.to is not None:
            self.socket.sendto(json.dumps([self.name, what, request_id]).encode(), self.to)

    def execute(self, requests):
        steps = [Steps(self, request) for request in requests]
        while any([step.go_on() for step in steps]):
            time.sleep(max(step.pause_s for step in steps))
        return [step.answer() for step in steps]


class Steps:
    def __init__(self, model, request):
        self.model, self.request, self.id = model, request, request.request_id()
        self.done = 0
        self.is_ready = self.read("READY", 1) == 1
        self.number, self.itl_ms = self.read("N", 1), self.read("ITL_MS", 0)
        self.looks = self.read("CHECK", 1) == 1
        self.is_cancelled = not self.is_ready  # an empty place of the direct strategy
        if self.is_ready and self.read("CORRID", 0):
            assert self.read("CORRID", 0) == request.correlation_id()
            assert self.read("START", 0) + 2 * self.read("END", 0) == request.flags() & 3
        self.pause_s = max(self.itl_ms, 1) / 1000 if self.is_ready else 0
        model.tell("started" if self.is_ready else "empty", self.id)

    def read(self, name, default):
        tensor = pb_utils.get_input_tensor_by_name(self.request, name)
        return default if tensor is None else int(tensor.as_numpy().ravel()[0])

    def go_on(self):
        if self.is_cancelled or self.done >= self.number:
            return False
        if self.looks and self.request.is_cancelled():
            self.is_cancelled = True
            self.model.tell("cancelled", self.id)
        elif self.itl_ms >= 0 or (self.model.gates / self.id).exists():
            self.done += 1
        return True

    def answer(self):
        if self.is_ready:
            self.model.tell("answered", self.id)
        if self.is_cancelled:
            return pb_utils.InferenceResponse(
                error=pb_utils.TritonError("the model stopped", pb_utils.TritonError.CANCELLED)
            )
        shape = pb_utils.get_input_tensor_by_name(self.request, "N").shape()
        steps = pb_utils.Tensor("STEPS", np.full(shape, self.done, self.model.type))
        return pb_utils.InferenceResponse([steps])
