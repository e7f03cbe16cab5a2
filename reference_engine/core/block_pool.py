"""The pool of KV-cache blocks: which are free, which are held, and that none is both.

A block is `block_size` token positions of the cache, known by its number. Blocks that a fault has
lost are kept apart, so that the conservation law still holds: free + held + leaked = total.
"""

from collections import deque
from collections.abc import Sequence


class BlockPool:
    """Hands out block numbers and takes them back.

    `_free` (a queue: the block that was given back first is reused first), `_held` and `_leaked`
    are the only state; they change in `take`, `give_back` and `leak`, on the scheduler's thread.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free: deque[int] = deque(range(num_blocks))
        self._held: set[int] = set()
        self._leaked: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def try_take(self, count: int) -> list[int] | None:
        """`count` blocks, or None (and nothing changes) when there are not so many."""
        if count > len(self._free):
            return None
        blocks = [self._free.popleft() for _ in range(count)]
        self._held.update(blocks)
        return blocks

    def give_back(self, blocks: Sequence[int]) -> None:
        """Make held blocks free. Raises KeyError for a block that is not held."""
        for block in blocks:
            self._held.remove(block)
            self._free.append(block)

    def leak(self, blocks: Sequence[int]) -> None:
        """Lose held blocks for good, on purpose."""
        for block in blocks:
            self._held.remove(block)
            self._leaked.add(block)

    def check_integrity(self, holders: Sequence[Sequence[int]]) -> None:
        """Raise AssertionError unless `holders` (block tables) hold just what is marked as held."""
        held = [block for table in holders for block in table]
        assert len(held) == len(set(held)), "a block is held twice"
        assert set(held) == self._held, "held blocks differ from the block tables"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & (self._held | self._leaked), "a block is free and not free"
        total = len(free) + len(self._held) + len(self._leaked)
        assert total == self.num_blocks, f"{total} blocks of {self.num_blocks}"
