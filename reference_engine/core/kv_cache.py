"""Block tables: how many blocks a request needs, and the one place where it loses them.

    tokens   | computed          | scheduled now | not yet         |
    blocks   | b0 | b1 | b2 | b3 | b4 (new)      |

A request's table covers its computed tokens and those scheduled in the coming step, rounded up to
whole blocks. Nothing is reserved ahead.
"""

from reference_engine.core.block_pool import BlockPool
from reference_engine.request import Request


class KVCache:
    """Grows and frees the block tables of requests out of one pool."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size

    def try_grow(self, request: Request, num_tokens: int) -> bool:
        """Make room for `num_tokens` more computed tokens; False, unchanged, if there is none."""
        covered = request.num_computed_tokens + num_tokens
        missing = -(-covered // self.block_size) - len(request.block_table)
        if missing <= 0:
            return True
        blocks = self.pool.try_take(missing)
        if blocks is None:
            return False
        request.block_table.extend(blocks)
        return True

    def free(self, request: Request, num_leaked: int = 0) -> int:
        """Give the request's blocks back, all but `num_leaked`; the number given back.

        A request that never had blocks, or has none any more, is not an error.
        """
        num_kept = max(0, len(request.block_table) - num_leaked)
        returned, leaked = request.block_table[:num_kept], request.block_table[num_kept:]
        request.block_table = []
        self.pool.give_back(returned)
        self.pool.leak(leaked)
        return len(returned)
