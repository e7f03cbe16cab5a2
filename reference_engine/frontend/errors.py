"""Errors in the shape that OpenAI's clients understand."""

from collections.abc import Mapping

import msgspec
from starlette.responses import Response


class ApiError(Exception):
    """A request that cannot be served: becomes `{"error": {...}}` with `status`."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def response(
        self, request_id: str | None = None, headers: Mapping[str, str] | None = None
    ) -> Response:
        """The answer; a client's X-Request-Id is echoed."""
        echo = {} if request_id is None else {"x-request-id": request_id}
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        body = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return Response(
            msgspec.json.encode({"error": body}),
            status_code=self.status,
            media_type="application/json",
            headers={**(headers or {}), **echo},
        )
