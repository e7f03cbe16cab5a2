"""Prompts have the size that was asked for and share only what they should."""

from hypothesis import given
from hypothesis import strategies as st

from harness.workload.prompts import paged_prompt, prompt


def text(user: int, *, n: int = 0, seed: int = 3, salt: str = "", shared: int = 40) -> str:
    return prompt(seed=seed, user=user, n=n, num_bytes=96, shared_bytes=shared, salt=salt)


def paged(*pages: int, size: int, page_bytes: float = 64, seed: int = 3, salt: str = "") -> str:
    return paged_prompt(pages, seed=seed, page_bytes=page_bytes, num_bytes=size, salt=salt)


@given(size=st.integers(1, 3000), seed=st.integers(), user=st.integers(0, 9), n=st.integers(0, 9))
def test_a_prompt_has_its_size_in_ascii_and_is_repeatable(
    size: int, seed: int, user: int, n: int
) -> None:
    found = prompt(seed=seed, user=user, n=n, num_bytes=size)
    assert found.isascii()
    assert len(found) == size
    assert found == prompt(seed=seed, user=user, n=n, num_bytes=size)


def test_no_two_prompts_share_their_first_block() -> None:
    starts = {
        text(user, n=n, seed=seed, shared=0)[:16]
        for seed in range(5)
        for user in range(20)
        for n in range(50)
    }
    assert len(starts) == 5000


def test_a_shared_prefix_is_common_to_all_and_no_more_is() -> None:
    texts = [text(user) for user in range(50)]
    assert {len(one) for one in texts} == {96}
    assert len({one[:40] for one in texts}) == 1
    assert len({one[:56] for one in texts}) == 50
    assert len({text(user, shared=96) for user in range(9)}) == 1  # all prefix


def test_seed_and_salt_change_prefix_and_rest() -> None:
    first = text(0)
    for other in (text(0, seed=4), text(0, salt="1-off/")):
        assert len(other) == 96
        assert other[:16] != first[:16]
        assert other[40:56] != first[40:56]
    assert text(5, salt="1-off/")[:40] == text(0, salt="1-off/")[:40]


def test_prompts_share_their_common_pages_and_no_more() -> None:
    first, second = paged(1, 2, 3, size=180), paged(1, 2, 9, size=190)
    assert first[:128] == second[:128]
    assert first[128:144] != second[128:144]
    assert paged(1, 2, 3, size=180, seed=4)[:16] != first[:16]
    assert paged(1, 2, 3, size=180, salt="x")[:16] != first[:16]


@given(
    pages=st.lists(st.integers(0, 9), min_size=1, max_size=9),
    size=st.integers(1, 500),
    page_bytes=st.floats(0.5, 100),
)
def test_a_paged_prompt_has_its_size_and_is_cut_at_its_end(
    pages: list[int], size: int, page_bytes: float
) -> None:
    found = paged(*pages, size=size, page_bytes=page_bytes)
    assert found.isascii()
    assert len(found) == size
    assert found.startswith(paged(*pages, size=max(1, size // 2), page_bytes=page_bytes))
