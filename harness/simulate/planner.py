"""From a workload to a simulation's plan: every request drawn beforehand, and each replica's share.

The draws are those of a live run, so that a seed means the same requests. A decision that a live
user takes by what it has seen stays open in the plan: a share of the time to first token, and the
length of a step. A closed loop gets so many requests a user as last the load, if each takes no
longer than its tokens in steps of the least length, or than failing and giving up do, where they
may happen.

Where the router does not look at the load, replicas have nothing to do with each other, and each is
a cell of its own. Only `simulated` of the `replicas` are planned: those of a random router get each
arrival with equal chance, those of a round robin each arrival in turn.
"""

import math
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, count, cycle
from typing import Any, Final

from harness.errors import ConfigError
from harness.records import Protocol
from harness.simulate.machine import Machine
from harness.workload.abandon import RequestSpec, StayPlan, TaskPlan
from harness.workload.arrivals import OpenArrivals, RateArrivals
from harness.workload.cluster import UNLOOKING, ClusterSettings
from harness.workload.load import AbandonLoad
from harness.workload.observed_latency import ObservedLatency
from harness.workload.schedule import Arrival, planned_arrivals
from harness.workload.tasks import TaskText
from harness.workload.workload import Workload

MOST_PLANNED: Final = 20_000_000
_FEWEST_OF_TEXT: Final = 10  # a classification ends there, label or not; other tasks later
RETRY_PAUSE_S: Final = 0.5  # of a user whose request failed, as live
_TTFT_NS: Final = 1_000_000_000  # stands for the time to first token, which is not known yet

Row = dict[str, Any]  # of `planned.parquet`


class _UnitTtft(ObservedLatency):
    """A pause drawn as a share of the time to first token is then that share, in units of it."""

    def ttft_ns(self) -> int:
        return _TTFT_NS


