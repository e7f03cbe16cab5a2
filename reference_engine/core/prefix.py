"""The prefix cache's index: which block holds which prompt tokens, after which others.

A full block of prompt tokens is known by a hash of its tokens and of the hash of the block before
it, so equal hashes mean equal prompts from the first token on, and what is cached of a prompt is
found block by block until the first that is missing. Only prompt tokens are indexed, by choice: an
answer's blocks return to the pool at once.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

_HASH_BYTES = 16  # so long that two prompts never meet by chance


def chain_hashes(token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """One hash for each full block of `token_ids`, each depending on all before it."""
    hashes = []
    parent = b""
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        tokens = array("q", token_ids[start : start + block_size]).tobytes()
        parent = blake2b(parent + tokens, digest_size=_HASH_BYTES).digest()
        hashes.append(parent)
    return hashes


class PrefixIndex:
    """Hash to block and back; one block a hash.

    `retained`: indexed blocks that a cancelled request left behind and no request has hit since.
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
        """Make a block known. Where another holds the same tokens already, that one stays."""
        assert block not in self._hash_of, f"block {block} is indexed already"
        if block_hash not in self._block_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash

    def drop(self, block: int) -> None:
        """Forget a block; not an error for one that is not known."""
        block_hash = self._hash_of.pop(block, None)
        if block_hash is not None:
            del self._block_of[block_hash]
            self.retained.discard(block)

    def longest(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest run of `hashes` from the first on."""
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
