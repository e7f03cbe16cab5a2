"""How far a simulation has come, as lines of JSON."""

from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from harness.simulate.lags import NS
from harness.simulate.rows import CellFacts

LINES_EVERY_S: Final = 0.5


class Reached(NamedTuple):
    """A cell has come so far."""

    cell: int
    virtual_s: float
    requests: int
    tokens: int


class ProgressLine(msgspec.Struct, frozen=True, kw_only=True):
    """`virtual_s`: the mean over all cells, of `of_s`. `tokens_per_s` is by the wall clock."""

    virtual_s: float
    of_s: float
    cells_done: int
    cells: int
    requests: int
    tokens: int
    tokens_per_s: float
    elapsed_s: float


def reached(facts: CellFacts) -> Reached:
    virtual_s = (facts.reached_ns - facts.began_ns) / NS
    return Reached(facts.cell, virtual_s, facts.sent, facts.scheduled_tokens)


class Board:
    """Gathers the progress of all cells and writes a line now and then; the last one always."""

    def __init__(
        self,
        num_cells: int,
        of_s: float,
        *,
        write: Callable[[str], object],
        clock_s: Callable[[], float],
    ) -> None:
        self._num_cells = num_cells
        self._of_s = of_s
        self._write = write
        self._clock_s = clock_s
        self._began_s = clock_s()
        self._next_s = self._began_s + LINES_EVERY_S
        self._latest: dict[int, Reached] = {}
        self._done: set[int] = set()

    def take(self, one: Reached) -> None:
        if one.cell not in self._done:
            self._latest[one.cell] = one
        if self._clock_s() >= self._next_s:
            self.show()

    def done(self, facts: CellFacts) -> None:
        self._latest[facts.cell] = reached(facts)
        if facts.complete:
            self._done.add(facts.cell)

    def show(self) -> None:
        now_s = self._clock_s()
        self._next_s = now_s + LINES_EVERY_S
        self._write(msgspec.json.encode(self._line(now_s - self._began_s)).decode() + "\n")

    def _line(self, elapsed_s: float) -> ProgressLine:
        latest = self._latest.values()
        tokens = sum(one.tokens for one in latest)
        return ProgressLine(
            virtual_s=round(sum(one.virtual_s for one in latest) / self._num_cells, 3),
            of_s=self._of_s,
            cells_done=len(self._done),
            cells=self._num_cells,
            requests=sum(one.requests for one in latest),
            tokens=tokens,
            tokens_per_s=round(tokens / elapsed_s) if elapsed_s else 0,
            elapsed_s=round(elapsed_s, 3),
        )
