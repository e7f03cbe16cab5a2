"""The parts of a request other than its JSON, as ASGI brings them."""

import re
from typing import Any
from urllib.parse import parse_qsl

import pytest
from starlette.datastructures import Headers
from starlette.requests import Request

from reference_engine.api.bodies import (
    MAX_BODY_BYTES,
    MAX_DROPPED_BYTES,
    MAX_PAGE,
    REQUEST_ID_PATTERN,
    read_body,
    read_page,
    read_request_id,
)
from reference_engine.api.schemas import ApiError

pytestmark = pytest.mark.anyio

PIECE = 65_536
TAKEN, UNUSABLE = "the engine itself names requests", "at most 256 visible ASCII characters"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Sender:
    """A client that sends a body of `num_bytes`, piece by piece, as it is asked for them."""

    def __init__(self, num_bytes: int, **headers: str) -> None:
        self.num_left = num_bytes
        raw = [(name.replace("_", "-").encode(), text.encode()) for name, text in headers.items()]
        self.request = Request({"type": "http", "headers": raw}, self._receive)

    async def _receive(self) -> dict[str, Any]:
        piece = b"x" * min(PIECE, self.num_left)
        self.num_left -= len(piece)
        return {"type": "http.request", "body": piece, "more_body": self.num_left > 0}

    async def status(self) -> int:
        with pytest.raises(ApiError) as caught:
            await read_body(self.request)
        return caught.value.status


async def test_a_body_may_be_as_large_as_is_said() -> None:
    sender = Sender(MAX_BODY_BYTES, content_length=str(MAX_BODY_BYTES))
    assert len(await read_body(sender.request)) == MAX_BODY_BYTES


ANNOUNCED: dict[str, Any] = {"content_length": str(MAX_BODY_BYTES + 1)}
LARGE, LARGEST = MAX_BODY_BYTES + 1, MAX_BODY_BYTES + MAX_DROPPED_BYTES


@pytest.mark.parametrize(
    ("num_bytes", "headers", "num_read"),
    [  # a body is read to its end, so that its client reads the refusal; but not for ever
        (LARGE, ANNOUNCED, LARGE),
        (LARGEST, {}, LARGEST),
        (10**12, {}, LARGEST // PIECE * PIECE + PIECE),
        (10**12, {"content_length": str(LARGEST + 1)}, 0),
        (10**12, {"content_length": "9" * 5000}, 0),
        (10**12, ANNOUNCED | {"expect": "100-continue"}, 0),
    ],
)
async def test_a_body_that_is_too_large_is_refused(
    num_bytes: int, headers: dict[str, str], num_read: int
) -> None:
    sender = Sender(num_bytes, **headers)
    assert await sender.status() == 413
    assert num_bytes - sender.num_left == num_read


async def test_an_empty_body_is_called_empty() -> None:
    assert await Sender(0).status() == 400


@pytest.mark.parametrize(
    ("name", "refusal"),
    [
        *((name, None) for name in ("req-", "req-1a", "REQ-1", "xreq-1", "req-1-", "my-req-1")),
        *((name, None) for name in ("cmpl-1", "x" * 256)),
        *((name, TAKEN) for name in ("req-1", "req-007", "cmpl-req-3", "chatcmpl-req-3")),
        *((name, TAKEN) for name in ("req-3-0", "cmpl-req-3-15")),
        *((name, UNUSABLE) for name in ("x" * 257, "a b", "\xe9", "a\x7f")),
    ],
)
def test_a_clients_id_is_its_own_unless_it_is_one_of_the_engines_or_cannot_be_used(
    name: str, refusal: str | None
) -> None:
    headers = Headers({"x-request-id": name})
    assert bool(re.search(REQUEST_ID_PATTERN, name)) == (refusal is None), "the document agrees"
    if refusal is None:
        assert read_request_id(headers) == name
        return
    with pytest.raises(ApiError, match=refusal) as caught:
        read_request_id(headers)
    assert (caught.value.status, caught.value.param) == (400, "X-Request-Id")


@pytest.mark.parametrize(
    ("query", "page"),
    [
        ("", (0, MAX_PAGE)),
        ("after=5&limit=0", (5, 1)),
        (f"limit={MAX_PAGE + 1}", (0, MAX_PAGE)),
        *((f"after={wrong}", None) for wrong in ("", "-1", "1e3", "9" * 16, "\u0665")),
    ],
)
def test_a_page_begins_after_a_number(query: str, page: tuple[int, int] | None) -> None:
    given = dict(parse_qsl(query, keep_blank_values=True))
    if page is not None:
        assert read_page(given) == page
        return
    with pytest.raises(ApiError, match="after: a number of at most 15 digits"):
        read_page(given)
