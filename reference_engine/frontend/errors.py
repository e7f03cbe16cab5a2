"""Errors in the shape that OpenAI's clients understand."""

from collections.abc import Mapping
from typing import Final

import msgspec
from starlette.responses import Response

_KINDS: Final = {401: "authentication_error", 429: "rate_limit_error"}


class ErrorText(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong. `param` is the field of the request that is to blame."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every answer with a status of 400 and above."""

    error: ErrorText


class ApiError(Exception):
    """A request that cannot be served: becomes an ErrorBody with `status` and `headers`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers or {}

    def response(self, request_id: str | None = None) -> Response:
        """The answer; a client's X-Request-Id is echoed."""
        echo = {} if request_id is None else {"x-request-id": request_id}
        usual = "invalid_request_error" if self.status < 500 else "server_error"
        kind = _KINDS.get(self.status, usual)
        text = ErrorText(message=str(self), type=kind, param=self.param, code=self.code)
        return Response(
            msgspec.json.encode(ErrorBody(text)),
            status_code=self.status,
            media_type="application/json",
            headers={**self.headers, **echo},
        )
