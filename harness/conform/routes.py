"""The target's other routes, asked one at a time, without load: health, cancel, stored answers."""

import time
from collections.abc import Generator, Iterator
from contextlib import closing, suppress
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import httpx

from harness.client.chunk import DONE, NONSENSE
from harness.client.dialect import dialect_of, request_body
from harness.client.loose import values_of
from harness.client.session import asking_client
from harness.client.sse import EndlessEventError, Event, events_of
from harness.conform.known import Known
from harness.experiments.outcome import CannotDecideError, RefusedError
from harness.http_client import why_unread
from harness.records import Delivery
from harness.run.settle import read_health
from harness.workload.plan import LoadPlan

LONGEST_S: Final = 30.0


class Reply(NamedTuple):
    """`body`: {} unless it is a JSON object."""

    status: int
    body: dict[str, Any]

    @property
    def is_good(self) -> bool:
        return 200 <= self.status < 300

    @property
    def is_refused(self) -> bool:
        return 400 <= self.status < 500


class Routes:
    """`known` notes answers, leaves and cancels. Raises RefusedError for a target without HTTP,
    CannotDecideError if no answer comes."""

    def __init__(
        self, plan: LoadPlan, known: Known | None = None, *, longest_s: float = LONGEST_S
    ) -> None:
        if not plan.target.http:
            raise RefusedError("the target speaks no HTTP")
        self._plan, self._known = plan, known or Known()
        self._client = asking_client(plan, longest_s)

    def close(self) -> None:
        self._client.close()

    def health(self) -> bool | None:
        return read_health(self._client, self._plan.url)

    def cancel(self, request_id: str) -> Reply:
        path = self._plan.target.cancel_path
        if path is None:
            raise RefusedError("the target's description names no route to cancel by")
        return self.cancel_at(path.replace("{id}", quote(request_id, safe="")))

    def cancel_at(self, path: str) -> Reply:
        self._known.note_leave()
        return self.post(path, None)

    def complete(self, prompt: str, *, max_tokens: int) -> dict[str, Any]:
        """The answer in one piece. Raises CannotDecideError if it is refused."""
        reply = self.post(self._plan.target.path, self._body(prompt, max_tokens, Delivery.UNARY))
        if reply.status != httpx.codes.OK:
            raise CannotDecideError(f"a request was refused with status {reply.status}")
        return reply.body

    def get(self, path: str) -> Reply:
        return self.send("GET", path)

    def post(self, path: str, body: dict[str, Any] | None) -> Reply:
        return self.send("POST", path, body)

    def send(self, method: str, path: str, body: dict[str, Any] | None = None) -> Reply:
        try:
            answer = self._client.request(method, self._plan.url + path, json=body)
        except httpx.HTTPError as error:
            why = why_unread(error)
            raise CannotDecideError(f"{method} {path} had no answer ({why})") from error
        if answer.status_code < httpx.codes.INTERNAL_SERVER_ERROR:
            self._known.note_answer()
        try:
            body = answer.json()
        except ValueError:
            body = {}
        return Reply(answer.status_code, body if isinstance(body, dict) else {})

    def close_at_done(self, prompt: str, *, max_tokens: int) -> None:
        """Read a stream up to `[DONE]`, and close the connection there, before its end."""
        body = self._body(prompt, max_tokens, Delivery.STREAM)
        with closing(self.events(self._plan.target.path, body)) as events:
            if not any(value == DONE for value in events):
                raise CannotDecideError("a stream ended without [DONE]")

    def events(self, path: str, body: dict[str, Any]) -> Generator[Any]:
        """What the events of a stream hold: JSON values, and `DONE`. Closing the generator closes
        the connection."""
        try:
            with self._client.stream("POST", self._plan.url + path, json=body) as answer:
                for _, data in _events_of(answer):
                    self._known.note_answer()
                    with suppress(*NONSENSE):  # a heartbeat
                        yield from values_of(data)
        except GeneratorExit:
            self._known.note_leave()
            raise
        except httpx.HTTPError as error:
            raise CannotDecideError(f"a stream broke ({why_unread(error)})") from error
        except EndlessEventError as error:
            raise CannotDecideError(f"a stream cannot be read: {error}") from error

    def text(self, path: str) -> tuple[int, str]:
        """The status of a GET, and the text of the answer that its events are."""
        look = dialect_of(self._plan.target).look
        try:
            with self._client.stream("GET", self._plan.url + path) as answer:
                looks = [one for name, data in _events_of(answer) for one in look(data, name)]
        except (httpx.HTTPError, EndlessEventError) as error:
            raise CannotDecideError(f"GET {path} cannot be read: {error}") from error
        shown = (choice.shown() for one in looks for choice in one.choices)
        return answer.status_code, "".join(shown)

    def _body(self, prompt: str, max_tokens: int, delivery: Delivery) -> dict[str, Any]:
        plan = self._plan
        return request_body(
            plan.target, plan.model, prompt, max_tokens=max_tokens, delivery=delivery
        )


def _events_of(answer: httpx.Response) -> Iterator[Event]:
    return events_of(answer.iter_bytes(), time.perf_counter_ns)
