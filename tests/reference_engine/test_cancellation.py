import threading

from reference_engine.cancellation import (
    Cancellation,
    CancellationToken,
    CancelReason,
    DetectionMethod,
)


def made_at(t_ns: int) -> Cancellation:
    reason = list(CancelReason)[t_ns % len(CancelReason)]
    return Cancellation(reason, DetectionMethod.NONE, t_ns)


def test_the_first_reason_wins_and_its_time_is_kept() -> None:
    token = CancellationToken()
    assert token.cancellation is None
    first = Cancellation(CancelReason.API, DetectionMethod.NONE, 5)
    assert token.cancel(first)
    assert not token.cancel(Cancellation(CancelReason.CLIENT_TIMEOUT, DetectionMethod.NONE, 3))
    assert token.cancellation == first


def test_exactly_one_of_many_threads_is_the_first() -> None:
    for _ in range(50):
        token = CancellationToken()
        start = threading.Barrier(8)
        winners: list[int] = []

        def race(
            t_ns: int,
            token: CancellationToken = token,
            start: threading.Barrier = start,
            winners: list[int] = winners,
        ) -> None:
            start.wait()
            if token.cancel(made_at(t_ns)):
                winners.append(t_ns)

        threads = [threading.Thread(target=race, args=(t_ns,)) for t_ns in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(winners) == 1
        assert token.cancellation == made_at(winners[0])
