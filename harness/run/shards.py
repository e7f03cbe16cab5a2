"""The rows of a load, counted on their way from shards to parquet, part by part."""

from bisect import bisect
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from harness.client.shards import Row, ShardReader
from harness.errors import ConfigError, TargetError
from harness.formatting import error_kind, why_unanswered
from harness.records import WENT_WRONG, ClientSample, Outcome, ProcessMark, RequestRow
from harness.run.load_plan import count_arrivals
from harness.store.manifest import LoadProcessRecord, Manifest, MissedArrivals, ScheduledArrivals
from harness.store.run_folder import RunFolder
from harness.workload.load import AbandonLoad
from harness.workload.observed_latency import ObservedLatency
from harness.workload.plan import LoadPlan
from harness.workload.schedule import Arrival

if TYPE_CHECKING:
    from harness.store.parquet import Sent

_WAITED_IN_VAIN = (
    "were waiting for their first token when the load ended: the server is stuck, or the load was "
    "too short; with `run.first_token_timeout_s` such a request times out"
)
_CUT_OFF = (
    "were still being answered when the load ended: none was completed, and nobody left; take a "
    "longer `run.max_seconds`, or shorter answers"
)
MOST_KINDS = 100  # of errors that are counted
_LENGTHS = ("think_ns", "lag_ns")  # durations, not stamps


class LoadTally:
    """Reads the shards of a folder, each row once, and counts the rows.

    `host` limits it to one host's shards, which get the name `called`; `ahead_ns` is added to all
    stamps. `first_sent_ns` and `last_ended_ns` are None before the first request. `tokens_read`: by
    all requests together. `left_unanswered`: users who left before any token; `due_went_wrong`:
    requests that went wrong before their users could leave, or stay to the end.
    """

    def __init__(
        self, rows_dir: Path, *, host: str = "*", called: str | None = None, ahead_ns: int = 0
    ) -> None:
        self._called = called
        self._ahead_ns = ahead_ns
        self._requests = ShardReader(rows_dir, RequestRow, host=host)
        self._samples = ShardReader(rows_dir, ClientSample, host=host)
        self._marks = ShardReader(rows_dir, ProcessMark, host=host)
        self._last: dict[tuple[str, int], ClientSample] = {}
        self.outcomes: Counter[Outcome] = Counter()
        self.tokens_read = self.left_unanswered = self.due_went_wrong = 0
        self.errors: Counter[str] = Counter()
        self._examples: dict[str, str] = {}
        self.first_sent_ns: int | None = None
        self.last_ended_ns: int | None = None

    @property
    def damaged(self) -> int:
        return self._requests.damaged + self._samples.damaged + self._marks.damaged

    def requests(self) -> Iterator[RequestRow]:
        for part in self._requests.read_in_parts():
            if rows := self._moved(part):
                self._count(rows)
                yield from rows

    def samples(self) -> Iterator[ClientSample]:
        for part in self._samples.read_in_parts():
            for sample in self._moved(part):
                self._last[sample.host, sample.pid] = sample
                sample.host = self._called or sample.host
                yield sample

    def processes(self) -> list[LoadProcessRecord]:
        marks = self._moved(self._marks.read_new())
        ended = {(mark.host, mark.pid): mark.t_ns for mark in marks if mark.event == "ended"}
        began = (mark for mark in marks if mark.event == "began")
        return [self._process(mark, ended.get((mark.host, mark.pid))) for mark in began]

    def _moved(self, rows: list[Row]) -> list[Row]:
        return [_later(row, self._ahead_ns) for row in rows] if self._ahead_ns else rows

    def _count(self, rows: Sequence[RequestRow]) -> None:
        self.outcomes.update(row.outcome for row in rows)
        self.tokens_read += sum(row.tokens_read for row in rows)
        self.left_unanswered += sum(
            row.outcome is Outcome.ABANDONED and not row.tokens_read for row in rows
        )
        self.due_went_wrong += sum(
            row.outcome in WENT_WRONG and row.planned_abandon != 0 for row in rows
        )
        for text in (row.error for row in rows if row.error):
            self.note_error(text)
        first, last = min(row.sent_ns for row in rows), max(row.ended_ns for row in rows)
        self.first_sent_ns = min(first, first if self.first_sent_ns is None else self.first_sent_ns)
        self.last_ended_ns = max(last, self.last_ended_ns or last)

    def note_error(self, text: str) -> None:
        """Count the error under its kind."""
        kind = error_kind(text)
        if kind in self.errors or len(self.errors) < MOST_KINDS:
            self.errors[kind] += 1
            self._examples[kind] = min(text, self._examples.get(kind, text))

    def commonest_error(self) -> tuple[str, int] | None:
        """The first of the commonest kind, by its words, and how many there are."""
        found = ((n, kind) for kind, n in self.errors.items())
        n, kind = max(found, default=(0, ""))
        return (self._examples[kind], n) if n else None

    def _process(self, mark: ProcessMark, ended_ns: int | None) -> LoadProcessRecord:
        last = self._last.get((mark.host, mark.pid))
        return LoadProcessRecord(
            worker=mark.worker,
            host=self._called or mark.host,
            pid=mark.pid,
            clock=mark.clock,
            began_ns=mark.t_ns,
            ended_ns=ended_ns,
            last_seen_ns=mark.t_ns if last is None else last.t_ns,
            requests=self._requests.num_read(mark.host, mark.pid),
            open_streams=0 if last is None else last.streams,
        )


