"""Inference without a server: a request that can be cancelled, and an iterator that can, too.

async for response in InferenceRequest(repository.models["stream"], request).infer(): ...
"""

from collections.abc import AsyncIterator

from tritonclient.grpc.service_pb2 import ModelInferRequest, ModelInferResponse

from reference_engine.context import Context
from reference_engine.kserve.model import Model, check_request


class ResponseIterator:
    """`cancel` returns at once. A response that is there is still delivered in the faithful manner;
    by default the iterator ends with InferenceError(CANCELLED).
    """

    def __init__(self, responses: AsyncIterator[ModelInferResponse], context: Context) -> None:
        self._responses, self._context = responses, context

    def cancel(self) -> None:
        self._context.kill()

    def __aiter__(self) -> "ResponseIterator":
        return self

    async def __anext__(self) -> ModelInferResponse:
        return await anext(self._responses)


class InferenceRequest:
    def __init__(
        self, model: Model, request: ModelInferRequest, context: Context | None = None
    ) -> None:
        self.model, self.request = model, request
        self.context = context or Context(request.id or None)

    def cancel(self) -> None:
        """From any thread; again or after the end, it has no effect."""
        self.context.kill()

    def is_cancelled(self) -> bool:
        return self.context.is_stopped()

    def infer(self) -> ResponseIterator:
        """Raises InferenceError for inputs that do not fit the model."""
        check_request(self.request, self.model.config)
        return ResponseIterator(self.model.infer(self.request, self.context), self.context)
