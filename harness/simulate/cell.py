"""A cell: some replicas behind one router, and the users that come there, until the load has ended
and the engines have settled.

A cell depends on nothing but the plan, its number and its rows. So its rows are equal byte by byte,
wherever it is computed, and whatever is computed alongside.
"""

from collections.abc import Callable
from functools import partial
from typing import Final

from harness.simulate.agenda import Agenda, Kind
from harness.simulate.asking import Asking
from harness.simulate.frontend import Common, SimulatedFrontend
from harness.simulate.lags import NS, Lag
from harness.simulate.outage import Outages, coarse_shares
from harness.simulate.plan import Plan
from harness.simulate.replica import Replica, ReplicaDiedError, StepLags, Stepped
from harness.simulate.router import ReplicaRouter
from harness.simulate.rows import CellFacts, Gauges, Sink
from harness.simulate.users import Users
from harness.workload.observed_latency import StepEstimate
from reference_engine.model.runners import VOCAB_SIZE
from reference_engine.model.teacher import Teacher, TeacherLine
from reference_engine.protocol import StepRecord

START_NS: Final = 1_000_000_000
_ACTS_AT_ONCE: Final = 2000  # between two looks at the progress

# Takes the virtual time reached, and the facts so far.
Progress = Callable[[int, CellFacts], object]


