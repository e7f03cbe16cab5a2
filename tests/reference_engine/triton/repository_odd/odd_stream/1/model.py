"""Decoupled: the method that the input DO names gets the request."""

import gc
import threading

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def answer(*words):
    said = np.array([word.encode() for word in words], dtype=np.object_)
    return pb_utils.InferenceResponse([pb_utils.Tensor("SAID", said)])


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            do = pb_utils.get_input_tensor_by_name(request, "DO").as_numpy()[0].decode()
            returned = getattr(self, do)(request, request.get_response_sender())
        return returned

    def from_thread(self, request, sender):
        threading.Thread(target=self.later, args=(request, sender)).start()

    def later(self, request, sender):
        gc.collect()
        for word in ("one", "two"):
            sender.send(answer(word))
        sender.send(flags=FINAL)

    def none(self, request, sender):
        sender.send(flags=FINAL)

    def lets_go(self, request, sender):
        sender.send(answer("first"))

    def raises(self, request, sender):
        sender.send(answer("first"))
        raise ValueError("no such thing")

    def returns(self, request, sender):
        return [answer("wrong")]

    def after_final(self, request, sender):
        problems = []
        for arguments in ((), (answer("x"), 5)):
            try:
                sender.send(*arguments)
            except pb_utils.TritonModelException as error:
                problems.append(str(error))
        self.problems, self.sender = problems, sender
        sender.send(answer("last"), FINAL)
        try:
            sender.send(answer("more"))
        except pb_utils.TritonModelException as error:
            problems.append(str(error))

    def tell_problems(self, request, sender):
        sender.send(answer(*self.problems), FINAL)

    def until_cancelled(self, request, sender):
        sender.send(answer("started"))
        while not sender.is_cancelled():
            pass
        sender.send(answer("no exception"))  # though nobody reads it
        sender.send(flags=FINAL)
        self.problems = [str(request.is_cancelled()), str(sender.is_cancelled())]
