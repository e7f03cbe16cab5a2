"""API keys: who may talk to this engine.

The check wraps the whole application, so that no route can be forgotten; it looks at the request's
head and steps aside, so that it cannot hide a disconnect.
"""

import hmac
from collections.abc import Mapping, Sequence
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from reference_engine.config import EngineConfigError
from reference_engine.frontend.errors import ApiError
from reference_engine.frontend.reading import echo_of

OPEN_PATHS: Final = frozenset({"/health"})
MAX_KEY_CHARS: Final = 512


def read_api_keys(environment: Mapping[str, str], name: str) -> tuple[str, ...]:
    """The comma-separated keys in the variable `name`. Raises EngineConfigError; shows no key."""
    keys = tuple(key.strip() for key in environment.get(name, "").split(",") if key.strip())
    if not keys:
        raise EngineConfigError(
            f"--api-key-env {name}: the environment variable {name} has no key in it"
        )
    for key in keys:
        if not (key.isascii() and key.isprintable() and " " not in key):
            raise EngineConfigError(f"--api-key-env {name}: a key is printable ASCII, no spaces")
        if len(key) > MAX_KEY_CHARS:
            raise EngineConfigError(f"--api-key-env {name}: at most {MAX_KEY_CHARS} characters")
    return keys


class KeyCheck:
    """The application behind its keys; with no keys at all everybody may come in.

    The key that a request came with is in `scope["state"]["owner"]`, or None.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = tuple(keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        owner = find_key(headers.get("authorization"), self._keys)
        if self._keys and owner is None and scope["path"] not in OPEN_PATHS:
            refusal = ApiError(
                401,
                "Authorization: a valid API key is needed, as `Bearer KEY`",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
            await refusal.response(echo_of(headers))(scope, receive, send)
            return
        scope.setdefault("state", {})["owner"] = owner
        await self._app(scope, receive, send)


def find_key(authorization: str | None, keys: Sequence[str]) -> str | None:
    """The key that the header names. It takes as long for a wrong key as for any other."""
    scheme, _, given = (authorization or "").partition(" ")
    if scheme.lower() != "bearer":
        return None
    given_bytes = given.strip().encode()
    found = None
    for key in keys:
        if hmac.compare_digest(given_bytes, key.encode()):
            found = key
    return found
