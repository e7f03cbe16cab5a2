from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from reference_engine.cancellation import (
    Cancellation,
    CancellationToken,
    CancelReason,
    DetectionMethod,
)


def test_exactly_one_of_many_threads_is_the_first_and_its_reason_stays() -> None:
    start = Barrier(8)

    def race(token: CancellationToken, mine: Cancellation) -> bool:
        start.wait()
        return token.cancel(mine)

    reasons = list(CancelReason)
    with ThreadPoolExecutor(8) as threads:
        for _ in range(50):
            token = CancellationToken()
            racers = [
                Cancellation(reasons[t_ns % len(reasons)], DetectionMethod.NONE, t_ns)
                for t_ns in range(8)
            ]
            won = threads.map(race, [token] * 8, racers)
            winners = [mine for mine, is_first in zip(racers, won, strict=True) if is_first]
            assert winners == [token.cancellation]
