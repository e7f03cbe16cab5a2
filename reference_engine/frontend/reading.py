"""What is read from a request beside its JSON: the body as it comes, the id, page numbers."""

import re
from typing import Final

from starlette.datastructures import Headers
from starlette.requests import Request

from reference_engine.frontend.errors import ApiError

MAX_BODY_BYTES: Final = 1024 * 1024
MAX_DROPPED_BYTES: Final = 16 * 1024 * 1024
MAX_REQUEST_ID_CHARS: Final = 256
MAX_PAGE: Final = 10_000  # entries: more would hold up the event loop, and with it detection
_MAX_DIGITS: Final = 15
_ENGINES_NAME: Final = r"(chatcmpl-|cmpl-)?req-[0-9]+(-[0-9]+)?"
REQUEST_ID_PATTERN: Final = rf"^(?!{_ENGINES_NAME}$)[!-~]{{0,{MAX_REQUEST_ID_CHARS}}}$"


async def read_body(request: Request) -> bytes:
    """The whole body. Raises ApiError 413 for one that is too large, 400 for none.

    A client that is still sending when its connection ends may never see the answer. So what is too
    much is read to its end, and dropped, up to MAX_DROPPED_BYTES. It is refused at once where it is
    announced to be more than that, or where the client waits before it sends any.
    """
    most = MAX_BODY_BYTES if "expect" in request.headers else MAX_BODY_BYTES + MAX_DROPPED_BYTES
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > most:
        raise _too_large()
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= MAX_BODY_BYTES:
            chunks.append(chunk)
        if size > most:
            break
    if size > MAX_BODY_BYTES:
        raise _too_large()
    if not size:
        raise ApiError(400, "request body: empty; a JSON object is needed, see /openapi.json")
    return b"".join(chunks)


def read_request_id(headers: Headers) -> str | None:
    """The client's X-Request-Id, or None. Raises ApiError for one that cannot be used."""
    request_id = headers.get("x-request-id")
    if request_id and re.fullmatch(_ENGINES_NAME, request_id):
        raise ApiError(
            400,
            "X-Request-Id: req- and a number is how the engine itself names requests, so this id "
            "could mean somebody else's; use one of another form",
            param="X-Request-Id",
        )
    if request_id and not _is_usable(request_id):
        raise ApiError(
            400,
            f"X-Request-Id: at most {MAX_REQUEST_ID_CHARS} characters, of ASCII that can be seen",
            param="X-Request-Id",
        )
    return request_id or None


def echo_of(headers: Headers) -> str | None:
    """The client's X-Request-Id where it can be sent back."""
    request_id = headers.get("x-request-id")
    return request_id if request_id and _is_usable(request_id) else None


def read_page(request: Request) -> tuple[int, int]:
    """`after` and `limit` of the query. Raises ApiError."""
    limit = _number(request, "limit", default=MAX_PAGE)
    return _number(request, "after", default=0), min(max(limit, 1), MAX_PAGE)


def _is_usable(request_id: str) -> bool:
    in_range = all("!" <= character <= "~" for character in request_id)
    return in_range and len(request_id) <= MAX_REQUEST_ID_CHARS


def _number(request: Request, name: str, *, default: int) -> int:
    text = request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS):
        raise ApiError(400, f"{name}: a number of at most {_MAX_DIGITS} digits", param=name)
    return int(text)


def _too_large() -> ApiError:
    return ApiError(413, f"request body: at most {MAX_BODY_BYTES} bytes")