@dataclass(frozen=True, kw_only=True)
class Planner:
    """`load` and `arrivals` with their files read, as the load process gets them."""

    workload: Workload
    load: AbandonLoad
    arrivals: OpenArrivals | None
    machine: Machine
    arm: str

    @property
    def cluster(self) -> ClusterSettings:
        return self.workload.simulate or ClusterSettings()

    @property
    def num_cells(self) -> int:
        """Outages, closed-loop users, and an end after so many abandons tie replicas together."""
        is_tied = bool(self.cluster.outages) or self.load.stop_after_abandons is not None
        is_apart = self.cluster.router in UNLOOKING and not is_tied
        return self.cluster.num_simulated if is_apart and self.arrivals is not None else 1

    @property
    def replicas_of_cell(self) -> int:
        return self.cluster.num_simulated // self.num_cells

    @cached_property
    def texts(self) -> list[TaskText]:
        plans = (plan for plan in self.load.leavers if isinstance(plan, TaskPlan))
        return list(dict.fromkeys(text for plan in plans for text in plan.texts))

    @cached_property
    def _number_of_text(self) -> dict[TaskText, int]:
        return {text: number for number, text in enumerate(self.texts)}

    def rows(self) -> Iterator[Row]:
        """In the order of sending within each user. Raises ConfigError if there are too many."""
        rows = self._closed() if self.arrivals is None else self._open(self.arrivals)
        for number, row in enumerate(rows):
            if number == MOST_PLANNED:
                raise ConfigError(
                    f"workload {self.workload.name}: more than {MOST_PLANNED:,} requests; make the "
                    "load shorter, or simulate fewer of the replicas (--simulated)"
                )
            yield row

    def _open(self, arrivals: OpenArrivals) -> Iterator[Row]:
        seed, seen = self.workload.run.seed, _UnitTtft()
        for cell, arrival in self._arrivals(arrivals):
            spec = arrival.draw_request(self.load, seed=seed, seen=seen)
            row = self._row(cell, arrival.number, spec)
            row["offset_s"] = arrival.offset_s
            if (replayed := arrival.replayed) is not None and replayed.pages:
                row["pages"], row["page_tokens"] = list(replayed.pages), replayed.page_tokens
            yield row

    def _arrivals(self, arrivals: OpenArrivals) -> Iterator[tuple[int, Arrival]]:
        seed = self.workload.run.seed
        if isinstance(arrivals, RateArrivals):
            skipped = self._skipped(random.Random(f"{seed}/thinning"))
            rng = random.Random(f"{seed}/arrivals")
            found: Iterator[Arrival] = (
                Arrival(number=n, offset_s=s) for n, s in arrivals.thinned(rng, skipped)
            )
        else:
            found = self._kept(planned_arrivals(arrivals, self.load, seed=seed))
        cell_of = self._cell_of(random.Random(f"{seed}/router"))
        return ((cell_of(one.number), one) for one in found)

    def _skipped(self, rng: random.Random) -> Callable[[], int]:
        """How many arrivals of replicas that are not simulated come before the next."""
        cluster = self.cluster
        if cluster.share == 1:
            return lambda: 0
        if self._takes_turns:
            rest = cluster.replicas - cluster.num_simulated
            turns = chain([0], cycle([*[0] * (cluster.num_simulated - 1), rest]))
            return lambda: next(turns)
        log_missed = math.log1p(-cluster.share)
        return lambda: int(math.log(1 - rng.random()) / log_missed)

    def _kept(self, arrivals: Iterator[Arrival]) -> Iterator[Arrival]:
        skipped = self._skipped(random.Random(f"{self.workload.run.seed}/thinning"))
        left_out = skipped()
        for arrival in arrivals:
            if left_out:
                left_out -= 1
                continue
            yield arrival
            left_out = skipped()

    @property
    def _takes_turns(self) -> bool:
        return self.cluster.router == "round_robin" and self.num_cells == self.cluster.num_simulated

    def _cell_of(self, rng: random.Random) -> Callable[[int], int]:
        if self.num_cells == 1:
            return lambda _number: 0
        if self._takes_turns:
            return lambda number: number % self.cluster.replicas
        return lambda _number: rng.randrange(self.num_cells)

    def _closed(self) -> Iterator[Row]:
        numbers, run = count(), self.workload.run
        for user in self._users():
            passed_s = 0.0
            leaves = 0
            for n in count():
                spec = self.load.draw_request(seed=run.seed, user=user, n=n, seen=_UnitTtft())
                yield self._row(0, next(numbers), spec)
                passed_s += self._least_s(spec)
                leaves += spec.planned_abandon is not None
                is_last = leaves == self.load.stop_after_abandons and self._shortest_s is None
                if passed_s >= run.max_seconds or is_last:
                    break

    def _users(self) -> Sequence[int]:
        users, share = range(self.workload.run.users), self.cluster.share
        if share == 1:
            return users
        rng = random.Random(f"{self.workload.run.seed}/thinning")
        return sorted(rng.sample(users, max(1, round(share * len(users)))))

    def _least_s(self, spec: RequestSpec) -> float:
        cost, lags = self.machine.cost, self.machine.lags
        assert lags is not None
        tokens = spec.max_tokens if spec.planned_abandon is None else spec.planned_abandon
        if spec.text is not None:  # early stopping may end it before its answer is complete
            tokens = min(spec.text.num_answer, _FEWEST_OF_TEXT)
        stays_s = cost.step_s(prefill=0, decode=1, context=0) * -(-tokens // spec.n)
        waits_s = spec.pause / 1e9 if isinstance(spec.pause, int) and not _of_ttft(spec) else 0.0
        # A user that leaves at once still sends: no request is shorter than half a step.
        least_s = max(stays_s, cost.fixed_s / 2) + waits_s + lags.send_s[0]
        return least_s if self._shortest_s is None else min(least_s, self._shortest_s)

    @property
    def _shortest_s(self) -> float | None:
        """The least time that a request takes which fails or which its user gives up, with the
        pause after it; None where no request does."""
        run, load = self.workload.run, self.load
        pause_s = load.retry_pause_s if load.ask_again_after else RETRY_PAUSE_S
        limits = (run.first_token_timeout_s, run.total_timeout_s)
        found = [limit + pause_s for limit in limits if limit is not None]
        if self.cluster.outages or self.workload.engine.faults:
            found.append(RETRY_PAUSE_S)
        return min(found, default=None)

    def _row(self, cell: int, number: int, spec: RequestSpec) -> Row:
        pause = 0 if _of_ttft(spec) else spec.pause
        return {
            "cell": cell,
            "number": number,
            "user": spec.user,
            "offset_s": None,
            "prompt_tokens": spec.prompt_tokens,
            "shared_prefix_tokens": min(self.load.shared_prefix_tokens, spec.prompt_tokens),
            "pages": None,
            "page_tokens": None,
            "max_tokens": spec.max_tokens,
            "stay_tokens": self.load.stay_tokens if _of_ttft(spec) else None,
            "stream": spec.delivery == "stream",
            "n": spec.n,
            "role": spec.role.value,
            "plan": spec.plan,
            "way": "" if spec.way is None else spec.way.value,
            "leave_after_tokens": spec.planned_abandon,
            "pause": pause if isinstance(pause, str) else "ns",
            "pause_ns": None if isinstance(pause, str) else pause,
            "think_fraction": spec.think_fraction,
            "ttft_share": _ttft_share(spec),
            "arm": self.arm,
            "text": None if spec.text is None else self._number_of_text[spec.text],
        }


def _of_ttft(spec: RequestSpec) -> bool:
    return spec.plan.startswith("prefill:")


def _ttft_share(spec: RequestSpec) -> float | None:
    return spec.pause / _TTFT_NS if isinstance(spec.pause, int) and _of_ttft(spec) else None


def refuse_unknown(workload: Workload, ways: Collection[str]) -> None:
    """Raises ConfigError for what a simulation cannot do; `ways`: of leaving, with known lags."""
    why = next(_refusals(workload, ways), None)
    if why is not None:
        raise ConfigError(f"workload {workload.name} cannot be simulated: {why}")


def _refusals(workload: Workload, ways: Collection[str]) -> Iterator[str]:
    load = workload.load
    if not isinstance(load, AbandonLoad):
        yield f"a load of kind `{load.kind}` is directed by what it sees; only `abandon` is planned"
        return
    engine, run = workload.engine, workload.run
    for key, is_set, what in (
        ("load.canaries", load.canaries, "no text is made, so there is no known answer"),
        ("load.kill", load.kill is not None, "take `[[simulate.outages]]`"),
        ("load.protocol", load.protocol is Protocol.GRPC, "the way over gRPC was not measured"),
        ("run.loops", run.loops > 1, "each simulation begins anew"),
        ("engine.workers", engine.has_tiers, "take `simulate.replicas`"),
    ):
        if is_set:
            yield f"`{key}`: {what}"
    for plan in load.leavers:
        if plan.n > 1:
            yield f"plan `{plan.plan}`: `n` is {plan.n}, and a simulated request has one answer"
        if not isinstance(plan, StayPlan) and plan.way.value not in ways:
            known = ", ".join(sorted(ways))
            yield f"way `{plan.way}`: the lags have no `detect_s` of it; they have: {known}"
