"""How much each client may ask for: two token buckets an owner, of requests and of tokens.

A bucket holds a minute's worth and fills evenly. A request needs one of each to be let in. Tokens
are taken as they are generated, when it is too late to refuse them: that bucket may go below zero,
and takes the longer to recover.
"""

from typing import Final

from reference_engine.frontend.settings import RateLimits

MAX_OWNERS: Final = 10_000
_MINUTE_NS: Final = 60_000_000_000
_NO_LIMIT: Final = 10**18


class Bucket:
    """`_level` is as of `_at_ns`, and never above `_capacity`."""

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
        """0 where there is one already."""
        missing = max(0.0, 1.0 - self.level(now_ns))
        return missing / self._capacity * _MINUTE_NS / 1e9


class _Account:
    """What one owner may still use."""

    def __init__(self, limits: RateLimits, now_ns: int) -> None:
        self.requests = Bucket(limits.requests_per_minute or _NO_LIMIT, now_ns)
        self.tokens = Bucket(limits.tokens_per_minute or _NO_LIMIT, now_ns)


class RateLimiter:
    """Pure: time is an argument, a monotonic stamp. An owner is an API key, or None without keys.

    `_accounts` holds at most MAX_OWNERS, those longest unheard of first: they are forgotten first.
    """

    def __init__(self, limits: RateLimits) -> None:
        self._limits = limits
        self._accounts: dict[str | None, _Account] = {}

    def __len__(self) -> int:
        return len(self._accounts)

    def admit(self, owner: str | None, now_ns: int) -> float | None:
        """Count one request; or count nothing, and say in how many seconds to try again."""
        account = self._account(owner, now_ns)
        wait_s = max(
            account.requests.seconds_until_one(now_ns), account.tokens.seconds_until_one(now_ns)
        )
        if wait_s > 0.0:
            return wait_s
        account.requests.take(1, now_ns)
        return None

    def spend(self, owner: str | None, tokens: int, now_ns: int) -> bool:
        """Count generated tokens; whether the owner's requests are to be cancelled for them."""
        if self._limits.tokens_per_minute is None:
            return False  # asked for every token, and mostly like this
        account = self._account(owner, now_ns)
        account.tokens.take(tokens, now_ns)
        return self._limits.kills and account.tokens.level(now_ns) < 0.0

    def _account(self, owner: str | None, now_ns: int) -> _Account:
        account = self._accounts.pop(owner, None) or _Account(self._limits, now_ns)
        if len(self._accounts) >= MAX_OWNERS:
            del self._accounts[next(iter(self._accounts))]
        self._accounts[owner] = account
        return account
