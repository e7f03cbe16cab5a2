import pytest

from reference_engine.core.block_pool import BlockPool


def test_takes_and_gives_back() -> None:
    pool = BlockPool(4)
    blocks = pool.try_take(3)
    assert blocks is not None
    assert pool.num_free == 1
    pool.check_integrity([blocks])
    pool.give_back(blocks)
    assert pool.num_free == 4
    pool.check_integrity([])


def test_takes_nothing_when_there_is_not_enough() -> None:
    pool = BlockPool(2)
    assert pool.try_take(3) is None
    assert pool.num_free == 2
    pool.check_integrity([])


def test_refuses_a_block_that_is_not_held() -> None:
    pool = BlockPool(2)
    blocks = pool.try_take(1)
    assert blocks is not None
    pool.give_back(blocks)
    with pytest.raises(KeyError):
        pool.give_back(blocks)


def test_integrity_check_can_fail() -> None:
    pool = BlockPool(3)
    pool.try_take(1)
    with pytest.raises(AssertionError, match="references differ"):
        pool.check_integrity([])
