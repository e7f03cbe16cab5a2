"""The prefix cache's index: from a run of prompt tokens to the block that holds it.

A full block of prompt tokens is known by a hash of its tokens and of the hash of the block before
it, so equal hashes mean equal prompts from the first token on. A prompt's cached blocks are found
one by one until the first that is missing. Only prompt tokens are indexed, by choice: the blocks of
an answer return to the pool at once.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

_HASH_BYTES = 16  # long enough that two prompts never collide


def chain_hashes(token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """One hash for each full block, which depends on all tokens up to its end."""
    hashes = []
    parent = b""
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        tokens = array("q", token_ids[start : start + block_size]).tobytes()
        parent = blake2b(parent + tokens, digest_size=_HASH_BYTES).digest()
        hashes.append(parent)
    return hashes


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
