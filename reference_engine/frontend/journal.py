"""The lifecycle log and the step log: bounded, numbered, honest about what fell out.

Frontend and worker stamp events with the same monotonic clock; the journal numbers them in the
order in which they become known here. A reader asks for what came after the last number it has,
and is told how many entries it can never have. The garbage collector does not track the entries: it
would stop everything to walk through a million of them.
"""

from typing import Final, Generic, NamedTuple, TypeVar

import msgspec

LIFECYCLE_CAPACITY: Final = 1_000_000
STEPS_CAPACITY: Final = 200_000


class LifecycleEntry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One event, as `GET /walkaway/lifecycle` shows it."""

    seq: int
    t_ns: int
    event: str
    request_id: str
    client_request_id: str | None
    step: int
    num_generated: int
    num_blocks: int
    reason: str | None


EntryT = TypeVar("EntryT")


class Page(NamedTuple, Generic[EntryT]):
    """Entries after the asked number; `next_after` is what to ask with next."""

    entries: list[EntryT]
    first: int
    next_after: int
    dropped: int


class Ring(Generic[EntryT]):
    """The last `capacity` entries, numbered from 1. Entry n is the n-th that was appended.

    Entry n lies at index (n - 1) % capacity, so a page is found without walking.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: list[EntryT] = []
        self._last = 0

    @property
    def next_number(self) -> int:
        return self._last + 1

    def append(self, entry: EntryT) -> None:
        if len(self._entries) < self._capacity:
            self._entries.append(entry)
        else:
            self._entries[self._last % self._capacity] = entry
        self._last += 1

    def after(self, number: int, limit: int) -> Page[EntryT]:
        """At most `limit` entries from number + 1 on, or from the first that is still here."""
        first = self._last - len(self._entries) + 1
        start = max(number + 1, first)
        end = min(start + limit, self._last + 1)
        entries = [self._entries[(n - 1) % self._capacity] for n in range(start, end)]
        return Page(entries, first, start + len(entries) - 1, max(0, start - number - 1))
