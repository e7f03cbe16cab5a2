"""Decoupled: a response for each of N steps; see the model `unary`."""

import json
import socket
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        assert pb_utils.using_decoupled_model_transaction_policy(config)
        parameters = config["parameters"]
        self.gates = Path(parameters.get("gates", {}).get("string_value", "/nowhere"))
        self.to = parameters.get("events", {}).get("string_value")
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def tell(self, what, request_id):
        if self.to is not None:
            self.socket.sendto(json.dumps(["stream", what, request_id]).encode(), self.to)

    def execute(self, requests):
        for request in requests:
            self.stream(request, request.get_response_sender())

    def stream(self, request, sender):
        number, itl_ms, looks = (
            int(pb_utils.get_input_tensor_by_name(request, name).as_numpy()[0])
            for name in ("N", "ITL_MS", "CHECK")
        )
        gate = self.gates / request.request_id()
        self.tell("started", request.request_id())
        done = 0
        while done < number:
            if looks and sender.is_cancelled() and request.is_cancelled():
                self.tell("cancelled", request.request_id())
                error = pb_utils.TritonError("the model stopped", pb_utils.TritonError.CANCELLED)
                sender.send(pb_utils.InferenceResponse(error=error), FINAL)
                return
            # The last step waits for the gate, so what came before has arrived.
            if itl_ms >= 0 or done < number - 1 or gate.exists():
                done += 1
                step = pb_utils.Tensor("STEPS", np.array([done], np.int32))
                sender.send(pb_utils.InferenceResponse([step]))
            time.sleep(max(itl_ms, 1) / 1000)
        self.tell("answered", request.request_id())
        sender.send(flags=FINAL)
