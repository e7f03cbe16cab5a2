"""Pace: one stream's time per token while other streams run, and after these have left at once.

This way needs neither metrics nor full slots, but a server that is slower with more streams: any
CPU, or a GPU near its limits. The number of other streams is raised until the witness, the stream
whose pace is read, is half as slow again as alone. In the controls the other streams end by
themselves. A single prompt slows the witness while it is computed, and so shows how long it is
computed for a client that left. This way cannot see below one slow step of the witness, nor one
forgotten stream among many: `held` says what share of the leaving streams is still computed.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from statistics import median
from typing import Final, NamedTuple

from harness.client.live_stream import LiveStream, join_all
from harness.experiments.holds import Holds, Leaver, has_no_end
from harness.experiments.idle_server import ServerFacts
from harness.experiments.outcome import CannotDecideError
from harness.experiments.pace_share import follow_slowness, still_computed
from harness.experiments.patience import READY_S, SLOWER
from harness.experiments.streams import Streams, end_of, without_token
from harness.formatting import quantity
from harness.records import Delivery, Role
from harness.store.conform_result import JudgingWay

LEAST_RATIO: Final = 1.5  # of the pace with other streams to the pace alone
FIRST_OTHERS: Final = 4
MOST_OTHERS: Final = 256
_SHOWN_GAPS: Final = 16  # by which a pace is judged
_FEWEST_GAPS: Final = 4
_AFTER_GAPS: Final = 24  # at the fast pace, which are waited for after a leave
_TOGETHER: Final = 0.1  # of the fast pace: tokens closer than this were read in one piece
_SPARE_TOKENS: Final = 64
_ENOUGH_TRIES: Final = 4  # with as many controls, the fewest that chance cannot explain
_LONG_ENOUGH_S: Final = 30.0  # after which no further try begins once there are enough
_PHASES: Final = 3  # of a try: before, as long after, and some to spare
_LASTS: Final = 4  # times as long as a witness must last: it serves for several tries
_TURNS: Final = 3  # times as long as alone a prompt may take while others run
_AS_ALONE: Final = 1.25  # times the idle step, at which nothing else is computed
_NEAR_END: Final = 0.8  # of the time that is left to an answer
_SURELY: Final = 2  # times as long as at its pace, after which an answer has ended


class Gap(NamedTuple):
    """A gap between two tokens, or two pieces of several: its start and its seconds per token."""

    since_s: float
    pace_s: float


def gaps_of(times_ns: Sequence[int], fast_s: float = 0.0) -> list[Gap]:
    """Tokens that were read together share the gap before them."""
    pieces: list[list[float]] = []  # when, and how many tokens
    for at_ns in times_ns:
        at_s = at_ns / 1e9
        if pieces and at_s - pieces[-1][0] <= _TOGETHER * fast_s:
            pieces[-1][1] += 1
        else:
            pieces.append([at_s, 1])
    return [
        Gap(early_s, (late_s - early_s) / tokens)
        for (early_s, _), (late_s, tokens) in pairwise(pieces)
    ]


def find_change(gaps: Sequence[Gap], slow_s: float, fast_s: float) -> int | None:
    """The first gap at the fast pace, by the least sum of distances from both paces: no single gap
    decides. None: the pace did not change."""
    better = [abs(gap.pace_s - slow_s) - abs(gap.pace_s - fast_s) for gap in gaps]
    costs = list(accumulate(better, initial=0.0))
    first = costs.index(min(costs))
    return first if len(gaps) - first >= _FEWEST_GAPS else None


def back_after_s(
    times_ns: Sequence[int], t0_ns: int, *, slow_s: float, fast_s: float
) -> float | None:
    """The time from t0 to the beginning of the first step at the fast pace, at least 0; None: it
    did not come back. `times_ns`: of the witness, before and after t0."""
    after = [gap for gap in gaps_of(times_ns, fast_s) if gap.since_s + gap.pace_s > t0_ns / 1e9]
    if not after or (first := find_change(after, slow_s, fast_s)) is None:
        return None
    return max(0.0, after[first].since_s - t0_ns / 1e9)


class PaceWatcher:
    """`alone_s`: the pace alone; `beside_s`: the pace while `others` more streams run, both in
    seconds per token. `ratio`: the second over the first, once measured."""

    way: JudgingWay = "pace"

    def __init__(
        self, streams: Streams, rng: random.Random, *, most_others: int = MOST_OTHERS
    ) -> None:
        self._streams = streams
        self._rng = rng
        self._most = most_others
        self._witness: LiveStream | None = None
        self._prompt_s = 0.0  # that the prompt of a stream takes that leaves alone
        self._full_s: dict[int, list[float]] = {}  # by the number of other streams, once measured
        self.others, self.ratio = 0, 1.0
        self.alone_s = self.beside_s = streams.step_s

    def can_judge(self, facts: ServerFacts) -> str | None:
        """Whether others slow a stream is known only once they run: `holds` finds that out."""
        if facts.slots == 1:
            return "pace needs two streams at once, and this server runs one"
        return None

    def holds(self, leaver: Leaver, tries: int) -> Holds:
        if leaver.is_alone and not leaver.is_early:
            raise CannotDecideError("pace needs many streams that leave at once")
        self._find_alone()
        end = partial(self._end_prompt, leaver) if leaver.is_alone else self._end_others
        back_s, stall_s = self._slow_down(end, 1 if leaver.is_alone else self._most)
        controls_s, control_stalls_s = [back_s], [stall_s]
        tries_s, stalls_s = list[float | None](), list[float]()
        naturals_s = list[float]()
        until_s = time.perf_counter() + _LONG_ENOUGH_S
        while len(tries_s) < tries or tries_s[-1:] == [None]:
            number = len(tries_s)
            is_enough = number >= _ENOUGH_TRIES and tries_s[-1] is not None
            if is_enough and time.perf_counter() > until_s:
                break
            if number:
                self._renew_witness()
                came_back_s, stall_s = self._after(end)
                controls_s.append(self._came_back(came_back_s))
                control_stalls_s.append(stall_s)
            self._renew_witness()
            others = self._begin(leaver)
            self._streams.together([partial(leaver.ready, one, number) for one in others])
            left = [one.spec.max_tokens - one.tokens for one in others]
            naturals_s.append(self.beside_s * min(left))
            is_unary = leaver.spec.delivery is Delivery.UNARY
            have_begun = is_unary or all(one.tokens for one in others)  # else prompts slow the rest
            came_back_s, stall_s = self._after(partial(self._leave, leaver, others))
            tries_s.append(came_back_s)
            stalls_s += [stall_s] if have_begun else []
            if has_no_end(tries_s):
                break
            if came_back_s is None:
                self._outlast(max(left))
        return Holds(
            way=self.way,
            tries_s=tries_s,
            controls_s=controls_s,
            floor_s=self.beside_s,
            waited_s=self._waited_s,
            natural_s=min(naturals_s, default=None),
            stalls_s=stalls_s,
            control_stalls_s=control_stalls_s,
        )

    def _outlast(self, tokens: int) -> None:
        """Waits until answers with `tokens` tokens left at the last leave have ended: they slow
        each other, so their steps are as long as those of the witness beside them."""
        ends_s = time.perf_counter() - self._waited_s + SLOWER * self.beside_s * tokens
        self._streams.wait_for_ghosts(lambda: False)
        self._streams.pause(max(0.0, ends_s - time.perf_counter()))

    @property
    def _waited_s(self) -> float:
        return self._streams.patience.probe_s + _AFTER_GAPS * self.alone_s

    def _renew_witness(self) -> None:
        """Before other streams begin, have a witness that lasts while they come and go. An old
        witness ends by itself first: if it left, it might still slow the new one."""
        server, old = self._streams, self._witness
        seconds = _PHASES * self._waited_s + self.others * server.ttft_s + 2 * self._prompt_s
        tokens = int(seconds / server.step_s) + _SPARE_TOKENS
        if old is not None and not old.has_ended:
            left = old.spec.max_tokens - old.tokens
            if left >= tokens:
                return
            old.join(READY_S + left * server.step_s)
        wanted = server.short(_LASTS * tokens, role=Role.PROBE)
        self._witness = witness = server.start(wanted)
        if not witness.wait_tokens(2, server.patience.filler_s):
            raise CannotDecideError(f"a stream did not begin: {end_of(witness)}")

    def _find_alone(self) -> list[float]:
        """The paces of a witness alone. Answers that this run left may run on: they are awaited."""
        paces_s = list[float]()

        def are_gone() -> bool:
            self._renew_witness()
            paces_s[:] = self._paces()
            return median(paces_s) <= _AS_ALONE * self._streams.step_s

        if not are_gone():
            self._streams.wait_for_ghosts(are_gone)
            are_gone()
        self.alone_s = median(paces_s)
        return paces_s

    def _paces(self) -> list[float]:
        """The paces of the witness's next gaps, in seconds per token."""
        witness = self._witness
        assert witness is not None
        since = witness.tokens
        if not witness.wait_tokens(since + _SHOWN_GAPS + 1, READY_S):
            raise CannotDecideError(f"a stream had no token for long: {end_of(witness)}")
        gaps = gaps_of(witness.token_times_ns[since:], self._streams.step_s)
        if len(gaps) < _FEWEST_GAPS:
            raise CannotDecideError("the streams show no step: their tokens come in one piece")
        return [gap.pace_s for gap in gaps]

    def _slow_down(self, end: Callable[[], int], most: int) -> tuple[float, float]:
        """Find the number of other streams, at most `most`, that slows the witness by half. They
        end by themselves: this is the first control. Raises CannotDecideError if there is none."""
        slots = self._streams.facts.slots
        most = most if slots is None else min(most, slots - 1)
        self.others = min(most, FIRST_OTHERS)
        while True:
            self._renew_witness()
            back_s, stall_s = self._after(end)
            self.ratio = self.beside_s / self.alone_s
            if self.ratio >= LEAST_RATIO:
                return self._came_back(back_s), stall_s
            if self.others >= most:
                raise self._too_fast(self.others)
            self.others = min(most, 2 * self.others)

    def held(self, leave: Callable[[], int]) -> int:
        """`leave` makes some streams leave and returns their number. Returns how many of them are
        still computed when the settle time is over and near their natural ends, and no longer
        after these ends. Raises CannotDecideError if that number of streams does not slow the
        witness by half."""
        server = self._streams
        alone_s = self._find_alone()
        since_ns = time.perf_counter_ns()
        left = leave()
        server.pause(server.settle_s)
        after_s = self._beside_nothing()
        near_s, end_s = self._natural_ends(since_ns, median(after_s))
        late_s, ended_s = follow_slowness(
            alone_s,
            after_s,
            self._beside_nothing,
            time.perf_counter,
            near_s=near_s,
            end_s=end_s,
        )
        full_s = self._full_s.setdefault(left, [])
        if not full_s:
            self._renew_witness()
            full_s += self._paces_beside_enders(left)
        self.ratio = median(full_s) / self.alone_s
        if self.ratio < LEAST_RATIO:
            raise self._too_fast(left)
        return still_computed(left, full_s, alone_s, after_s, late_s, ended_s, self._rng)

    def _natural_ends(self, since_ns: int, step_s: float) -> tuple[float, float]:
        """Two moments for the answers left since then, if they run on at this pace: one near the
        end of most of them, and one when all must have ended."""
        server, now_s = self._streams, time.perf_counter()
        rows = [(one.spec.max_tokens, one.spec.n, one.row) for one in server.opened]
        ends_s = [
            row.abandoned_ns / 1e9 + step_s * (tokens - row.tokens_read / n)
            for tokens, n, row in rows
            if row is not None and row.abandoned_ns is not None and row.abandoned_ns >= since_ns
        ]
        lasts_s = step_s * server.patience.answer_tokens
        near_s = median(ends_s) if ends_s else now_s + lasts_s - server.settle_s
        end_s = max([now_s + lasts_s, *ends_s])
        return now_s + _NEAR_END * (near_s - now_s), now_s + _SURELY * (end_s - now_s)

    def check_alone(self) -> None:
        """Raises CannotDecideError if a stream is slow though all others must have ended."""
        self._find_alone()
        if self.alone_s > _AS_ALONE * self._streams.step_s:
            raise CannotDecideError(
                f"when all answers must have ended, a step takes {quantity(self.alone_s, 's')}, "
                f"and {quantity(self._streams.step_s, 's')} at the beginning: another load, or "
                "answers that never end"
            )

    def _beside_nothing(self) -> list[float]:
        self._renew_witness()
        return self._paces()

    def _too_fast(self, others: int) -> CannotDecideError:
        what = f"{others} others run" if others > 1 else "another prompt is computed"
        return CannotDecideError(
            f"by pace it cannot be seen here: while {what}, a stream is {self.ratio:.2f} times as "
            f"slow as alone, and {LEAST_RATIO:g} times is needed"
        )

    def _came_back(self, back_s: float | None) -> float:
        if back_s is None:
            raise CannotDecideError(
                "the pace does not come back after the others have ended by themselves either"
            )
        return back_s

    def _begin(self, leaver: Leaver) -> list[LiveStream]:
        others = [leaver.begin(leaver.spec) for _ in range(self.others)]
        if leaver.is_early:
            return others
        if leaver.spec.delivery is Delivery.UNARY:
            self._streams.pause((1 + self.others) * self._streams.ttft_s + 4 * self.beside_s)
            return others
        waiting = without_token(others, self._begin_s(len(others)))
        if waiting:
            for one in others:
                one.leave()
            raise CannotDecideError(
                f"{len(waiting)} of {self.others} streams did not begin: {end_of(waiting[0])}"
            )
        return others

    def _begin_s(self, count: int) -> float:
        """How long `count` streams are waited for, whose prompts take turns."""
        server = self._streams
        return server.patience.filler_s + _TURNS * count * server.ttft_s

    def _leave(self, leaver: Leaver, others: Sequence[LiveStream]) -> int:
        if not leaver.is_early:
            self._streams.pause(self._rng.random() * self.beside_s)
        for one in others:
            leaver.leave(one)
        join_all(others, READY_S)
        left_ns = [one.abandoned_ns for one in others if one.abandoned_ns is not None]
        if len(left_ns) < len(others):
            raise CannotDecideError("a stream that was to leave ended by itself")
        return max(left_ns)

    def _end_others(self) -> int:
        """`others` streams run, and end by themselves together; returns the last end, in ns.
        Sets `beside_s` to the pace while all of them run."""
        others = self._begin_enders(self.others)
        self.beside_s = median(self._paces())
        return self._end(others)

    def _end_prompt(self, leaver: Leaver) -> int:
        """A request like the leaver's ends with its first token; returns that moment, in ns.
        Sets `beside_s` to the pace while its prompt is computed."""
        witness = self._witness
        assert witness is not None
        since = witness.tokens
        prompt = leaver.begin(replace(leaver.spec, max_tokens=1))
        ended_ns = self._end([prompt])
        began_ns = prompt.spec.intended_start_ns
        self._prompt_s = (ended_ns - began_ns) / 1e9
        gaps = gaps_of(witness.token_times_ns[since:], self._streams.step_s)
        paces_s = [gap.pace_s for gap in gaps if began_ns / 1e9 <= gap.since_s < ended_ns / 1e9]
        if len(paces_s) < _FEWEST_GAPS:
            raise CannotDecideError("a prompt is computed within a few tokens of another stream")
        self.beside_s = median(paces_s)
        return ended_ns

    def _paces_beside_enders(self, count: int) -> list[float]:
        others = self._begin_enders(count)
        paces_s = self._paces()
        self._end(others)
        return paces_s

    def _begin_enders(self, count: int) -> list[LiveStream]:
        """Begin `count` streams that last at least twice as long as a pace takes to measure."""
        server = self._streams
        tokens = int((1 + count) * server.ttft_s / server.step_s) + 2 * _SHOWN_GAPS
        others = [server.start(server.short(tokens)) for _ in range(count)]
        if without_token(others, self._begin_s(count)):
            raise CannotDecideError(f"{count} streams do not run at once on this server")
        return others

    def _end(self, others: Sequence[LiveStream]) -> int:
        if None in join_all(others, READY_S):
            raise CannotDecideError(f"short requests were not answered in {READY_S:g} s")
        return max(one.last_token_ns or 0 for one in others)

    def _after(self, act: Callable[[], int]) -> tuple[float | None, float]:
        """What the witness saw after the act's moment: when its pace came back, and its longest
        gap."""
        t0_ns = act()
        witness = self._witness
        assert witness is not None
        until_s = t0_ns / 1e9 + self._waited_s
        back_s = None
        while back_s is None and (left_s := until_s - time.perf_counter()) > 0:
            witness.wait_tokens(witness.tokens + _AFTER_GAPS, left_s)
            if witness.has_ended:
                raise CannotDecideError(f"the stream that shows the pace ended: {end_of(witness)}")
            back_s = self._back(witness, t0_ns)
        after = [gap for gap in gaps_of(witness.token_times_ns) if gap.since_s >= t0_ns / 1e9]
        return back_s, max((gap.pace_s for gap in after), default=0.0)

    def _back(self, witness: LiveStream, t0_ns: int) -> float | None:
        times_ns = witness.token_times_ns
        return back_after_s(times_ns, t0_ns, slow_s=self.beside_s, fast_s=self.alone_s)
