"""The log: what the upstream saw of each request, in memory and as lines of JSON.

All times are nanoseconds of CLOCK_MONOTONIC on this machine: the clock of walkaway's own rows, and
of Python's `time.perf_counter_ns`. An event of a request has the name of a time of its record,
without `_ns`:

    arrived      its last byte was read
    slot         it got a slot
    headers      the head of its answer was handed to the kernel
    first_token  its first token was made, and handed over if it is a stream
    silent       its order holds back the token that is due, and all that follow
    stalled      the kernel did not take all of its answer, since the client does not read
    fin, rst     the other side closed its sending direction, or reset the connection
    stopped      no more tokens are made for it, and why
    usage        its usage was handed over
    ended        the last byte of its answer was handed over, without a break
    over         nothing more happens to it; the line holds the whole record

A `fin` or `rst` after `over` is the end of a connection that was kept. The time of each token is in
the record, and in no line of its own.
"""

from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import IO, Any, Final

import msgspec

TIMES_KEPT: Final = 1024  # in a record: the times of its first tokens
KEPT: Final = 10_000  # records
PAGE: Final = 1000  # records in an answer


class Record(msgspec.Struct, kw_only=True, gc=False):
    """A request. `id`: of its order, else its X-Request-Id. `asked_before`: how many records with
    this id there were when it came. `connection`: its number; `nth`: which request on it this is.

    `why` it stopped: `length` or `stop` (all tokens were made), `left` (the client), `told` (its
    order asked for a break or an error), `refused` (`error` says why), `unread` (too much waits for
    a client that does not read), `lost` (the connection broke HTTP), `shutdown`. `tokens`: how many
    were made for it. `tokens_at_close`: how many were made when the first of `fin` and `rst` came;
    `unsent_bytes`: at most this number of its answer's bytes had not been taken by the kernel then.
    """

    number: int
    id: str | None
    asked_before: int
    connection: int
    nth: int
    route: str
    dialect: str | None
    is_stream: bool
    model: str
    act: str
    prompt_tokens: int
    max_tokens: int
    arrived_ns: int
    changed_ns: int
    status: int | None = None
    slot_ns: int | None = None
    headers_ns: int | None = None
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    tokens: int = 0
    token_times_ns: "array[int]" = msgspec.field(default_factory=lambda: array("q"))
    silent_ns: int | None = None
    stalled_ns: int | None = None
    fin_ns: int | None = None
    rst_ns: int | None = None
    tokens_at_close: int | None = None
    unsent_bytes: int | None = None
    stopped_ns: int | None = None
    why: str | None = None
    error: str | None = None
    usage_ns: int | None = None
    ended_ns: int | None = None
    over_ns: int | None = None

    def token(self, t_ns: int) -> None:
        self.tokens += 1
        self.last_token_ns = self.changed_ns = t_ns
        if self.tokens <= TIMES_KEPT:
            self.token_times_ns.append(t_ns)

    @property
    def closed_ns(self) -> int | None:
        times = [one for one in (self.fin_ns, self.rst_ns) if one is not None]
        return min(times, default=None)

    @property
    def closed(self) -> str | None:
        """How the other side closed the connection first."""
        if self.closed_ns is None:
            return None
        return "fin" if self.closed_ns == self.fin_ns else "rst"

    def shown(self) -> dict[str, Any]:
        """The record with what follows from its fields. `has_left`: the client closed the
        connection before the answer's last byte was handed over."""
        at, ended = self.closed_ns, self.ended_ns
        derived = {
            "token_times_ns": self.token_times_ns.tolist(),
            "closed": self.closed,
            "closed_ns": at,
            "tokens_after_close": None if at is None else self.tokens - (self.tokens_at_close or 0),
            "has_left": at is not None and (ended is None or at < ended),
        }
        return msgspec.structs.asdict(self) | derived


class Truth:
    """The newest `kept` records. `file` gets a line for each event; `clock_ns` is the clock.

    Python's garbage collector does not look through a record (`gc=False`): of ten thousand that
    would hold up the event loop, and with it what is seen of other clients, for milliseconds.
    """

    def __init__(
        self, clock_ns: Callable[[], int], *, kept: int = KEPT, file: IO[bytes] | None = None
    ) -> None:
        self.clock_ns = clock_ns
        self.num_asked = 0
        self.stops = Counter[str]()  # requests, by why they stopped
        self.failure: OSError | None = None  # of the file
        self.on_failure: Callable[[], None] = lambda: None
        self._kept, self._file = kept, file
        self._records = deque[Record]()
        self._by_id: dict[str, tuple[Record, ...]] = {}

    def arrived(self, **facts: Any) -> Record:
        """A record of what is known of a request when it has come."""
        self.num_asked += 1
        now_ns, name = self.clock_ns(), facts["id"]
        record = Record(
            number=self.num_asked,
            asked_before=len(self._by_id.get(name, ())),
            arrived_ns=now_ns,
            changed_ns=now_ns,
            **facts,
        )
        if len(self._records) == self._kept:
            self._forget(self._records.popleft())
        self._records.append(record)
        if name is not None:
            self._by_id[name] = (*self._by_id.get(name, ()), record)
        shown = ("nth", "asked_before", "route", "dialect", "is_stream", "model", "act")
        self._say(record, "arrived", now_ns, {key: getattr(record, key) for key in shown})
        return record

    def note(self, record: Record, event: str, **facts: Any) -> None:
        """`facts`: fields of the record that are known with this event."""
        now_ns = self.clock_ns()
        record.changed_ns = now_ns
        setattr(record, f"{event}_ns", now_ns)
        for name, value in facts.items():
            setattr(record, name, value)
        if event == "stopped":
            self.stops[facts["why"]] += 1
        self._say(record, event, now_ns, record.shown() if event == "over" else facts)

    def find(self, name: str | None = None, since_ns: int = 0, limit: int = PAGE) -> list[Record]:
        """The records with this id (None: all) that have changed since then, the earliest change
        first; at most `limit`."""
        among: Iterable[Record] = self._records if name is None else self._by_id.get(name, ())
        found = [record for record in among if record.changed_ns >= since_ns]
        return sorted(found, key=lambda record: record.changed_ns)[:limit]

    @property
    def num_forgotten(self) -> int:
        return self.num_asked - len(self._records)

    def say(self, event: str, **facts: Any) -> None:
        """An event of the server's own."""
        self._write({"event": event, "t_ns": self.clock_ns(), **facts})

    def _say(self, record: Record, event: str, t_ns: int, facts: dict[str, Any]) -> None:
        of = {"request": record.number, "id": record.id, "connection": record.connection}
        self._write({"event": event, "t_ns": t_ns, **of, **facts})

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is None or self.failure is not None:
            return
        try:
            self._file.write(msgspec.json.encode(line) + b"\n")
        except OSError as error:
            self.failure = error
            self.on_failure()

    def _forget(self, record: Record) -> None:
        if record.id is None:
            return
        _, *others = self._by_id.pop(record.id)
        if others:
            self._by_id[record.id] = tuple(others)
