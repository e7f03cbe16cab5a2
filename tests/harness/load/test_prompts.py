"""Prompts have the size that was asked for and nothing in common."""

from hypothesis import given
from hypothesis import strategies as st

from harness.load.prompts import prompt


@given(size=st.integers(1, 3000), seed=st.integers(), user=st.integers(0, 9), n=st.integers(0, 9))
def test_size_and_repeatability(size: int, seed: int, user: int, n: int) -> None:
    text = prompt(seed=seed, user=user, n=n, num_bytes=size)
    assert len(text.encode()) == size
    assert text.isascii()
    assert text == prompt(seed=seed, user=user, n=n, num_bytes=size)


def test_no_two_prompts_share_their_first_block() -> None:
    starts = {
        prompt(seed=s, user=u, n=n, num_bytes=64)[:16]
        for s in range(5)
        for u in range(20)
        for n in range(50)
    }
    assert len(starts) == 5000
