"""The longest prompts that fit at once are found in few looks."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from harness.experiments.capacity import Capacity
from harness.experiments.outcome import CannotDecideError
from harness.experiments.streams import Streams
from harness.records import Outcome

SLOTS = 8
LONGEST = 2000


class Memory(Capacity):
    """A cache of `tokens` tokens; `looks`: the lengths that were tried."""

    def __init__(self, tokens: int) -> None:
        row = SimpleNamespace(sent_ns=0, first_token_ns=1_000_000)
        streams: Any = SimpleNamespace(
            slots=SLOTS,
            facts=SimpleNamespace(context=None),
            short=lambda *_, **__: None,
            whole=lambda _: row,
        )
        super().__init__(cast(Streams, streams))
        self.room = tokens
        self.looks: list[int] = []

    def fits(self, prompt_tokens: int | None = None) -> bool:
        size = prompt_tokens or self.prompt_tokens
        self.looks.append(size)
        self._began = min(SLOTS, self.room // size)
        return self._began == SLOTS


@pytest.mark.parametrize(("last_ns", "fit"), [(50, True), (150, False)])
def test_answers_that_did_not_run_together_do_not_show_what_fits(last_ns: int, fit: bool) -> None:
    """The first answer ends at 100 ns."""
    begins = iter([10, last_ns])

    def start(_asked: object) -> SimpleNamespace:
        first_ns = next(begins)
        row = SimpleNamespace(outcome=Outcome.COMPLETED, ended_ns=first_ns + 90)
        return SimpleNamespace(
            tokens=1, first_token_ns=first_ns, wait_tokens=lambda *_: True, join=lambda _: row
        )

    plan = SimpleNamespace(target=SimpleNamespace(disconnect="drain"))
    streams: Any = SimpleNamespace(
        slots=2,
        step_s=0.02,
        session=SimpleNamespace(plan=plan),
        short=lambda *_, **__: None,
        start=start,
    )
    memory = Capacity(cast(Streams, streams))
    if fit:
        assert memory.fits(100)
        return
    with pytest.raises(CannotDecideError, match="memory may have come free"):
        memory.fits(100)


@pytest.mark.parametrize("tokens", [*range(1000, SLOTS * LONGEST, 500)])
def test_the_length_that_just_fits_is_found_in_few_looks(tokens: int) -> None:
    memory = Memory(tokens)
    memory.measure()
    assert memory.prompt_tokens <= tokens // SLOTS < 1.25 * memory.prompt_tokens + 20
    assert len(memory.looks) <= 6
    assert len(memory.looks) <= 4 or tokens < 2 * LONGEST
    rough = Memory(tokens)
    rough.measure(roughly=True)
    assert 0 < rough.prompt_tokens <= tokens // SLOTS
    assert len(rough.looks) <= len(memory.looks)
