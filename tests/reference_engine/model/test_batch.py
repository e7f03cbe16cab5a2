"""The inputs of plain steps: the same as of any other step, and rows that do nothing."""

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="needs the extra `engine` (torch)")

from reference_engine.core.request import Request, Sampling  # noqa: E402
from reference_engine.core.step import StepPlan  # noqa: E402
from reference_engine.model.batch import (  # noqa: E402
    DecodeRows,
    build_batch,
    is_plain,
    spans_of,
)

BLOCK_SIZE, SPARE = 4, 99


def decoding(number: int, num_tokens: int, *, owed: int = 1) -> Request:
    """A request whose blocks are 10, 11, ... times its number."""
    tokens = [300 + number + i for i in range(num_tokens)]
    request = Request(f"r{number}", tokens, Sampling(max_tokens=9, ignore_eos=number % 2 == 1))
    request.num_computed_tokens = num_tokens - owed
    request.block_table = [10 * number + i for i in range(-(-num_tokens // BLOCK_SIZE))]
    return request


def rows() -> DecodeRows:
    return DecodeRows(4, 8, BLOCK_SIZE, SPARE)


def plain_plan(*requests: Request) -> StepPlan:
    return StepPlan(step=1, scheduled=dict.fromkeys(requests, 1))


@pytest.mark.parametrize("lengths", [[1], [4], [5], [3, 8, 9, 1], [32, 1]])
def test_a_plain_step_has_the_inputs_of_any_step(lengths: list[int]) -> None:
    requests = [decoding(i + 1, length) for i, length in enumerate(lengths)]
    plan = plain_plan(*requests)
    assert is_plain(spans_of(plan))
    plain = rows()
    plain.batch(spans_of(plain_plan(decoding(7, 30), decoding(8, 2))))  # of another size
    batch = plain.batch(spans_of(plan))
    expected = build_batch(spans_of(plan), BLOCK_SIZE, torch.device("cpu"))
    for name in ("token_ids", "positions", "slots", "sampling_requests"):
        mine, theirs = getattr(batch, name), getattr(expected, name)
        assert torch.equal(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs
    assert batch.last_rows is None
    assert expected.last_rows is not None
    assert expected.last_rows.tolist() == list(range(len(requests)))
    (group,), (one,) = batch.groups, expected.groups
    assert (group.rows, group.num_requests) == (one.rows, one.num_requests)
    assert torch.equal(group.blocks, one.blocks)
    assert torch.equal(group.mask, one.mask)


def test_rows_beyond_the_requests_touch_the_spare_block_alone() -> None:
    plain = rows()
    before = plain_plan(*(decoding(i, 20) for i in range(4)))  # it fills all rows
    plain.fill(spans_of(before), 4)
    plain.fill(spans_of(plain_plan(decoding(1, 6), decoding(2, 9))), 4)
    assert plain.head.tolist() == [
        [300 + 1 + 5, 300 + 2 + 8, 0, 0],
        [5, 8, 0, 0],
        [11 * BLOCK_SIZE + 1, 22 * BLOCK_SIZE, SPARE * BLOCK_SIZE, SPARE * BLOCK_SIZE],
        [1, 0, 0, 0],
    ]
    assert plain.tables.tolist() == [[10, 11, 0], [20, 21, 22], [SPARE] * 3, [SPARE] * 3]


def test_a_step_with_any_other_work_is_not_plain() -> None:
    behind = decoding(1, 9, owed=3)
    assert not is_plain(spans_of(StepPlan(step=1, scheduled={decoding(2, 5): 1, behind: 3})))
    assert not is_plain(spans_of(StepPlan(step=1, scheduled={behind: 1}, partial=[behind])))
