"""The work between cases: nothing of one stays for the next, and its harm to the server is seen.

A greedy answer, the canary, is compared with the same answer at the beginning.
"""

import time
from heapq import heapreplace
from typing import Final

from harness.client.live_stream import join_all
from harness.client.session import canary_prompt
from harness.experiments.idle_server import PROMPT_TOKENS, was_refused
from harness.experiments.occupancy import Occupancy
from harness.experiments.outcome import CannotDecideError
from harness.experiments.patience import READY_S, SLOWER
from harness.experiments.streams import Streams
from harness.records import Outcome, RequestRow, Role
from harness.store.conform_result import Aftermath

_ANOTHER_LOAD: Final = "another load uses this server"
_CANARY_TOKENS: Final = 12
_SLOW: Final = 10  # times the idle time to first token
_LEAST_SLOW_S: Final = 2.0
_STILL_LENGTHS: Final = 3  # settle times, and times between two flushes
_LEAST_STILL_S: Final = 5.0
_LONGEST_REST_S: Final = 90.0
_AGAIN_S: Final = 0.1
_RESTART_S: Final = 5.0  # for which a server that no longer serves is asked again
_RESTART_LOOK_S: Final = 0.5
_REFUSALS: Final = "refusals in a row"
_LIMITED_S: Final = 65.0  # a minute, and a little


