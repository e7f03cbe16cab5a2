"""What the turn after a stopped answer should find, reckoned by hand."""

from tools.side_by_side.next_turns import Case, cases


def test_the_last_token_fills_a_block_only_if_a_step_computes_it() -> None:
    assert Case(40, 23, is_whole=False).by_hand(32) == 32
    assert Case(40, 24, is_whole=False).by_hand(32) == 64
    assert Case(40, 24, is_whole=True).by_hand(32) == 32
    assert Case(40, 25, is_whole=True).by_hand(32) == 64


def test_the_cases_are_on_both_sides_of_the_edges_of_blocks() -> None:
    chosen = [case for case in cases(16) if not case.is_whole]
    off = {(case.prompt + case.answer) % 16 for case in chosen}
    assert off == {15, 0, 1, 2}
    assert {case.prompt % 16 for case in chosen} == {4, 15, 0, 3}
    assert all(case.answer > 0 for case in cases(16))
