"""The turns of one live user, sent and seen through one after the other."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from harness.client.dialect import dialect_of, route
from harness.client.session import LoadSession
from harness.client.transcript import Transcript
from harness.records import RequestRow
from harness.workload.abandon import RequestSpec
from harness.workload.load import AbandonLoad
from harness.workload.session_user import SessionUser


class LiveTurns:
    def __init__(self, session: LoadSession, user: int) -> None:
        load, target = session.plan.load, session.plan.target
        assert isinstance(load, AbandonLoad)
        assert load.session is not None
        self._session, self._load = session, load
        self._user = SessionUser(load, seed=session.plan.run.seed, user=user)
        self._transcript = Transcript(server_keeps=target.keeps_responses)
        dialect = load.session.dialect
        known = target.routes.get(dialect)
        name = "chat/completions" if dialect == "chat" else dialect
        path = route(target.path, name) if known is None else known.path
        self._path = None if dialect_of(target).name == dialect else path

    def prepare(self) -> Callable[[], float]:
        """What sends the next turn, and returns the seconds until the one after it."""
        spec = self._user.next_turn(self._session.seen)
        assert spec.turn is not None
        own = replace(spec, prompt_tokens=spec.turn.own_tokens)
        if spec.turn.earlier:
            text = self._session.prompt(replace(own, shared_tokens=0), n=spec.turn.n)
        else:
            shared, text = spec.shared_tokens, self._session.prompt(own, n=spec.turn.n)
            place = self._session.plan.prompt_scale.num_bytes(shared) if shared else 0
            system, text = text[:place], text[place:]
            self._transcript.begin(system)
        return partial(self._send, replace(spec, path=self._path), text)

    def _send(self, spec: RequestSpec, text: str) -> float:
        asked, prompt = self._transcript.ask(spec, text)
        row = self._ask(asked, prompt)
        if self._transcript.is_forgotten(asked, row):
            asked, prompt = self._transcript.ask(replace(spec, repeats=row.request_id), text)
            row = self._ask(asked, prompt)
        return self._user.over(row)

    def _ask(self, spec: RequestSpec, prompt: str) -> RequestRow:
        session = self._session
        spec = session.issue(spec)
        rule = spec.leave_rule(self._load.think, session.client.step)
        exchange = session.client.begin(spec, prompt, rule)
        row = session.client.see_through(exchange, session.keep)
        self._transcript.answered(spec, row, exchange.stream.text, exchange.stream.response_id)
        return row