class Cleaning:
    """`running`: when all was last at rest, as many requests as slots were sent, and this number of
    them ran at once; None: that is not known."""

    def __init__(self, streams: Streams, occupancy: Occupancy) -> None:
        self._streams = streams
        self._occupancy = occupancy
        self.running: int | None = None
        self._canary: str | None = None

    def learn_canary(self) -> None:
        """A greedy answer to compare with later; none if the server does not repeat itself."""
        first, second = (self._ask_canary(READY_S) for _ in range(2))
        is_stable = first is not None and second is not None and first.answer == second.answer
        self._canary = first.answer if is_stable and first is not None else None

    def _ask_canary(self, longest_s: float) -> RequestRow | None:
        server = self._streams
        text = canary_prompt(0, tokens=PROMPT_TOKENS, scale=server.session.plan.prompt_scale)
        return server.start(server.short(_CANARY_TOKENS, role=Role.CANARY), text).join(longest_s)

    def aftermath(self, *, restart_s: float = _RESTART_S) -> tuple[Aftermath, str]:
        """A server that no longer serves is asked for `restart_s` whether it serves again."""
        found, reason = self._aftermath()
        if found is Aftermath.DEAD and self._serves_again(restart_s):
            return Aftermath.RESTARTED, f"{reason}; then it served again: it has restarted"
        return found, reason

    def aftermath_of_left(self) -> tuple[Aftermath, str]:
        """Whether the server serves once the answers that were left have ended. Where slots cannot
        be counted, nobody sees that end; and many such answers slow each other. So the server is
        asked again until it serves, for as long as it would be waited for at rest."""
        until_s = time.monotonic() + _LONGEST_REST_S
        found = self.aftermath()
        while found[0] is Aftermath.WEDGED and time.monotonic() < until_s:
            found = self.aftermath()
        return found

    def aftermath_of_refusals(self) -> tuple[Aftermath, str]:
        """The server may refuse though nothing of this run is left: a limit on how much is asked in
        a minute lets requests in again when the minute is over."""
        began_s, is_all_ended = time.monotonic(), not self._streams.ghosts()
        found = self.aftermath()
        is_refusal = found[0] is Aftermath.WEDGED and _REFUSALS in found[1]
        while found[0] is Aftermath.WEDGED and time.monotonic() - began_s < _LIMITED_S:
            found = self.aftermath()
        is_again = found[0] in (Aftermath.CLEAN, Aftermath.SLOW, Aftermath.WRONG_TEXT)
        if not (is_again and is_refusal and is_all_ended):
            return found
        return Aftermath.REFUSING, (
            f"the server refused every request for {time.monotonic() - began_s:.0f} s after all of "
            "ours had ended, and then served again: it may limit how much is asked in a minute; "
            "raise that limit for this check"
        )

    def _serves_again(self, longest_s: float) -> bool:
        until_s = time.monotonic() + longest_s
        while (left_s := until_s - time.monotonic()) > 0:
            row = self._ask_canary(left_s)
            if row is not None and row.outcome is Outcome.COMPLETED:
                return True
            self._streams.pause(_RESTART_LOOK_S)
        return False

    def _aftermath(self) -> tuple[Aftermath, str]:
        server = self._streams
        answered_s = _SLOW * (server.ttft_s + _CANARY_TOKENS * server.step_s)
        longest_s = max(2 * server.settle_s, answered_s, _LEAST_SLOW_S)
        row = self._ask_canary(longest_s)
        until_ns, refusals = time.perf_counter_ns() + int(server.settle_s * 1e9), 0
        while row is not None and row.outcome is not Outcome.COMPLETED:
            refusals += was_refused(row)
            if time.perf_counter_ns() > until_ns:
                is_usual = not server.facts.lets_wait(server.ghosts() + 1)
                return _why_unanswered(row, refusals, is_usual=is_usual)
            server.pause(_AGAIN_S)
            row = self._ask_canary(longest_s)
        if row is None:
            return Aftermath.WEDGED, f"no answer to a short request within {longest_s:.0f} s"
        if self._canary is not None and row.answer != self._canary:
            return Aftermath.WRONG_TEXT, "a greedy answer has changed"
        ttft_s = ((row.first_token_ns or row.ended_ns) - row.sent_ns) / 1e9
        if ttft_s > max(_SLOW * server.ttft_s + server.step_s, _LEAST_SLOW_S):
            return Aftermath.SLOW, f"first token after {ttft_s:.2f} s"
        return Aftermath.CLEAN, ""

    def outlast(self) -> None:
        """Wait until the streams of a case have ended by themselves: on a server that never stops,
        streams that the case left hold their slots as long."""
        server = self._streams
        open_ones = [one for one in server.opened if not one.has_ended]
        tokens = max((server.tokens_left(one) for one in open_ones), default=0)
        join_all(open_ones, SLOWER * (server.ttft_s + tokens * server.step_s))

    @property
    def longest_still_s(self) -> float:
        """No server that works stands still for this time: no stall of its own lasts as long."""
        server = self._streams
        answered_s = _SLOW * (server.ttft_s + _CANARY_TOKENS * server.step_s)
        flush_s = server.facts.flush_tokens * server.step_s
        return max(_STILL_LENGTHS * max(server.settle_s, flush_s), answered_s, _LEAST_STILL_S)

    def stand_still(self) -> bool:
        """Whether streams are read and none of them has had a token for `longest_still_s`. Then the
        server has stopped working: it cannot be busy with answers that were left."""
        server = self._streams
        since_ns = time.perf_counter_ns() - int(1e9 * self.longest_still_s)
        last_ns = [
            one.last_token_ns
            for one in server.opened
            if not one.has_ended and not one.is_unread and one.last_token_ns
        ]
        return bool(last_ns) and max(last_ns) < since_ns

    def rest(self) -> None:
        """Wait until the slots are free for the next case, at most until every stream that was left
        must have ended by itself."""
        server = self._streams
        slots = server.facts.slots
        now_ns = time.perf_counter_ns()
        until_ns = now_ns + int(1e9 * min(_LONGEST_REST_S, self._ghosts_s()))
        self.running = None
        while slots is not None and server.facts.can_fill and time.perf_counter_ns() < until_ns:
            try:
                self.running = self._occupancy.running_at_once()
                if self.running >= slots:
                    break
            except CannotDecideError:
                server.pause(server.settle_s / 4)
        server.forget()
        if self.running is not None and slots is not None and self.running >= slots:
            server.forget_ghosts()

    def check_free(self, *, wholly: bool) -> None:
        """A case must not be blamed for slots that were taken before it. `wholly`: all slots have
        to be free; else at least one. Raises CannotDecideError."""
        slots = self._streams.slots if self.running is not None else 0
        if self.running is not None and self.running < slots:
            self.rest()
        if self.running is not None and self.running < (slots if wholly else 1):
            raise CannotDecideError(
                f"only {self.running} of {slots} slots were free before this case: {self._whose()}"
            )

    def _whose(self) -> str:
        server = self._streams
        if ghosts := server.ghosts():
            some = f"{ghosts} request{'s' if ghosts > 1 else ''} that this run left earlier"
            return f"{some} may still run, or {_ANOTHER_LOAD}"
        if server.facts.refuses and self.running == 0:
            return (
                "the server is busy for nobody: though nothing of this run is left, each of "
                f"{self._occupancy.refused} requests was refused"
            )
        return f"a case before lost the others, or {_ANOTHER_LOAD}"

    def _ghosts_s(self) -> float:
        """How long the streams that were left would run on, if the server has not noticed: in its
        slots, one after the other."""
        server = self._streams
        slots = [0] * (server.facts.slots or 1)
        for stream in server.opened:
            row = stream.row
            if row is not None and row.outcome is Outcome.ABANDONED:
                left = stream.spec.n * stream.spec.max_tokens - row.tokens_read
                heapreplace(slots, slots[0] + left)
        return SLOWER * (server.ttft_s + max(slots) * server.step_s)


def _why_unanswered(row: RequestRow, refusals: int, *, is_usual: bool) -> tuple[Aftermath, str]:
    """`is_usual`: it refuses where it has no free slot, or no place in its queue."""
    if was_refused(row) and not is_usual:
        return Aftermath.REFUSING, (
            f"the server refuses short requests ({row.error}), though it let such requests wait "
            "before: it may limit how much is asked; raise that limit for this check"
        )
    if was_refused(row):
        said = f"{refusals} {_REFUSALS} though nothing of this run is left ({row.error})"
        return Aftermath.WEDGED, f"the server is busy for nobody: {said}"
    if row.outcome is Outcome.TIMED_OUT:
        return Aftermath.WEDGED, f"a short request is not answered: {row.error}"
    return Aftermath.DEAD, f"the server no longer serves: {row.error or row.outcome}"
