"""The reference engine's logs and its clock, read over HTTP."""

import httpx
import msgspec
import pytest

from harness.collect.lifecycle import LogFollower, NewSteps, SharedLog, check_clock
from harness.collect.source import Notes, SourceError
from harness.records import LifecycleEvent, StepRow
from harness.store.manifest import boot_id
from tests.made_up.rows import lifecycle_event, step_row

URL = "http://engine/walkaway/lifecycle"


class Log:
    """A log of events 1 to `last`, paged like the engine's, and its follower."""

    def __init__(self, last: int, *, dropped: int = 0, most_rows: int = 10_000) -> None:
        self.last, self._dropped, self._most_rows = last, dropped, most_rows
        self.is_down, self.lives = False, 1
        self.notes, self.kept = Notes(), list[int]()
        client = httpx.Client(transport=httpx.MockTransport(self._answer))
        self.follower = LogFollower(client, URL, LifecycleEvent, self.notes, keep=self._keep)

    def _keep(self, rows: list[LifecycleEvent]) -> None:
        self.kept += [row.seq for row in rows]

    def _answer(self, request: httpx.Request) -> httpx.Response:
        if self.is_down:
            raise httpx.ConnectError("refused")
        after, limit = int(request.url.params["after"]), int(request.url.params["limit"])
        seqs = range(after + 1, min(after + min(limit, self._most_rows), self.last) + 1)
        headers = {
            "x-walkaway-next-after": str(seqs[-1] if seqs else after),
            "x-walkaway-dropped": str(self._dropped if after == 0 else 0),
            "x-walkaway-last": str(self.last),
        }
        rows = [lifecycle_event(seq, seq + self.lives, "arrived", f"s{seq}") for seq in seqs]
        content = msgspec.json.Encoder().encode_lines(rows)
        return httpx.Response(200, headers=headers, content=content)


@pytest.mark.parametrize(("last", "most_rows"), [(10_001, 10_000), (100, 7)])
def test_each_row_is_read_once_over_pages_of_any_size(last: int, most_rows: int) -> None:
    log = Log(last, most_rows=most_rows)
    log.follower.catch_up()
    log.follower.catch_up()
    assert log.kept == list(range(1, last + 1))

    log = Log(last, dropped=3, most_rows=most_rows)
    log.follower.skip_history()
    log.last += 2
    log.follower.catch_up()
    assert log.kept == [last + 1, last + 2], "rows of earlier clients are skipped"
    assert not log.notes.warnings(), "those dropped are of earlier clients too"


def test_dropped_rows_are_noted() -> None:
    log = Log(2, dropped=7)
    log.follower.catch_up()
    assert log.notes.warnings() == [f"{URL}: 7 rows fell out of the engine's log unread"]


@pytest.mark.parametrize(
    ("last", "is_missed", "lives", "kept"),
    [
        (2, False, 2, [1, 2, 3, 1, 2]),
        (5, True, 2, [1, 2, 3, 1, 2, 3, 4, 5]),
        (4, True, 1, [1, 2, 3, 4]),  # it was only out of reach
    ],
)
def test_a_log_that_begins_anew_is_read_from_its_beginning(
    last: int, is_missed: bool, lives: int, kept: list[int]
) -> None:
    """A process killed and started again shows by its shorter log, or by another first row."""
    log = Log(3)
    log.follower.catch_up()
    if is_missed:
        log.is_down = True
        with pytest.raises(SourceError):
            log.follower.catch_up()
    log.is_down, log.lives, log.last = False, lives, last
    log.follower.catch_up()
    assert log.kept == kept


def test_steps_that_several_frontends_show_are_kept_once() -> None:
    rows = [step_row(n, n * 10, n * 10 + 9, {}, worker=f"worker-{n % 2}") for n in range(1, 7)]
    shown = {"a": rows[:3], "b": rows[:4]}

    def answer(request: httpx.Request) -> httpx.Response:
        some = shown[request.url.host]
        if not some:
            raise httpx.ConnectError("refused")
        new = some[int(request.url.params["after"]) :][: int(request.url.params["limit"])]
        content = msgspec.json.Encoder().encode_lines(new)
        return httpx.Response(
            200, headers={"x-walkaway-next-after": str(len(some))}, content=content
        )

    kept: list[StepRow] = []
    keep = NewSteps(kept.extend)
    client = httpx.Client(transport=httpx.MockTransport(answer))
    log = SharedLog(
        [LogFollower(client, f"http://{one}/steps", StepRow, Notes(), keep=keep) for one in "ab"]
    )
    log.catch_up()
    assert kept == rows[:3]
    shown["a"], shown["b"] = [], rows[:5]  # the first frontend is killed
    log.catch_up()
    assert kept == rows[:5]
    shown["a"] = rows[3:]  # and began anew
    log.catch_up()
    assert kept == rows


def answering(*answers: httpx.Response) -> httpx.Client:
    left = iter(answers)
    return httpx.Client(transport=httpx.MockTransport(lambda _: next(left)))


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(404),
        httpx.Response(200, headers={"x-walkaway-next-after": "1"}, text="not json\n"),
        httpx.Response(200, text=""),
    ],
)
def test_an_unreadable_log_is_named(answer: httpx.Response) -> None:
    kept: list[object] = []
    follower = LogFollower(answering(answer), URL, LifecycleEvent, Notes(), keep=kept.append)
    with pytest.raises(SourceError, match=f"{URL} could not be read"):
        follower.catch_up()
    assert not kept


@pytest.mark.parametrize(
    ("server_ns", "boot", "comparable"),
    [
        (15, boot_id(), True),
        (10, boot_id(), True),
        (9, boot_id(), False),
        (21, boot_id(), False),
        (15, "another host's", False),
    ],
)
def test_clocks_compare_if_each_reading_fits_and_the_boot_is_ours(
    server_ns: int, boot: str, comparable: bool
) -> None:
    good = httpx.Response(200, json={"now_ns": 5, "boot_id": boot_id()})
    odd = httpx.Response(200, json={"now_ns": server_ns, "boot_id": boot})
    stamps = iter([0, 40, 10, 20, 0, 40, 0, 40, 0, 40])
    answers = answering(good, odd, good, good, good)
    clock = check_clock(answers, URL, clock_ns=lambda: next(stamps))
    assert (clock.comparable, clock.round_trip_ns) == (comparable, 10)


def test_an_unreadable_clock_is_named() -> None:
    broken = answering(httpx.Response(200, json=[]))
    with pytest.raises(SourceError, match="could not be read"):
        check_clock(broken, URL, clock_ns=lambda: 5)
