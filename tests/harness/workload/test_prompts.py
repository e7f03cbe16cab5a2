"""Prompts have the size that was asked for and nothing in common."""

from hypothesis import given
from hypothesis import strategies as st

from harness.workload.prompts import paged_prompt, prompt


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


def test_a_shared_prefix_is_the_same_for_all_and_no_more_is() -> None:
    texts = [prompt(seed=3, user=u, n=0, num_bytes=96, shared_bytes=40) for u in range(50)]
    assert {len(text) for text in texts} == {96}
    assert len({text[:40] for text in texts}) == 1
    assert len({text[:56] for text in texts}) == 50
    other = prompt(seed=4, user=0, n=0, num_bytes=96, shared_bytes=40)
    assert other[:40] != texts[0][:40]


def test_a_salt_makes_other_prompts_of_the_same_length_and_leaves_equal_what_is_to_be() -> None:
    def text(salt: str, user: int) -> str:
        return prompt(seed=3, user=user, n=0, num_bytes=160, shared_bytes=80, salt=salt)

    first, again, other = text("1-on/", 0), text("1-on/", 0), text("1-off/", 0)
    assert first == again
    assert len(first) == len(other) == 160
    assert first[:16] != other[:16]
    assert first[80:96] != other[80:96]
    assert text("1-on/", 5)[:80] == first[:80]


def test_a_prompt_may_be_all_prefix() -> None:
    texts = {prompt(seed=3, user=u, n=0, num_bytes=40, shared_bytes=40) for u in range(9)}
    assert [len(text) for text in texts] == [40]


def paged(*pages: int, size: int, page_bytes: float = 64, seed: int = 3, salt: str = "") -> str:
    return paged_prompt(pages, seed=seed, page_bytes=page_bytes, num_bytes=size, salt=salt)


def test_prompts_share_the_pages_that_they_have_in_common_and_no_more() -> None:
    first, second = paged(1, 2, 3, size=180), paged(1, 2, 9, size=190)
    assert (len(first), len(second)) == (180, 190)
    assert first[:128] == second[:128]
    assert first[128:144] != second[128:144]
    assert paged(1, 2, 3, size=180, seed=4)[:16] != first[:16]
    assert paged(1, 2, 3, size=180, salt="x")[:16] != first[:16]


@given(
    pages=st.lists(st.integers(0, 9), min_size=1, max_size=9),
    size=st.integers(1, 500),
    page_bytes=st.floats(0.5, 100),
)
def test_a_paged_prompt_is_as_long_as_it_should_be(
    pages: list[int], size: int, page_bytes: float
) -> None:
    text = paged(*pages, size=size, page_bytes=page_bytes)
    assert len(text.encode()) == size
    shorter = paged(*pages, size=max(1, size // 2), page_bytes=page_bytes)
    assert text.startswith(shorter)  # cut at its end
