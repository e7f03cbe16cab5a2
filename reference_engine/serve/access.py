"""API keys, and two token buckets for each key: one for requests, one for tokens.

A bucket holds a minute's worth and fills evenly. A request is admitted if each bucket has at least
one left. Tokens are taken as they are generated, so that bucket may go below zero.
"""

import hmac
from collections.abc import Mapping, Sequence
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from reference_engine.api.bodies import echo_of
from reference_engine.api.schemas import ApiError
from reference_engine.config import EngineConfigError, RateLimits

OPEN_PATHS: Final = frozenset({"/health"})
MAX_KEY_CHARS: Final = 512


def read_api_keys(environment: Mapping[str, str], name: str) -> tuple[str, ...]:
    keys = tuple(key.strip() for key in environment.get(name, "").split(",") if key.strip())
    if not keys:
        why = f"the environment variable {name} holds no key"
    elif not all(key.isascii() and key.isprintable() and " " not in key for key in keys):
        why = "a key is printable ASCII, no spaces"
    elif max(map(len, keys)) > MAX_KEY_CHARS:
        why = f"at most {MAX_KEY_CHARS} characters"
    else:
        return keys
    raise EngineConfigError(f"--api-key-env {name}: {why}")


class KeyCheck:
    """Checks a request's key before the application sees it; without any key it is open.

    `scope["state"]["owner"]` is the request's key, or None.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            owner = find_key(headers.get("authorization"), self._keys)
            scope.setdefault("state", {})["owner"] = owner
            if self._keys and owner is None and scope["path"] not in OPEN_PATHS:
                app = _no_key().response(echo_of(headers))
        await app(scope, receive, send)


def _no_key() -> ApiError:
    return ApiError(
        401,
        "Authorization: a valid API key is needed, as `Bearer KEY`",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


def find_key(authorization: str | None, keys: Sequence[str]) -> str | None:
    """Find it in constant time: a wrong key takes as long as a right one."""
    scheme, _, given = (authorization or "").partition(" ")
    if scheme.lower() != "bearer":
        return None
    found = None
    for key in keys:
        if hmac.compare_digest(given.strip().encode(), key.encode()):
            found = key
    return found


MAX_OWNERS: Final = 10_000
_MINUTE_NS: Final = 60_000_000_000
_NO_LIMIT: Final = 10**18


class Bucket:
    def __init__(self, capacity: int, now_ns: int) -> None:
        self._capacity = capacity
        self._level = float(capacity)
        self._at_ns = now_ns

    def level(self, now_ns: int) -> float:
        filled = (now_ns - self._at_ns) / _MINUTE_NS * self._capacity
        return min(float(self._capacity), self._level + filled)

    def take(self, amount: int, now_ns: int) -> None:
        self._level, self._at_ns = self.level(now_ns) - amount, now_ns

    def seconds_until_one(self, now_ns: int) -> float:
        missing = max(0.0, 1.0 - self.level(now_ns))
        return missing / self._capacity * _MINUTE_NS / 1e9


class RateLimiter:
    """Time is an argument, a monotonic stamp. An owner is an API key, or None without keys.

    `_accounts` holds at most MAX_OWNERS, and forgets the least recently used first.
    """

    def __init__(self, limits: RateLimits) -> None:
        self._limits = limits
        self._accounts: dict[str | None, tuple[Bucket, Bucket]] = {}

    def __len__(self) -> int:
        return len(self._accounts)

    def admit(self, owner: str | None, now_ns: int) -> float | None:
        """Count one request; if there is no room for it, return the seconds to wait instead."""
        requests, tokens = self._account(owner, now_ns)
        wait_s = max(requests.seconds_until_one(now_ns), tokens.seconds_until_one(now_ns))
        if wait_s > 0.0:
            return wait_s
        requests.take(1, now_ns)
        return None

    def spend(self, owner: str | None, num_tokens: int, now_ns: int) -> bool:
        """Count generated tokens; True if the owner's requests must be cancelled for them."""
        if self._limits.tokens_per_minute is None:
            return False  # the common case, checked for every token
        _, tokens = self._account(owner, now_ns)
        tokens.take(num_tokens, now_ns)
        return self._limits.kills and tokens.level(now_ns) < 0.0

    def _account(self, owner: str | None, now_ns: int) -> tuple[Bucket, Bucket]:
        account = self._accounts.pop(owner, None) or (
            Bucket(self._limits.requests_per_minute or _NO_LIMIT, now_ns),
            Bucket(self._limits.tokens_per_minute or _NO_LIMIT, now_ns),
        )
        if len(self._accounts) >= MAX_OWNERS:
            del self._accounts[next(iter(self._accounts))]
        self._accounts[owner] = account
        return account
