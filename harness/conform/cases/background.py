"""Answers of /v1/responses that are computed in the background, and their cancel."""

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any, Final

from harness.client.dialect import route
from harness.conform.bench import Bench
from harness.conform.case import case, reports
from harness.conform.finding import Evidence, Finding, found
from harness.conform.routes import Reply, Routes
from harness.experiments.outcome import CannotDecideError, RefusedError
from harness.store.conform_result import Failure, Level

SHORT: Final = 4  # tokens
RUNNING: Final = ("queued", "in_progress")
CANCELLED: Final = "cancelled"
LOOK_S: Final = 0.05


class Responses:
    """`path`: of the server's Responses."""

    def __init__(
        self, routes: Routes, model: str, path: str, pause: Callable[[float], object]
    ) -> None:
        self._routes, self._model, self._path, self._pause = routes, model, path, pause

    def ask(self, tokens: int, *, background: bool) -> Reply:
        asked: dict[str, Any] = {"model": self._model, "input": "A long letter.", "store": True}
        more = {"background": True} if background else {}
        return self._routes.post(self._path, {**asked, "max_output_tokens": tokens, **more})

    def begin(self, tokens: int) -> str:
        """The id of a new background answer. Raises RefusedError if the server offers none."""
        reply = self.ask(tokens, background=True)
        name, status = reply.body.get("id"), reply.body.get("status")
        if not reply.is_good or not isinstance(name, str):
            raise RefusedError(
                f"POST {self._path} with `background` was answered with status {reply.status}"
            )
        if status not in RUNNING:
            raise RefusedError(f"`background` is ignored: the answer came at once, {status}")
        return name

    def cancel(self, name: str) -> Reply:
        return self._routes.cancel_at(f"{self._path}/{name}/cancel")

    def status(self, name: str) -> str | None:
        status = self._routes.get(f"{self._path}/{name}").body.get("status")
        return status if isinstance(status, str) else None

    def end_of(self, name: str, longest_s: float) -> str | None:
        """Its status once it no longer runs, or when this time is over."""
        until_s = time.monotonic() + longest_s
        while (status := self.status(name)) in RUNNING and time.monotonic() < until_s:
            self._pause(LOOK_S)
        return status


@case(
    "background/cancel",
    Level.SHOULD,
    "A background answer ends when it is cancelled; no other kind of answer is cancelled.",
    wire="As many requests to /v1/responses with `background` as there are slots are cancelled "
    "while they run. A background answer that has ended, and a stored answer without "
    "`background`, are cancelled, too.",
    passes="running: 2xx, its status becomes `cancelled`, and no slot is held; ended: it keeps its "
    "status, and is not refused in the words for one without `background`; without `background`: "
    "4xx",
    methods="O W",
    why="Nobody holds a connection to a background answer: its cancel is the only way to end it.",
    remedy="let the cancel of a background answer abort its request, and answer "
    "differently for running, ended and foreground answers",
    needs=("http",),
    caught=reports("vllm-project/vllm#57999 sgl-project/sglang#38002"),
)
def cancel(bench: Bench) -> Finding:
    plan = bench.session.plan
    with closing(Routes(plan, bench.known)) as routes:
        responses = Responses(routes, plan.model, route(plan.target.path, "responses"), bench.pause)
        ended = responses.begin(SHORT)
        last = responses.end_of(ended, bench.settle_s + 2 * (bench.ttft_s + SHORT * bench.step_s))
        if last in RUNNING:
            raise CannotDecideError(f"an answer of {SHORT} tokens in the background did not end")
        stored = responses.ask(SHORT, background=False)
        replies = {"ended": responses.cancel(ended)}
        if stored.status == 200 and isinstance(stored.body.get("id"), str):
            replies["foreground"] = responses.cancel(stored.body["id"])
        wrong = wrong_in(replies, was=last, now=responses.status(ended))
        evidence: Evidence = {f"{kind}_status": reply.status for kind, reply in replies.items()}
        if wrong is not None:
            return Finding(Failure.HARM, wrong, evidence)
        return cancel_running(bench, responses, evidence)


def wrong_in(replies: Mapping[str, Reply], *, was: str | None, now: str | None) -> str | None:
    """`replies`: to the cancel of a background answer that had ended (its status was `was`, and is
    `now`), and of an answer without `background`."""
    ended, foreground = replies["ended"], replies.get("foreground")
    if ended.status >= 500:
        return f"the cancel of an ended background answer has status {ended.status}"
    if now != was:
        return f"the cancel of a background answer that was {was} made it {now}"
    if foreground is None:
        return None
    if not foreground.is_refused:
        return f"the cancel of an answer without `background` has status {foreground.status}"
    if (words := _words(ended)) and words == _words(foreground):
        return f"an ended background answer is refused like one without `background`: {words}"
    return None


def _words(reply: Reply) -> str | None:
    """The words with which a cancel is refused."""
    error = reply.body.get("error", reply.body)
    words = error.get("message") if isinstance(error, dict) else error
    return words if reply.is_refused and isinstance(words, str) else None


def cancel_running(bench: Bench, responses: Responses, evidence: Evidence) -> Finding:
    replies: list[Reply] = []
    ends: list[str | None] = []

    def leave() -> int:
        names = [responses.begin(bench.patience.answer_tokens) for _ in range(bench.slots)]
        bench.pause(bench.ttft_s + 2 * bench.step_s)
        replies.extend(map(responses.cancel, names))
        ends.extend(responses.end_of(name, bench.settle_s) for name in names)
        return len(names)

    held = bench.occupancy.held(leave)
    evidence = evidence | {"cancelled": len(replies), "held": held, "ended_as": ends[0]}
    if refused := [reply.status for reply in replies if not reply.is_good]:
        said = f"the cancel of a running background answer has status {refused[0]}"
        return Finding(Failure.HARM, said, evidence)
    said = f"{held} of {bench.slots} slots are held after as many background answers were cancelled"
    if not held and set(ends) != {CANCELLED}:
        other = next(end for end in ends if end != CANCELLED)
        return Finding(Failure.HARM, f"a cancelled background answer is {other}", evidence)
    good = f"{len(replies)} background answers ended when they were cancelled"
    return found(good, said if held else None, evidence, Failure.NEVER)
