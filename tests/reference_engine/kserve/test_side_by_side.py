"""The engine's two manners, from its command line, as the table of docs/kserve.md has them."""

import pytest

from tests.reference_engine.kserve.side_by_side import CASES, OURS, serving


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("flag", "fates"),
    [("", ["dropped", "dropped"]), (" --triton-faithful", ["executed", "dropped"])],
)
def test_a_cancelled_request_of_a_queue(flag: str, fates: list[str]) -> None:
    with serving(OURS + flag) as side:
        names = ("queued, no batcher: cancel", "queued, queue policy: cancel")
        assert [CASES[name](side) for name in names] == fates