def _later(row: Row, by_ns: int) -> Row:
    changed: dict[str, int | list[int]] = {}
    for name in row.__struct_fields__:
        value = getattr(row, name)
        if not name.endswith("_ns") or name in _LENGTHS or value is None:
            continue
        is_list = isinstance(value, list)
        changed[name] = [each + by_ns for each in value] if is_list else value + by_ns
    return msgspec.structs.replace(row, **changed)


def find_hopeless(tally: LoadTally, processes: Sequence[LoadProcessRecord]) -> TargetError | None:
    outcomes = tally.outcomes
    if processes and all(process.ended_ns is None for process in processes):
        return TargetError("every load process died; see load.log in the run's folder")
    if not outcomes:
        return TargetError("the load made no request; see load.log in the run's folder")
    if outcomes[Outcome.COMPLETED] or outcomes[Outcome.ABANDONED] > tally.left_unanswered:
        return None
    if outcomes[Outcome.ABANDONED] and not tally.due_went_wrong:
        return None
    wrong, n = sum(outcomes[outcome] for outcome in WENT_WRONG), outcomes.total()
    if not wrong:
        return TargetError(f"all {n} requests {_CUT_OFF if tally.tokens_read else _WAITED_IN_VAIN}")
    text, count = tally.commonest_error() or (None, wrong)
    return TargetError(why_unanswered(outcomes, text, count))


class _AnyLatency(ObservedLatency):
    """Any latency, as only the choice to leave is drawn, not its time."""

    def ttft_ns(self) -> int:
        return 1


def note_missed_arrivals(manifest: Manifest, folder: RunFolder, plan: LoadPlan) -> str | None:
    """Note the unsent requests of an open loop, which have no rows. Returns a problem.

    `plan` is the last loop's.
    """
    assert plan.schedule is not None
    try:
        if manifest.arrivals is None:
            manifest.arrivals = ScheduledArrivals(
                planned=count_arrivals(plan), max_streams=plan.schedule.max_streams
            )
        sent = folder.read_sent()
        if len(sent) < manifest.arrivals.planned:
            manifest.arrivals.missed = find_missed_arrivals(plan, manifest, sent)
    except ConfigError as error:
        return f"unsent requests are in no figure: {error}"
    return None


def find_missed_arrivals(
    plan: LoadPlan, manifest: Manifest, sent: "Sequence[Sent]"
) -> MissedArrivals:
    found = MissedArrivals()
    ends_ns = [reading.t_ns for reading in manifest.idle.loops]
    for number in range(plan.run.seed - manifest.seed + 1):
        of_loop = [one for one in sent if bisect(ends_ns, one.intended_start_ns) == number]
        loop = plan.with_seed(manifest.seed + number)
        for waited_s, arrival in _still_waiting(loop, of_loop):
            waits = found.to_stay_s if _is_to_stay(loop, arrival) else found.to_leave_s
            waits.append(waited_s)
    return found


def _still_waiting(plan: LoadPlan, sent: "Sequence[Sent]") -> Iterator[tuple[float, Arrival]]:
    """Unsent arrivals due before the last request ended, each with its wait in seconds."""
    if plan.schedule is None or not sent:
        return
    intended_ns = {one.user: one.intended_start_ns for one in sent}
    missing: list[Arrival] = []
    begins_ns = []
    for arrival in plan.planned_arrivals():
        if arrival.number in intended_ns:
            begins_ns.append(intended_ns[arrival.number] - int(arrival.offset_s * 1e9))
        else:
            missing.append(arrival)
    load_s = (max(one.ended_ns for one in sent) - min(begins_ns)) / 1e9
    for arrival in missing:
        if arrival.offset_s <= load_s:
            yield load_s - arrival.offset_s, arrival


def _is_to_stay(plan: LoadPlan, arrival: Arrival) -> bool:
    assert isinstance(plan.load, AbandonLoad)
    drawn = arrival.draw_request(plan.load, seed=plan.run.seed, seen=_AnyLatency())
    return drawn.planned_abandon is None