class Cell:
    """`facts` say at any time how far it has come."""

    def __init__(self, plan: Plan, number: int, sink: Sink, asking: Asking | None = None) -> None:
        """`asking`: the plan's own, unless given. Raises ConfigError."""
        self._plan = plan
        self._number = number
        self._sink = sink
        self._agenda = Agenda()
        self._common = Common(plan, number, self._agenda, sink)
        self._step = StepEstimate()
        lags = plan.lags
        self._step_lags = StepLags(
            Lag(lags.step_s), Lag(lags.between_s), Lag(lags.schedule_s), lags.growth
        )
        self._end_ns: int | None = None
        self._num_steps = self._num_scheduled = self._num_generated = 0
        self._reached_ns = START_NS
        lines = [TeacherLine(prompt=plan.prompt_of(text), text=text.text) for text in plan.texts]
        self._teacher = Teacher(lines, VOCAB_SIZE) if lines else None
        self._boundaries: dict[Replica, int | None] = {}
        self.replicas: dict[str, Replica] = {}
        common = self._common
        router = ReplicaRouter(plan.cluster.router, common.random("router"))
        self.frontend = SimulatedFrontend(common, router, self._wake)
        self.users = self.frontend.clients = Users(
            common,
            asking or Asking(plan, number),
            frontend=self.frontend,
            step=self._step,
            stop=self._end_load,
        )
        self.frontend.drained = self._lose
        first = number * plan.replicas_of_cell
        names = [f"worker-{first + one}" for one in range(plan.replicas_of_cell)]
        for name in names:
            self._start(name, START_NS)
        self._outages = Outages(
            plan.cluster.outages, names, common.random("outages"), start_ns=START_NS
        )
        self._before = self._gauges()

    def run(self, progress: Progress) -> None:
        """Run up to the end. Whatever `progress` raises ends it earlier."""
        load_ns = START_NS + round(self._plan.load_s * NS)
        self._agenda.put(load_ns, Kind.LOAD_END, self._end_load)
        self._expect_outage()
        self.users.loop.begin(START_NS)
        while self._do_some():
            progress(self._reached_ns, self.facts(is_complete=False))
        self._reached_ns = self._last_ns
        self._sink.close(self.facts(is_complete=True))

    def cut_short(self) -> CellFacts:
        """End the load after an interrupted `run`; the rows so far are kept."""
        self._end_load(self._reached_ns)
        facts = self.facts(is_complete=False)
        self._sink.close(facts)
        return facts

    def facts(self, *, is_complete: bool) -> CellFacts:
        end_ns = self._end_ns or self._reached_ns
        users, plan = self.users, self._plan
        missed = users.loop.missed
        return CellFacts(
            cell=self._number,
            complete=is_complete,
            began_ns=START_NS,
            load_ended_ns=end_ns,
            reached_ns=self._reached_ns,
            planned=users.loop.planned,
            sent=users.sent,
            retries=users.retries,
            steps=self._num_steps,
            scheduled_tokens=self._num_scheduled,
            generated_tokens=self._num_generated,
            before=self._before,
            after=self._gauges(),
            missed_to_stay_s=[waited_s for waited_s, leaves in missed if not leaves],
            missed_to_leave_s=[waited_s for waited_s, leaves in missed if leaves],
            notes=coarse_shares(plan.cluster.outages, plan.replicas_of_cell),
        )

    # Replicas

    def _expect_outage(self) -> None:
        due_ns = self._outages.due_ns()
        if due_ns is not None:
            self._agenda.put(due_ns, Kind.OUTAGE, self._take_turns)

    def _take_turns(self, t_ns: int) -> None:
        outages = self._outages
        while outages.due_ns() == t_ns:
            turn = outages.take()
            if turn is None:
                continue
            replica = self.replicas.get(turn.worker)
            if turn.change == "back":
                self._start(turn.worker, t_ns)
            elif replica is None:
                self._outages.gone(turn.worker, t_ns)  # a fault has killed it before
            elif turn.change == "die":
                self._lose(replica, t_ns)
            else:
                self.frontend.drain(replica, t_ns)
        self._expect_outage()

    def _start(self, name: str, t_ns: int) -> None:
        replica = Replica(
            name,
            self._plan.engine,
            self._plan.faults,
            lags=self._step_lags,
            random=self._common.random(f"{name}/{t_ns}"),
            start_ns=t_ns,
            teacher=self._teacher,
        )
        self.replicas[name] = replica
        self._boundaries[replica] = None
        self.frontend.add(replica)

    def _lose(self, replica: Replica, t_ns: int) -> None:
        """It is dead, or drained."""
        if self.replicas.get(replica.name) is not replica:
            return
        del self.replicas[replica.name], self._boundaries[replica]
        self.frontend.lose(replica, t_ns)
        self._outages.gone(replica.name, t_ns)
        self._expect_outage()

    def _wake(self, replica: Replica) -> None:
        due_ns = replica.due_ns()
        planned_ns = self._boundaries[replica]
        if due_ns is not None and (planned_ns is None or due_ns < planned_ns):
            self._boundaries[replica] = due_ns
            self._agenda.put(due_ns, Kind.BOUNDARY, partial(self._boundary, replica))

    def _boundary(self, replica: Replica, t_ns: int) -> None:
        if self._boundaries.get(replica) != t_ns:
            return  # an earlier one took its place, or the replica is gone
        self._boundaries[replica] = None
        ended_ns = replica.log.ended_ns
        last_ns = ended_ns[-1] if ended_ns else None
        was_busy = replica.is_busy
        try:
            stepped = replica.step(t_ns)
        except ReplicaDiedError:
            self._lose(replica, t_ns)
            return
        self.frontend.foresee(replica, stepped.outputs)
        gap_ns = ended_ns[-1] - last_ns if was_busy and last_ns is not None else None
        report = partial(self._report, replica, stepped, gap_ns)
        self._agenda.put(replica.clock.ns, Kind.COMPLETION, report)
        self._wake(replica)

    def _report(self, replica: Replica, stepped: Stepped, gap_ns: int | None, t_ns: int) -> None:
        if self.replicas.get(replica.name) is not replica:
            return  # it has died in the step
        if stepped.record is not None:
            self._count(stepped.record)
            if gap_ns is not None:
                self._step.observe_streams(gap_ns, len(stepped.record.sampled))
        self.frontend.take(replica, stepped, t_ns)

    def _count(self, record: StepRecord) -> None:
        self._num_steps += 1
        self._num_scheduled += sum(record.scheduled.values())
        self._num_generated += len(record.sampled)

    def _gauges(self) -> list[Gauges]:
        return [replica.gauges() for replica in self.replicas.values()]

    # Time

    @property
    def _last_ns(self) -> int:
        settle_ns = round(self._plan.settle_s * NS)
        if self._end_ns is not None:
            return self._end_ns + settle_ns
        return START_NS + round(self._plan.load_s * NS) + settle_ns

    def _end_load(self, t_ns: int) -> None:
        if self._end_ns is None:
            self._end_ns = t_ns
            self.users.cut_off(t_ns)

    def _do_some(self) -> bool:
        do_next = self._agenda.do_next
        for _ in range(_ACTS_AT_ONCE):
            t_ns = do_next(self._last_ns)
            if t_ns is None:
                return False
            self._reached_ns = t_ns
        return True
