import threading

from reference_engine.cancellation import (
    Cancellation,
    CancellationToken,
    CancelReason,
    DetectionMethod,
)


def test_exactly_one_of_many_threads_is_the_first_and_its_reason_stays() -> None:
    for _ in range(50):
        token, start = CancellationToken(), threading.Barrier(8)
        assert token.cancellation is None
        winners: list[Cancellation] = []

        def race(
            t_ns: int,
            token: CancellationToken = token,
            start: threading.Barrier = start,
            winners: list[Cancellation] = winners,
        ) -> None:
            reason = list(CancelReason)[t_ns % len(CancelReason)]
            mine = Cancellation(reason, DetectionMethod.NONE, t_ns)
            start.wait()
            if token.cancel(mine):
                winners.append(mine)

        threads = [threading.Thread(target=race, args=(t_ns,)) for t_ns in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert winners == [token.cancellation]
