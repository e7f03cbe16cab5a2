"""An answer other than 200: what it says, for the row."""

from typing import Final

import httpx

from harness.load.connection import Connection

_MAX_BYTES: Final = 65536
_SHOWN_CHARS: Final = 200


def read_refusal(connection: Connection) -> bytes:
    """The body of an error, as far as it comes: its status has already decided the outcome.

    In place of a body that helps nobody stands what to do.
    """
    if 300 <= connection.status_code < 400 and (place := connection.header(b"location")):
        shown = place.decode("utf-8", "replace")[:_SHOWN_CHARS]
        return f"the server redirects to {shown}: name that address as the target".encode()
    if connection.is_encoded:
        return b"the body is compressed, though nobody asked for that"
    body = b""
    try:
        while len(body) < _MAX_BYTES and (chunk := connection.receive()) is not None:
            body += chunk
    except httpx.TransportError:
        return body
    return body
