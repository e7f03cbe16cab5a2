"""Block tables: the blocks that a request finds in the cache, takes, and gives back.

    tokens   | cached prefix | computed | scheduled now | not yet |
    blocks   | b0 | b1       | b2 | b3  | b4 (new)      |

A table covers the computed tokens and the tokens of the coming step, in whole blocks. Blocks of the
cached prefix are shared and only ever read: at least one token of a request is always left to
compute, and it is written to a block of its own.

A preempted request may keep what it has computed in blocks of the host, one per block of its table:

    swap out: block table ──copy──▶ host table      swap in: cached prefix + copies of the rest

The copies are in the step's plan, and are made before the step computes. So a block may be given to
another request, or found as a prefix, in the very plan that copies it. Blocks of another
worker are swapped in, too: they were put into the host table beforehand.
"""

from reference_engine.config import EngineConfig
from reference_engine.core.accounting import Counters
from reference_engine.core.block_pool import BlockPool, extend_hashes
from reference_engine.core.request import Request, Status
from reference_engine.core.step import StepPlan


class KVCache:
    def __init__(self, config: EngineConfig, counters: Counters) -> None:
        self._counters = counters
        self.pool = BlockPool(config.num_blocks)
        self.host = BlockPool(config.host_blocks)
        self.block_size = config.block_size
        self._has_prefix_cache = config.enable_prefix_caching
        self._retains = config.reclaim == "retain" and config.enable_prefix_caching
        self._force_above = config.force_reclaim_above * config.num_blocks

    def find_prefix(self, request: Request) -> list[int]:
        if not self._has_prefix_cache:
            return []
        most = (request.num_tokens - 1) // self.block_size
        return self.pool.index.longest(self._hashes_of(request)[:most])

    def _hashes_of(self, request: Request) -> list[bytes]:
        """The hashes of its full blocks, computed or not."""
        extend_hashes(request.block_hashes, request.token_ids, self.block_size)
        return request.block_hashes

    def blocks_to_admit(self, prefix: list[int], num_tokens: int) -> int:
        num_new = -(-num_tokens // self.block_size) - len(prefix)
        return num_new + len(self.pool.cached_of(prefix))

    def num_missing(self, request: Request, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size) - len(request.block_table)

    def num_kept(self, request: Request, prefix: list[int]) -> int:
        """Tokens of a request without blocks that need no computing: cached, or on the host."""
        return max(request.num_computed_tokens, len(prefix) * self.block_size)

    def admit(self, request: Request, prefix: list[int], num_tokens: int) -> list[tuple[int, int]]:
        """Give a request without blocks its cached prefix, and room for `num_tokens` more.

        There must be `blocks_to_admit` free blocks. Returns the copies from the host.
        """
        assert not request.block_table
        if not request.host_table and self._has_prefix_cache:
            num_found = len(prefix) * self.block_size
            self._counters.count_prefix(request, num_found)
            if request.status is Status.WAITING:
                request.num_cached_tokens = min(num_found, request.num_prompt_tokens)
        request.num_computed_tokens = self.num_kept(request, prefix)
        self.pool.share(prefix)
        request.block_table = list(prefix)
        has_grown = self.try_grow(request, num_tokens)
        assert has_grown
        hits = self.pool.index.retained.intersection(prefix)
        self.pool.index.retained -= hits
        self._counters.retained_hits += len(hits)
        return self._swap_in(request, len(prefix))

    def try_keep_on_host(self, request: Request) -> bool:
        """Give it a block of the host for each block of computed tokens."""
        num_blocks = -(-request.num_computed_tokens // self.block_size)
        request.host_table = self.host.try_take(num_blocks) or []
        return bool(request.host_table)

    def swap_out(self, request: Request) -> list[tuple[int, int]]:
        """Copies to the host, one a block of computed tokens; none if the host has too few."""
        self.try_keep_on_host(request)
        self._counters.swapped_out_requests += bool(request.host_table)
        self._counters.swapped_out_blocks += len(request.host_table)
        return list(zip(request.block_table, request.host_table, strict=False))

    def _swap_in(self, request: Request, num_cached: int) -> list[tuple[int, int]]:
        if not request.host_table:
            return []
        table = zip(request.host_table, request.block_table, strict=False)
        copies = list(table)[num_cached:]
        self._free_host(request)
        self.remember(request, num_cached * self.block_size)
        if request.status is Status.PREEMPTED:
            self._counters.swapped_in_requests += 1
            self._counters.swapped_in_blocks += len(copies)
        return copies

    def forget_copies(self, plan: StepPlan) -> None:
        """The plan's copies were not made: no block has what they were to bring.

        Requests that were swapped out for this step compute their tokens again.
        """
        for _, block in plan.swap_in:
            if self.pool.cached_of([block]):  # its request has ended meanwhile
                self.pool.blank(block)
            else:
                self.pool.index.drop(block)
        for request in plan.swapped:
            if request.host_table:
                self._free_host(request)
                request.lose_computed()

    def _free_host(self, request: Request) -> None:
        table, request.host_table = request.host_table, []
        self.host.give_back(table)

    def try_grow(self, request: Request, num_tokens: int) -> bool:
        missing = self.num_missing(request, request.num_planned_tokens + num_tokens)
        if missing > 0:
            blocks = self.pool.try_take(missing)
            if blocks is None:
                return False
            request.block_table += blocks
        return True

    def remember(self, request: Request, before: int) -> None:
        """Index the blocks that were filled since it had `before` computed tokens."""
        if self._has_prefix_cache:
            hashes, size = self._hashes_of(request), self.block_size
            for at in range(before // size, request.num_computed_tokens // size):
                self.pool.index.add(request.block_table[at], hashes[at])

    def rebuild_cost(self, request: Request) -> int:
        """The most tokens that must be computed again if the request loses its blocks: those in
        blocks that it alone holds. They stay in the prefix cache, but others may take their room.
        """
        num_shared = sum(map(self.pool.is_shared, request.block_table))
        return max(0, request.num_computed_tokens - num_shared * self.block_size)

    def free(self, request: Request) -> int:
        """Give all blocks back, also on the host; returns how many of the device's are free now."""
        self._free_host(request)
        return self.give_back(request)

    def give_back(self, request: Request) -> int:
        """The last block goes first, so that a prefix is evicted from its end."""
        table, request.block_table = request.block_table, []
        return len(self.pool.give_back(reversed(table)))

    def reclaim(self, request: Request) -> int:
        table, pool, counters = request.block_table, self.pool, self._counters
        is_pressed = pool.num_held > self._force_above
        left_behind = self.left_behind(request)
        known = [block for block in table if block in pool.index and not pool.is_shared(block)]
        num_freed = self.free(request)
        counters.reclaimed_freed += num_freed - len(known)
        known += left_behind
        if self._retains and not is_pressed:
            pool.index.retained.update(known)
            counters.reclaimed_retained += len(known)
            return num_freed
        for block in known:
            pool.blank(block)
        if self._retains:
            counters.reclaimed_forced += len(known)
        else:
            counters.reclaimed_freed += len(known)
        return num_freed

    def left_behind(self, request: Request) -> list[int]:
        if request.block_table or not request.num_preemptions:
            return []
        return self.pool.cached_of(self.find_prefix(request))
