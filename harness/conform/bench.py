"""The bench of every case: streams on a server, the experiments on them, and what reads its pages.

The methods need no metrics, see docs/conform.md:

    P  probe behind full slots, or another way: `recoveries` (harness/conform/recoveries.py).
    O  occupancy: `occupancy`.
    K  capacity: `capacity`.
    B  bystander: greedy streams while clients leave, against a control in which nobody does.
    R  repeat: what the next request gets.
    W  wire: what the client saw.       C  counters: the server's own.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import httpx

from harness.client.http2 import Http2Client, NoHttp2Error
from harness.client.lag import LagWatch
from harness.client.session import LoadSession
from harness.client.wire_log import WireLog
from harness.collect.source import SourceError
from harness.conform.cleaning import Cleaning
from harness.conform.known import Known
from harness.conform.messages import SuiteRequest
from harness.conform.pages import MetricsPages
from harness.conform.recoveries import Recoveries
from harness.experiments.admission import Admission
from harness.experiments.capacity import Capacity
from harness.experiments.filling import Filling
from harness.experiments.full_slots import FullSlots
from harness.experiments.gauge import GaugeWatcher
from harness.experiments.held import Held
from harness.experiments.idle_server import MOST_SLOTS, ServerFacts, find_facts
from harness.experiments.occupancy import Occupancy
from harness.experiments.outcome import CannotDecideError, RefusedError
from harness.experiments.pace import PaceWatcher
from harness.experiments.quiet import Meter, QuietWatcher, meters_of
from harness.experiments.streams import Streams
from harness.http_client import read_api_key

SOME_STREAMS: Final = 8  # that run meanwhile, on a server without a known number of slots
CROWD: Final = 16  # clients that come at once, on such a server


class Bench(Streams):
    """`tries`: of a case that is judged by method P. `rng`: seeded anew for each case. `known`:
    what the cases before have shown."""

    def __init__(
        self,
        session: LoadSession,
        facts: ServerFacts,
        asked: SuiteRequest,
        lag: LagWatch,
        wire: WireLog,
        pages: MetricsPages,
        known: Known | None = None,
    ) -> None:
        super().__init__(session, facts, asked.settle_s, lag=lag)
        self.asked = asked
        self.tries, self.is_quick = asked.tries, asked.quick
        self.wire = wire
        self.pages = pages
        self.known = known or Known()
        self.rng = random.Random(asked.seed)
        self.filling = Filling(self)
        self.full_slots = FullSlots(self, self.filling, self.rng)
        self.occupancy = Occupancy(self)
        self.capacity = Capacity(self)
        gauge, pace = GaugeWatcher(self, pages.judged, self.rng), PaceWatcher(self, self.rng)
        quiet = QuietWatcher(self, _meters_of(asked.pid), self.rng)
        self.held = Held(self, self.occupancy, gauge, quiet, pace)
        self.recoveries = Recoveries(
            self.full_slots,
            self.filling,
            self,
            tries=asked.tries,
            wire=wire,
            occupancy=self.occupancy,
            watchers=[
                Admission(self, self.filling, self.full_slots, self.rng),
                gauge,
                pace,
                quiet,
            ],
        )
        self.cleaning = Cleaning(self, self.occupancy)

    def limit_tries(self, most: int | None = None) -> None:
        """Method P makes at most `most` tries from here on; without `most`, as many as were asked
        for."""
        self.tries = min(self.asked.tries, most or self.asked.tries)
        self.recoveries.tries = self.tries

    @property
    def crowded(self) -> int:
        """As many clients as slots; where these cannot be filled, a crowd."""
        return self.crowd(MOST_SLOTS if self.facts.can_fill else CROWD)

    @property
    def beside(self) -> int:
        """How many long streams leave one slot free; a fixed number where slots cannot be
        filled."""
        return self.crowd(MOST_SLOTS) - 1 if self.facts.can_fill else SOME_STREAMS

    def session_that_keeps(self) -> LoadSession:
        """A session whose connections carry one request after the other; the caller closes it."""
        plan = self.session.plan
        run = plan.run.model_copy(update={"keep_alive": True})
        return self.session.with_plan(plan.model_copy(update={"run": run}))

    @contextmanager
    def over_http2(self) -> Iterator[None]:
        """All requests go over HTTP/2. Raises RefusedError if the server does not speak it."""
        usual = self.session
        plan = usual.plan
        self.session = session = usual.with_plan(plan)
        session.client = client = Http2Client(
            plan, api_key=read_api_key(plan.api_key_env), wire=self.wire
        )
        try:
            client.connection(client.frontend_of(0))
            yield
        except NoHttp2Error as error:
            raise RefusedError(f"the server speaks no HTTP/2: {error}") from error
        except httpx.TransportError as error:
            raise CannotDecideError(f"no connection for HTTP/2: {error}") from error
        finally:
            self.end()
            session.close()
            self.session = usual

    def past_the_proxy(self) -> "Bench":
        """A bench on the server behind the proxy. Raises CannotDecideError if that is not known."""
        if self.asked.direct is None:
            raise CannotDecideError("the server behind the proxy is not known (--direct URL)")
        session = self.session.with_plan(self.session.plan.at(self.asked.direct))
        facts = find_facts(session, slots=self.slots, context=self.facts.context)
        return Bench(session, facts, self.asked, self.lag, self.wire, self.pages)


def _meters_of(pid: int | None) -> list[Meter]:
    try:
        return [] if pid is None else meters_of(pid)
    except SourceError:
        return []
