"""Canaries: what they ask, and that they come first."""

import threading
from queue import Queue

from harness.client.session import CanaryBarrier, canary_prompt
from harness.workload.prompts import BYTES_ARE_TOKENS, PromptScale


def test_each_canary_has_a_question_of_its_own_and_of_the_wanted_length() -> None:
    prompts = [canary_prompt(user, tokens=60, scale=BYTES_ARE_TOKENS) for user in range(4)]
    assert len(set(prompts)) == 4
    assert {len(text) for text in prompts} == {60}
    coarse = PromptScale(bytes_per_token=4.0)
    assert len(canary_prompt(0, tokens=60, scale=coarse)) == 240


def test_canaries_take_turns_and_all_other_users_wait_for_all() -> None:
    barrier = CanaryBarrier(2)
    served: Queue[int] = Queue()

    def ask(user: int) -> None:
        barrier.wait_for_turn(user)
        served.put(user)

    for user in (1, 2, 7):
        threading.Thread(target=ask, args=(user,), daemon=True).start()
    barrier.wait_for_turn(0)
    assert served.empty()  # canary 0 has had no answer
    barrier.end_turn(0)
    assert served.get(timeout=30) == 1
    assert served.empty()
    barrier.end_turn(1)
    assert {served.get(timeout=30) for _ in range(2)} == {2, 7}


def test_without_canaries_no_user_waits_and_a_turn_may_be_ended_again() -> None:
    for canaries in (0, 1):
        barrier = CanaryBarrier(canaries)
        barrier.end_turn(0)
        barrier.end_turn(0)
        user = threading.Thread(target=barrier.wait_for_turn, args=(3,), daemon=True)
        user.start()
        user.join(timeout=30)
        assert not user.is_alive()
