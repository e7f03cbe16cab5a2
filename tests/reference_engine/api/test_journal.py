"""The logs: numbered, bounded in bytes, and with a count of dropped entries."""

import gc
import tracemalloc

import msgspec

from reference_engine.api.journal import PAGE_BYTES, JournalPage, Log
from reference_engine.protocol import StepRecord
from reference_engine.serve.server import ndjson


class Number(msgspec.Struct):
    n: int


def filled(last: int, capacity_bytes: int = 10**6) -> Log:
    log = Log(capacity_bytes)
    for n in range(1, last + 1):
        assert log.next_number == n
        log.append(Number(n))
    return log


def numbers(page: JournalPage) -> list[int]:
    return [msgspec.json.decode(line, type=Number).n for line in page.lines]


def test_pages_go_on_where_the_last_one_ended() -> None:
    log = filled(5)
    page = log.after(0, limit=3)
    assert (numbers(page), page.next_after, page.last, page.dropped) == ([1, 2, 3], 3, 5, 0)
    page = log.after(page.next_after, limit=3)
    assert (numbers(page), page.next_after) == ([4, 5], 5)
    for after in (5, 9):
        page = log.after(after, limit=3)
        assert (page.lines, page.next_after, page.dropped) == ([], after, 0)


def test_a_page_counts_the_entries_that_are_gone() -> None:
    for last in range(1, 60):
        page = filled(last, capacity_bytes=500).after(0, limit=100)
        assert numbers(page) == list(range(page.first, last + 1))
        assert (page.last, page.next_after, page.dropped) == (last, last, page.first - 1)
        assert len(page.lines) == min(last, 7), "as many as fit"
    log = filled(59, capacity_bytes=500)
    assert [log.after(number, limit=1).dropped for number in (51, 52)] == [1, 0]


def step_record(num_running: int) -> StepRecord:
    names = [f"req-{number}" for number in range(100_000, 100_000 + num_running)]
    tokens = dict.fromkeys(names, 1)
    return StepRecord(
        step=1,
        started_ns=10**15,
        ended_ns=10**15,
        num_running=num_running,
        num_waiting=0,
        free_blocks=0,
        scheduled=tokens,
        sampled=tokens,
    )


def test_a_log_of_large_steps_is_bounded_like_one_of_small_ones() -> None:
    capacity_bytes = 4_000_000
    for num_running in (0, 256):
        gc.collect()
        tracemalloc.start()
        try:
            log, record = Log(capacity_bytes), step_record(num_running)
            while log.after(0, limit=1).dropped < 1000:
                log.append(record)
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert 0.8 * capacity_bytes < held < 1.05 * capacity_bytes


def test_a_page_is_bounded_in_bytes_but_has_one_entry_at_least() -> None:
    log = Log()
    for size in (*[256] * 1000, 50_000):
        log.append(step_record(size))
    after, pages = 0, []
    while after < log.next_number - 1:
        page = log.after(after, limit=10_000)
        assert page.last == 1001
        pages.append(page.lines)
        after = page.next_after
    *full, (largest,) = pages
    assert max(len(b"".join(lines)) for lines in full) <= PAGE_BYTES < len(largest)
    assert len(full) > 5


def test_an_answer_says_where_to_go_on_and_what_is_lost() -> None:
    answer = ndjson(
        JournalPage([b'{"n":4}\n', b'{"n":5}\n'], first=4, last=9, next_after=5, dropped=3)
    )
    names = ("first", "last", "next-after", "dropped")
    assert [answer.headers[f"x-walkaway-{name}"] for name in names] == ["4", "9", "5", "3"]
    assert bytes(answer.body) == b'{"n":4}\n{"n":5}\n'
