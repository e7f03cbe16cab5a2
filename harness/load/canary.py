"""Canaries: users whose answer is known, so that a change in it shows.

A canary asks the same question all along and wants the most likely token each time, so a server
whose arithmetic does not depend on the batch owes it the same answer each time, whoever leaves
meanwhile. What the answer is, it learns in peace: before anybody else comes, each canary asks once
alone. Its prompt is the same in all rounds and all arms, whatever their seed.
"""

from threading import Event
from typing import Final

from harness.load.prompts import prompt
from harness.prompt_scale import PromptScale

_SEED: Final = 0


def canary_prompt(user: int, *, tokens: int, scale: PromptScale) -> str:
    """The question of one canary, of so many tokens on this server."""
    return prompt(seed=_SEED, user=user, n=0, num_bytes=scale.num_bytes(tokens))


class Peace:
    """Keeps the order of the first requests: one canary after the other, then everybody else.

    Its state is which canaries have had their first answer. Users are numbered from 0, the
    canaries first.
    """

    def __init__(self, canaries: int) -> None:
        self._answered = [Event() for _ in range(canaries)]

    def wait_for_turn(self, user: int) -> None:
        """Return when every canary before this user has had its first answer."""
        for answered in self._answered[:user]:
            answered.wait()

    def end_turn(self, user: int) -> None:
        """This user has had an answer, or will have none; no matter who says so again."""
        if user < len(self._answered):
            self._answered[user].set()
