"""The pool of KV-cache blocks: each is blank, held or cached, and never two of these.

    blank ──take──▶ held ──give back──▶ blank, or cached if the prefix index knows it
    cached ─share─▶ held;  cached ──take (the least recently used, when none is blank)──▶ held

A block is `block_size` token positions of the cache, known by its number. A held block has as many
references as block tables have it; a cached block has none, keeps its tokens' keys and values, and
counts as free. Conservation law: blank + cached + held = total.

A full block, of a prompt or of an answer, is known by a hash of its tokens and of the hash of the
block before it, so equal hashes mean equal tokens from the first one on. A block that is not full
is blank as soon as nobody holds it.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import msgspec

_HASH_BYTES = 16  # long enough that two sequences never collide


def extend_hashes(hashes: list[bytes], token_ids: Sequence[int], block_size: int) -> None:
    """One hash for each full block, which depends on all tokens up to its end. Those that are there
    stay as they are.
    """
    parent = hashes[-1] if hashes else b""
    for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        tokens = msgspec.msgpack.encode(token_ids[start : start + block_size])
        parent = blake2b(parent + tokens, digest_size=_HASH_BYTES).digest()
        hashes.append(parent)


class PrefixIndex:
    """One block for each hash.

    `retained`: indexed blocks of a cancelled request that no later request has used yet.
    """

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self.retained: set[int] = set()

    def __len__(self) -> int:
        return len(self._hash_of)

    def __contains__(self, block: int) -> bool:
        return block in self._hash_of

    def add(self, block: int, block_hash: bytes) -> None:
        assert block not in self._hash_of, f"block {block} is indexed already"
        if block_hash not in self._block_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash

    def drop(self, block: int) -> None:
        block_hash = self._hash_of.pop(block, None)
        if block_hash is not None:
            del self._block_of[block_hash]
            self.retained.discard(block)

    def longest(self, hashes: Sequence[bytes]) -> list[int]:
        blocks = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def check_integrity(self) -> None:
        assert {block: hash_ for hash_, block in self._block_of.items()} == self._hash_of
        assert self.retained <= self._hash_of.keys()


class BlockPool:
    """`_blank` is a queue (the block given back first is reused first), `_cached` is ordered by
    use, the least recently used first. All state changes on the scheduler's thread.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.index = PrefixIndex()
        self._blank: deque[int] = deque(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._references: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_held(self) -> int:
        return len(self._references)

    def cached_of(self, blocks: Iterable[int]) -> list[int]:
        return [block for block in blocks if block in self._cached]

    def is_shared(self, block: int) -> bool:
        return self._references.get(block, 0) > 1

    def try_take(self, count: int) -> list[int] | None:
        """Blocks without content; None, and nothing changes, if there are fewer than `count`.

        Cached blocks lose their content only when no blank one is left.
        """
        if count > self.num_free:
            return None
        blank, blocks = self._blank, []
        for _ in range(count):
            block = blank.popleft() if blank else self._evict()
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._cached.pop(block, None)
            self._references[block] = self._references.get(block, 0) + 1

    def give_back(self, blocks: Iterable[int]) -> list[int]:
        """Drop one reference to each; returns the blocks that are free now.

        Raises KeyError for a block that is not held. The first given back is the first evicted.
        """
        freed = []
        for block in blocks:
            references = self._references[block] - 1
            if references:
                self._references[block] = references
                continue
            del self._references[block]
            freed.append(block)
            if block in self.index:
                self._cached[block] = None
            else:
                self._blank.append(block)
        return freed

    def blank(self, block: int) -> None:
        del self._cached[block]
        self.index.drop(block)
        self._blank.append(block)

    def check_sums(self, *, most_held: int) -> None:
        total = self.num_free + self.num_held
        assert total == self.num_blocks, f"{total} blocks of {self.num_blocks}"
        assert self.num_held <= most_held, "blocks are held that no request needs"

    def check_integrity(self, holders: Sequence[Sequence[int]]) -> None:
        held = Counter(block for table in holders for block in table)
        assert held == self._references, "references differ from the block tables"
        blank = set(self._blank)
        assert len(blank) == len(self._blank), "a block is blank twice"
        states = [blank, self._cached.keys(), self._references.keys()]
        total = sum(map(len, states))
        assert total == self.num_blocks, f"{total} blocks of {self.num_blocks}"
        assert len(set().union(*states)) == total, "a block is in two states"
        assert all(block in self.index for block in self._cached), "cached, but not to be found"
        assert not any(block in self.index for block in blank), "blank, but in the index"
        self.index.check_integrity()

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self.index.drop(block)
        return block
