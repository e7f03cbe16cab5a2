"""When the streams of a storm leave: pure, so every moment is worked out by hand."""

from harness.workload.abandon import Storm

MS = 1_000_000
STEP_NS = 20 * MS


def pause_ms(storm: Storm, stream: int, tokens: int, *, now_ms: int) -> float | None:
    pause = storm.pause_ns(stream, tokens, now_ns=now_ms * MS, step_ns=STEP_NS)
    return None if pause is None else pause / MS


def test_nobody_leaves_before_the_last_has_read_enough() -> None:
    storm = Storm(streams=3, tokens=2)
    assert pause_ms(storm, 0, 5, now_ms=100) is None
    assert pause_ms(storm, 1, 2, now_ms=101) is None
    assert pause_ms(storm, 2, 1, now_ms=102) is None
    assert pause_ms(storm, 0, 6, now_ms=103) is None


def test_all_leave_at_one_moment_however_late_they_hear_of_it() -> None:
    storm = Storm(streams=2, tokens=2)
    assert pause_ms(storm, 0, 2, now_ms=100) is None
    assert pause_ms(storm, 1, 2, now_ms=110) == 60  # three steps ahead
    assert pause_ms(storm, 0, 3, now_ms=120) == 50
    assert pause_ms(storm, 0, 4, now_ms=171) == 0


def test_a_stream_counts_once() -> None:
    storm = Storm(streams=2, tokens=1)
    assert pause_ms(storm, 0, 1, now_ms=1) is None
    assert pause_ms(storm, 0, 2, now_ms=2) is None
    assert pause_ms(storm, 1, 1, now_ms=3) == 60
