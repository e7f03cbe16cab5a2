"""What the users of a cell ask for: each request is drawn when it is sent, by the live load's own
rules, so that a seed means the same requests.

Only `simulated` of the `replicas` get requests; the other replicas' arrivals are left out. A random
router gives an arrival to each replica with equal chance, a round robin to each in turn. Of the
users of a closed loop, a share is drawn. Every cell goes through all arrivals, and takes its own.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, cycle
from typing import Final, NamedTuple

from harness.simulate.plan import Plan
from harness.workload.abandon import RequestSpec
from harness.workload.arrivals import OpenArrivals, RateArrivals
from harness.workload.observed_latency import ObservedLatency
from harness.workload.schedule import Arrival, planned_arrivals
from harness.workload.session import Said
from harness.workload.session_user import SessionUser
from reference_engine.model.tokenizer import FIRST_WORD

_OWN: Final = 1000  # tokens of a prompt's own are above all others
_USER_BITS: Final = 32  # of a token of a session: its user, before the number of the request


class SimulatedRequest(NamedTuple):
    """`number`: the request's own in its cell. Its prompt begins with `shared_tokens` that all
    requests share, or is made of numbered `pages` of `page_tokens` each (a trace). A turn's prompt
    is its whole context, in which an answer's tokens are those that the engine made."""

    number: int
    spec: RequestSpec
    shared_tokens: int
    pages: Sequence[int] = ()
    page_tokens: float = 0.0

    def prompt(self) -> list[int]:
        """Tokens that are equal to those of another prompt where the two prompts are equal."""
        shared, tokens = self.shared_tokens, self.spec.prompt_tokens
        if (turn := self.spec.turn) is not None:
            own = Said(turn.n, "user", turn.own_tokens)
            return [token for said in (*turn.earlier, own) for token in self._tokens_of(said)]
        if not self.pages:
            prompt = [1] * shared + [self.number + _OWN] + [2] * (tokens - shared - 1)
            return prompt[:tokens]
        prompt = []
        for place, page in enumerate(self.pages, start=1):
            is_last = place == len(self.pages)
            end = tokens if is_last else min(round(place * self.page_tokens), tokens)
            prompt += [page + _OWN] * (end - len(prompt))
        return prompt

    def _tokens_of(self, said: Said) -> list[int]:
        if said.by == "assistant":
            return [FIRST_WORD] * said.tokens
        is_first = self.spec.turn is None or said == (*self.spec.turn.earlier, said)[0]
        shared = self.shared_tokens if is_first else 0
        own = _OWN + (self.spec.user << _USER_BITS) + said.n
        return [1] * shared + [own] + [2] * (said.tokens - shared - 1)


class Asking:
    """The requests of one cell."""

    def __init__(self, plan: Plan, cell: int) -> None:
        self._plan, self._cell = plan, cell
        self._load, self._seed = plan.load, plan.workload.run.seed
        self._sessions: dict[int, SessionUser] = {}

    def users(self) -> Sequence[int]:
        """The users of a closed loop."""
        users, share = range(self._plan.workload.run.users), self._plan.cluster.share
        if share == 1:
            return users
        rng = random.Random(f"{self._seed}/thinning")
        return sorted(rng.sample(users, max(1, round(share * len(users)))))

    def of_user(self, user: int, n: int, *, number: int, seen: ObservedLatency) -> SimulatedRequest:
        """The n-th request of a user of a closed loop."""
        if self._load.session is not None:
            spec = self.session_of(user).next_turn(seen)
        else:
            spec = self._load.draw_request(seed=self._seed, user=user, n=n, seen=seen)
        return SimulatedRequest(number, spec, self._shared(spec))

    def session_of(self, user: int) -> SessionUser:
        if user not in self._sessions:
            self._sessions[user] = SessionUser(self._load, seed=self._seed, user=user)
        return self._sessions[user]

    def arrivals(self, arrivals: OpenArrivals) -> Iterator[Arrival]:
        """Raises ConfigError if a trace cannot be read."""
        cell_of = _cell_of(self._plan, random.Random(f"{self._seed}/router"))
        found = _simulated(self._plan, arrivals)
        return (one for one in found if cell_of(one.number) == self._cell)

    def on_arrival(self, arrival: Arrival, *, seen: ObservedLatency) -> SimulatedRequest:
        spec = arrival.draw_request(self._load, seed=self._seed, seen=seen)
        replayed = arrival.replayed
        if replayed is None or not replayed.pages:
            return SimulatedRequest(arrival.number, spec, self._shared(spec))
        return SimulatedRequest(arrival.number, spec, 0, replayed.pages, replayed.page_tokens)

    def _shared(self, spec: RequestSpec) -> int:
        return min(spec.shared_tokens, spec.prompt_tokens)


def _simulated(plan: Plan, arrivals: OpenArrivals) -> Iterator[Arrival]:
    seed = plan.workload.run.seed
    skipped = _skipped(plan, random.Random(f"{seed}/thinning"))
    if isinstance(arrivals, RateArrivals):
        rng = random.Random(f"{seed}/arrivals")
        return (Arrival(number=n, offset_s=s) for n, s in arrivals.thinned(rng, skipped))
    return _kept(planned_arrivals(arrivals, plan.load, seed=seed), skipped)


def _skipped(plan: Plan, rng: random.Random) -> Callable[[], int]:
    """How many arrivals of replicas that are not simulated come before the next."""
    cluster = plan.cluster
    if cluster.share == 1:
        return lambda: 0
    if plan.takes_turns:
        rest = cluster.replicas - cluster.num_simulated
        turns = chain([0], cycle([*[0] * (cluster.num_simulated - 1), rest]))
        return lambda: next(turns)
    log_missed = math.log1p(-cluster.share)
    return lambda: int(math.log(1 - rng.random()) / log_missed)


def _kept(arrivals: Iterator[Arrival], skipped: Callable[[], int]) -> Iterator[Arrival]:
    left_out = skipped()
    for arrival in arrivals:
        if left_out:
            left_out -= 1
            continue
        yield arrival
        left_out = skipped()


def _cell_of(plan: Plan, rng: random.Random) -> Callable[[int], int]:
    if plan.num_cells == 1:
        return lambda _number: 0
    if plan.takes_turns:
        return lambda number: number % plan.cluster.replicas
    return lambda _number: rng.randrange(plan.num_cells)
