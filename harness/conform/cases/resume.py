"""A target that declares `disconnect = "resume"`: an answer whose client has left runs on, can be
read back, and ends by an explicit stop."""

import time
from contextlib import closing
from dataclasses import replace
from secrets import token_hex
from typing import Final

from harness.client.live_stream import LiveStream
from harness.conform.bench import Bench
from harness.conform.bystanders import SHOWN, joined, leave_each, wait_each
from harness.conform.case import FREED, case, reports
from harness.conform.finding import Evidence, Finding
from harness.conform.routes import Reply, Routes
from harness.experiments.outcome import CannotDecideError
from harness.records import Role
from harness.store.conform_result import Failure, Level
from harness.workload.abandon import RequestSpec
from harness.workload.target import ResumeSource

READ_TOKENS: Final = 4  # before the client leaves
ANSWER_TOKENS: Final = 24  # of an answer that nobody comes back for in time
UNKNOWN: Final = 404
CAUGHT: Final = reports("ggml-org/llama.cpp#23226 ggml-org/llama.cpp#26093 vercel/ai#15091")


class Resumable:
    """Answers with names of their own; `stops`: the replies to their stops."""

    def __init__(self, bench: Bench, routes: Routes) -> None:
        resume = bench.session.plan.target.resume
        if resume is None:
            raise CannotDecideError('the target does not declare `disconnect = "resume"`')
        self._bench, self._routes = bench, routes
        self._declared: ResumeSource = resume
        self.stops: list[Reply] = []

    def begin(self, spec: RequestSpec, text: str | None = None) -> LiveStream:
        name = f"conversation-{token_hex(6)}"
        headers = {self._declared.header: name}
        return self._bench.start(replace(spec, headers=headers), text)

    def leave_and_stop(self, stream: LiveStream) -> None:
        """A stop that comes before the server knows of the answer (404) is sent again. A server
        may never have read a request that showed no token: its 404 is right then."""
        stream.leave()
        self._bench.pause(0)  # it leaves now
        path = self._declared.stop_path.replace("{id}", self._name(stream))
        until_s = time.monotonic() + self._bench.settle_s / 2
        while (reply := self._routes.send(self._declared.stop_method, path)).status == UNKNOWN:
            if time.monotonic() > until_s:
                break
            self._bench.pause(self._bench.step_s)
        if stream.tokens or reply.status != UNKNOWN:
            self.stops.append(reply)

    def read_back(self, stream: LiveStream) -> tuple[int, str]:
        """The status, and the text of the answer so far."""
        return self._routes.text(self._declared.read_path.replace("{id}", self._name(stream)))

    def _name(self, stream: LiveStream) -> str:
        assert stream.spec.headers is not None
        return stream.spec.headers[self._declared.header]

    def refused_stop(self) -> str | None:
        wrong = [reply.status for reply in self.stops if not reply.is_good]
        return f"a stop was answered with status {wrong[0]}" if wrong else None


@case(
    "resume/stop",
    Level.MUST,
    "An explicit stop ends an answer that a disconnect does not end.",
    wire="Behind full slots a resumable stream's connection is closed and its stop is sent at "
    "once. Then as many resumable requests as slots are stopped before their first token.",
    passes="each stop has a status of 200 to 299, or 404 if its answer showed no token; "
    f"{FREED}; no slot is held by requests that "
    "were stopped before their first token",
    methods="P O W",
    why="Where a disconnect is no cancel, the stop button is the only way to end an answer, and it "
    "is pressed before the first token, too.",
    remedy="let the stop of a resumable answer abort its request, in every phase of it",
    needs=("resume", "http"),
    caught=(*CAUGHT, *reports("ggml-org/llama.cpp#27481")),
)
def stop(bench: Bench) -> Finding:
    with closing(Routes(bench.session.plan, bench.known)) as routes:
        resumable = Resumable(bench, routes)
        finding = bench.recoveries.find(begin=resumable.begin, leave=resumable.leave_and_stop)
        if finding.failure is not None:
            return finding
        bench.end()  # the streams that filled the slots
        bench.cleaning.rest()

        def before_first() -> int:
            streams = [resumable.begin(bench.long()) for _ in range(bench.slots)]
            bench.pause(bench.ttft_s / 2)
            for stream in streams:
                resumable.leave_and_stop(stream)
            return len(streams)

        held = bench.occupancy.held(before_first)
    evidence = finding.evidence | {"held": held, "stops": len(resumable.stops)}
    if (refused := resumable.refused_stop()) is not None:
        return Finding(Failure.HARM, refused, evidence)
    if held:
        said = f"{held} of {bench.slots} slots are held after stops before the first token"
        return Finding(Failure.NEVER, said, evidence)
    return finding._replace(evidence=evidence)


@case(
    "resume/abandoned",
    Level.MUST,
    "A resumable answer that nobody comes back for ends, gives its slot back, and can be read.",
    wire=f"As many resumable greedy requests as slots ask for {ANSWER_TOKENS} tokens; their "
    f"connections are closed after {READ_TOKENS}. When the answers must have ended, one is read "
    "back, and as many probes as slots start at once.",
    passes="the answer that is read back is whole, with the text of a control; no slot is held",
    methods="O R",
    why="Most who leave never come back. What is kept for them must end, and be whole until then.",
    remedy="run a resumable answer to its own end and keep its text, and free its slot there",
    needs=("resume", "http"),
    caught=CAUGHT,
)
def abandoned(bench: Bench) -> Finding:
    asked = bench.short(ANSWER_TOKENS, role=Role.CANARY)
    text = bench.session.prompt(asked, n=bench.session.sent)
    control = joined(bench.start(asked, text)).answer or ""
    with closing(Routes(bench.session.plan, bench.known)) as routes:
        resumable = Resumable(bench, routes)
        streams = [resumable.begin(asked, text) for _ in range(bench.slots)]
        wait_each(streams, READ_TOKENS)
        left = leave_each(bench, streams)
        bench.pause(2 * (ANSWER_TOKENS - READ_TOKENS) * bench.step_s)
        status, seen = resumable.read_back(streams[0])
    held = bench.occupancy.held(lambda: 0)
    evidence: Evidence = {"left": len(left), "held": held, "read_back_status": status}
    if status != 200 or not seen:
        said = f"nothing can be read back (status {status}), though the target declares it"
        return Finding(Failure.NEVER, said, evidence)
    if seen != control:
        evidence |= {"control": control[:SHOWN], "read_back": seen[:SHOWN]}
        said = f"what is read back has {len(seen)} characters, the control {len(control)}"
        return Finding(Failure.HARM, said, evidence)
    if held:
        said = f"{held} of {bench.slots} slots are held after the answers must have ended"
        return Finding(Failure.NEVER, said, evidence)
    return Finding(None, "answers that were left ended whole and gave their slots back", evidence)
