"""A request's input DO names the method that answers it."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import dataclass

import numpy as np
import triton_python_backend_utils as pb_utils


def read(request, name):
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy()


def answer(*words):
    said = np.array([word.encode() for word in words], dtype=np.object_)
    return pb_utils.InferenceResponse([pb_utils.Tensor("SAID", said)])


@dataclass
class Said:
    """The library looks for the module of a class by its name."""

    word: str


class TritonPythonModel:
    def initialize(self, args):
        self.args = args
        self.config = json.loads(args["model_config"])

    def execute(self, requests):
        print("a model may print")  # noqa: T201
        return getattr(self, read(requests[0], "DO")[0].decode())(requests)

    def tell(self, requests):
        request = requests[0]
        assert request.is_cancelled() is False
        pb_utils.Logger.log_info(f"asked by {request.request_id()}")
        return [
            answer(
                self.args["model_name"],
                self.args["model_instance_name"],
                self.args["model_version"],
                self.args["model_instance_kind"],
                self.config["parameters"]["word"]["string_value"],
                pb_utils.get_input_config_by_name(self.config, "MORE")["data_type"],
                json.dumps(pb_utils.get_output_config_by_name(self.config, "TWICE")["dims"]),
                request.request_id(),
                json.dumps(request.parameters(), sort_keys=True),
                str(request.timeout()),
                json.dumps(sorted(request.requested_output_names())),
            )
        ]

    def double(self, requests):
        values = read(requests[0], "MORE")
        values *= 2  # in place: the tensor is the model's own
        twice = pb_utils.Tensor("TWICE", values)
        assert (twice.shape(), twice.triton_dtype(), twice.is_cpu()) == ([2], 11, True)
        said = answer("doubled").output_tensors()
        return [pb_utils.InferenceResponse([twice, *said], parameters={"by": 2, "ok": True})]

    def raises(self, requests):
        raise ValueError("no such thing")

    def too_few(self, requests):
        return []

    def nothing(self, requests):
        return [None]

    def no_answer(self, requests):
        return None

    def huge(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("TWICE", np.zeros(17 << 20, "f"))])]

    def unknown_output(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OTHER", np.zeros(1))])]

    def strange_type(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("SAID", np.zeros(1, "M8[s]"))])]

    def error(self, requests):
        error = pb_utils.TritonError("not today", pb_utils.TritonError.UNAVAILABLE)
        return [pb_utils.InferenceResponse(error=error)]

    def by_sender(self, requests):
        threading.Thread(target=self.later, args=(requests[0].get_response_sender(),)).start()

    def later(self, sender):
        sender.send(answer(Said("sent").word), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def both_ways(self, requests):
        requests[0].get_response_sender().send(answer("sent"))
        return [answer("returned")]

    def calls_others(self, requests):
        return [pb_utils.InferenceRequest(model_name="odd", inputs=[]).exec()]

    def dies(self, requests):
        os._exit(7)

    def hangs(self, requests):
        threading.Event().wait()
