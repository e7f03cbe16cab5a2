"""Capacity: how many contexts fit into the server's memory at once.

Two ways. `Capacity`: as many requests as slots start at once, all with prompts of one length. They
fit if all get their first token in time, while all of them run: then none waited for memory. The
longest prompts that fit are found by bisection; the server's context must not be the limit.

`HeldTokens`, where KV blocks run out before slots do: long prompts are sent one by one until one
has to wait, and then their answers grow until a stream stands still. The rows show how many tokens
were held at once.
"""

import random
import time
from typing import Final

import gevent

from harness.client.live_stream import LiveStream
from harness.client.session import LoadSession
from harness.experiments.outcome import CannotDecideError, RefusedError
from harness.experiments.patience import READY_S, SLOWER, prompts_s
from harness.experiments.streams import Streams, whole, without_token
from harness.records import Role, TrialArm
from harness.workload.abandon import RequestSpec
from harness.workload.load import CAPACITY_ANSWER_TOKENS

_LONGEST_PROMPT: Final = 2000  # tokens
_LONGEST_PREFILL_S: Final = 8.0  # of all slots together
_HELD_TOKENS: Final = 16  # beyond the time that the prompts are waited for
_FEWEST_TOKENS: Final = 16  # by which two lengths of prompts differ
_STANDS_STILL_STEPS: Final = 6


