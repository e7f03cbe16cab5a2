"""Canaries: what they ask, who comes first, and that their text is kept."""

import json
import threading

import pytest

from harness.load.session import CanaryBarrier, canary_prompt
from harness.load.stream import StreamMachine
from harness.records import Role
from harness.workload.abandon import RequestSpec
from harness.workload.prompts import BYTES_ARE_TOKENS, PromptScale

TOO_LONG_S = 5.0


def test_each_canary_has_a_question_of_its_own_and_of_the_wanted_length() -> None:
    prompts = [canary_prompt(user, tokens=60, scale=BYTES_ARE_TOKENS) for user in range(4)]
    assert len(set(prompts)) == 4
    assert {len(text) for text in prompts} == {60}
    coarse = PromptScale(bytes_per_token=4.0)
    assert len(canary_prompt(0, tokens=60, scale=coarse)) == 240


def test_canaries_take_turns_and_everybody_else_waits_for_all() -> None:
    peace = CanaryBarrier(2)
    served: list[int] = []
    done = {user: threading.Event() for user in (1, 2, 7)}

    def ask(user: int) -> None:
        peace.wait_for_turn(user)
        served.append(user)
        done[user].set()

    threads = [threading.Thread(target=ask, args=(user,), daemon=True) for user in done]
    for thread in threads:
        thread.start()
    peace.wait_for_turn(0)
    assert served == []  # nobody can have come by: canary 0 has had no answer
    peace.end_turn(0)
    assert done[1].wait(TOO_LONG_S)
    assert served == [1]
    peace.end_turn(1)
    for thread in threads:
        thread.join(TOO_LONG_S)
    assert sorted(served) == [1, 2, 7]


def test_without_canaries_nobody_waits() -> None:
    peace = CanaryBarrier(0)
    peace.wait_for_turn(3)
    peace.end_turn(3)
    peace.wait_for_turn(3)


def test_a_turn_may_be_ended_again() -> None:
    peace = CanaryBarrier(1)
    peace.end_turn(0)
    peace.end_turn(0)
    peace.wait_for_turn(1)


@pytest.mark.parametrize(
    "choice", [{"text": "é!"}, {"delta": {"content": "é!"}}, {"delta": {"reasoning_content": "é!"}}]
)
@pytest.mark.parametrize(("role", "kept"), [(Role.CANARY, "é!é!"), (Role.USER, None)])
def test_the_text_of_canaries_is_kept(
    choice: dict[str, object], role: Role, kept: str | None
) -> None:
    spec = RequestSpec(
        request_id="r",
        arm="main",
        role=role,
        user=0,
        prompt_tokens=1,
        max_tokens=2,
        intended_start_ns=1,
    )
    stream = StreamMachine(spec, sent_ns=1, continuous_usage=False)
    stream.headers(200)
    for number in range(2):
        last = {"finish_reason": "length"} if number else {}
        stream.event(json.dumps({"choices": [{**choice, **last}]}).encode(), 2 + number)
    stream.body_ended(5)
    assert stream.row().answer == kept