class Capacity:
    """`prompt_tokens`: the longest prompt of which one per slot fits, once it was measured."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._token_s = 0.0
        self._is_rough = False
        self._began = 0  # prompts of the latest look that were computed at once
        self.prompt_tokens = 0

    def measure(self, *, roughly: bool = False) -> None:
        """A length that was found before is tried first. `roughly`: of a server that never stops,
        for which the first length that is found will do. Raises RefusedError if memory is not what
        limits this server."""
        self._is_rough = roughly
        server = self._streams
        context = server.facts.context or 2 * _LONGEST_PROMPT
        longest = min(_LONGEST_PROMPT, 3 * context // 4)
        row = server.whole(server.short(1, prompt_tokens=longest))
        assert row.first_token_ns is not None
        self._token_s = (row.first_token_ns - row.sent_ns) / 1e9 / longest
        if server.slots * longest * self._token_s > _LONGEST_PREFILL_S:
            raise CannotDecideError(
                f"{server.slots} prompts of {longest} tokens take too long to fill its memory"
            )
        if self.prompt_tokens and self.fits():
            return
        if self.fits(longest):
            raise RefusedError(
                f"{server.slots} contexts of {longest} tokens fit at once: its slots, not its "
                "memory, are the limit"
            )
        self.prompt_tokens = self._find(longest)

    @property
    def tokens(self) -> int:
        return self._streams.slots * self.prompt_tokens

    @property
    def look_s(self) -> float:
        """How long prompts of that length are waited for."""
        return self._look_s(self.prompt_tokens)

    def _look_s(self, prompt_tokens: int) -> float:
        server = self._streams
        return prompts_s(server.slots * prompt_tokens * self._token_s, server.step_s)

    def _find(self, longest: int) -> int:
        """The bisection begins near the share of each slot in the prompts that fitted when all of
        the `longest` did not."""
        slots = self._streams.slots
        fitting, too_long = 0, min(longest, (self._began + 1) * longest // slots)
        middle = self._began * longest // slots
        while too_long - fitting > max(_FEWEST_TOKENS, too_long // 8):
            middle = middle if fitting < middle < too_long else (fitting + too_long) // 2
            fitting, too_long = (middle, too_long) if self.fits(middle) else (fitting, middle)
            if fitting and self._is_rough:
                break
        if not fitting:
            raise CannotDecideError(f"not even {slots} short contexts fit at once")
        return fitting

    def fits(self, prompt_tokens: int | None = None) -> bool:
        """Whether one prompt per slot fits. The requests end by themselves: abandoned ones could
        themselves hold memory. Only requests that wait are abandoned, since they hold none, and
        only where the server cancels them."""
        server, size = self._streams, prompt_tokens or self.prompt_tokens
        longest_s = self._look_s(size)
        asked = server.short(int(longest_s / server.step_s) + _HELD_TOKENS, prompt_tokens=size)
        streams = [server.start(asked) for _ in range(server.slots)]
        waiting = without_token(streams, longest_s)
        self._began = len(streams) - len(waiting)
        if server.session.plan.target.disconnect == "cancel" and not self._is_rough:
            for stream in waiting:
                stream.leave()
        ended_ns = []
        for stream in streams:
            row = stream.join(READY_S)
            if stream not in waiting:
                if row is None:
                    raise CannotDecideError(f"a request was not answered in {READY_S:g} s")
                ended_ns.append(whole(row, "a request").ended_ns)
        if not waiting and max(one.first_token_ns or 0 for one in streams) > min(ended_ns):
            raise CannotDecideError(
                "an answer had ended before the last one began, so that memory may have come free: "
                "steps are shorter now than at the beginning"
            )
        return not waiting


class HeldTokens:
    """`ghosts_end_ns`: when the answers of the last count have ended, even if the server
    computes them to their ends."""

    def __init__(self, session: LoadSession, rng: random.Random) -> None:
        self._session = session
        self._rng = rng
        self.ghosts_end_ns = 0

    @property
    def _step_s(self) -> float:
        return self._session.client.step.median_ns() / 1e9

    def count(self, prompt_tokens: int, trial: int, *, slots: int) -> None:
        """The rows say how many tokens, of prompts and of answers so far, were held at once, if a
        prompt had to wait before the slots ran out. `trial` numbers the measurement."""
        patience_s = self._session.plan.run.timeout_s
        holders: list[LiveStream] = []
        try:
            while len(holders) < slots:
                one = self._hold(prompt_tokens, trial)
                if not one.wait_tokens(1, patience_s):
                    one.leave()
                    if holders:
                        self._grow(holders, prompt_tokens, int(patience_s * 1e9))
                        return
                    raise CannotDecideError(
                        f"a prompt of {prompt_tokens} tokens got no token from the idle server: "
                        f"{one.row and one.row.error}"
                    )
                if not holders:
                    ttft_s = ((one.first_token_ns or 0) - one.spec.intended_start_ns) / 1e9
                    patience_s = prompts_s(ttft_s, self._step_s)
                holders.append(one)
        finally:
            for one in holders:
                one.leave()
            for one in holders:
                one.join(self._session.plan.run.timeout_s)
            ghost_s = SLOWER * CAPACITY_ANSWER_TOKENS * self._step_s
            self.ghosts_end_ns = time.perf_counter_ns() + int(ghost_s * 1e9)

    def _hold(self, prompt_tokens: int, trial: int) -> LiveStream:
        spec = RequestSpec(
            user=self._rng.getrandbits(32),  # so that no prefix is shared
            role=Role.LONG_PROMPT,
            arm=TrialArm.CAPACITY,
            trial=trial,
            max_tokens=CAPACITY_ANSWER_TOKENS,
            prompt_tokens=prompt_tokens,
        )
        return LiveStream(self._session, spec)

    def _grow(self, holders: list[LiveStream], prompt_tokens: int, patience_ns: int) -> None:
        """Let the answers grow until a stream stands still, as when its blocks are taken; at the
        latest when one more such prompt would have fitted."""
        enough = holders[-1].tokens + prompt_tokens // len(holders)
        still_ns = _STANDS_STILL_STEPS * self._step_s * 1e9
        while holders[-1].tokens < enough and not any(one.has_ended for one in holders):
            gevent.sleep(self._step_s)
            read_ns = [one.last_token_ns or 0 for one in holders]
            is_still = time.perf_counter_ns() - max(read_ns) > patience_ns
            if is_still or max(read_ns) - min(read_ns) > still_ns:
                return
