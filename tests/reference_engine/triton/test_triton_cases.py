"""Triton's ways with a cancelled request, case by case, with its own client, in both manners.

In the faithful manner the server does what Triton 2.51 was seen to do; by default it does what
Triton's documents say, and a cancelled request leaves the queue at once.
"""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from grpc import StatusCode

from reference_engine.triton.in_process import InferenceRequest, ResponseIterator
from reference_engine.triton.model import InferenceError
from tests.reference_engine.triton.served_repository import (
    STEPS,
    Client,
    Pending,
    Served,
)
from tests.reference_engine.triton.side_by_side import CASES, Side

SEQUENCES = ("oldest", "direct")
DOCUMENT = Path(__file__).parents[3] / "docs" / "kserve.md"


@pytest.fixture(scope="module", params=[False, True], ids=["default", "faithful"])
def served(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("triton"), is_faithful=request.param)
    try:
        served.start()
        yield served
    finally:
        served.close()


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with served.client() as client:
        yield client
    served.idle()
    served.events.clear()


class Inside(Side):
    """The server is at hand: no pauses."""

    def __init__(self, served: Served) -> None:
        super().__init__(served, served.url)
        self._served = served

    def arrived(self, name: str, pending: Pending) -> None:
        self._served.until(lambda: not pending.is_silent() or bool(self._served.answers(name)))

    def seen(self, *names: str) -> None:
        for name in names:
            self._served.cancelled(name)

    def is_over(self, name: str, pending: Pending) -> bool:
        return not self._served.answers(name)


@pytest.fixture(scope="module")
def side(served: Served) -> Side:
    return Inside(served)


def table() -> dict[str, list[str]]:
    """The cells of docs/kserve.md for each case: Triton and the faithful manner; the default."""
    rows = (line.strip("| ").split(" | ") for line in DOCUMENT.read_text().splitlines())
    return {
        row[0]: [row[1], row[1] if row[2] == "=" else row[2]] for row in rows if row[0] in CASES
    }


@pytest.mark.parametrize("case", CASES)
def test_the_document_tells_what_happens(
    served: Served, client: Client, side: Side, case: str
) -> None:
    assert CASES[case](side) == table()[case][0 if served.is_faithful else 1]


def test_a_model_that_runs_past_the_clients_deadline_sees_it(
    served: Served, client: Client
) -> None:
    pending = client.ask("unary", "late", client_timeout=0.3)
    assert pending.next() == "DEADLINE_EXCEEDED Deadline Exceeded"
    served.expect("unary", "cancelled", "late")


@pytest.mark.parametrize("model", SEQUENCES)
class TestSequences:
    """3. Direct and oldest alike."""

    def go_on(self, client: Client, model: str, name: str, **flags: bool) -> int | str:
        return client.ask(model, name, {"ITL_MS": 0}, sequence_id=7, **flags).next()

    def test_other_sequences_go_on(self, served: Served, client: Client, model: str) -> None:
        start, end = {"sequence_start": True}, {"sequence_end": True}
        cancelled = client.ask(model, f"{model}-1", sequence_id=8, **start, **end)
        served.expect(model, "started", f"{model}-1")
        cancelled.cancel()
        assert self.go_on(client, model, f"{model}-2", **start) == 1
        assert self.go_on(client, model, f"{model}-3", **end) == 1

    def test_ids_that_do_not_fit(self, served: Served, client: Client, model: str) -> None:
        """Never started, ended twice, started twice, none at all."""
        name = f"{model}-ids"
        flag = "must specify the START flag"
        assert flag in str(self.go_on(client, model, f"{name}-0"))
        assert self.go_on(client, model, f"{name}-1", sequence_start=True) == 1
        again = self.go_on(client, model, f"{name}-2", sequence_start=True)
        if served.is_faithful:
            assert again == 1
        else:
            assert again == (
                "INVALID_ARGUMENT a request starts sequence 7 to model "
                f"'{model}', which has not ended"
            )
        assert self.go_on(client, model, f"{name}-3", sequence_end=True) == 1
        assert flag in str(self.go_on(client, model, f"{name}-4", sequence_end=True))
        text = {"sequence_id": "seven", "sequence_start": True}
        assert "is no UINT64" in str(client.ask(model, f"{name}-6", **text).next())
        nothing = client.ask(model, f"{name}-5", {"ITL_MS": 0}).next()
        assert "must specify a non-zero or non-empty correlation ID" in str(nothing)


def test_an_empty_place_of_the_direct_strategy(served: Served, client: Client) -> None:
    """A request without id, which the model skips."""
    start, end = {"sequence_start": True}, {"sequence_end": True}
    assert client.ask("direct", "p", {"ITL_MS": 0}, sequence_id=1, **start).next() == 1
    assert client.ask("direct", "q", {"ITL_MS": 0}, sequence_id=2, **start).next() == 1
    served.expect("direct", "empty", "")
    for sequence_id in (1, 2):
        pending = client.ask("direct", "r", {"ITL_MS": 0}, sequence_id=sequence_id, **end)
        assert pending.next() == 1


class TestInProcess:
    """The table of the in-process API."""

    def ask(
        self, served: Served, model: str, name: str, **values: int
    ) -> tuple[InferenceRequest, ResponseIterator]:
        inputs = {key: [value] for key, value in {**STEPS, **values}.items()}
        request = InferenceRequest(inputs, request_id=name)
        return request, served.in_process.model(model).infer(request)

    def test_a_stream_that_looks(self, served: Served, client: Client) -> None:
        request, responses = self.ask(served, "stream", "in-1", N=3)
        next(responses)
        next(responses)
        responses.cancel()
        assert request.is_cancelled()
        with pytest.raises(InferenceError) as ended:
            next(responses)
        assert ended.value.code is StatusCode.CANCELLED
        assert list(responses) == []
        served.expect("stream", "cancelled", "in-1")

    def test_a_stream_that_does_not_look(self, served: Served, client: Client) -> None:
        request, responses = self.ask(served, "stream", "in-2", N=5, CHECK=0)
        next(responses)
        request.cancel()
        served.open("in-2")
        number = 1
        try:
            for _ in responses:
                number += 1
        except InferenceError:
            assert number < 5
        served.expect("stream", "answered", "in-2")
        if served.is_faithful:
            assert number == 5

    def test_a_cancel_after_the_end(self, served: Served, client: Client) -> None:
        request, responses = self.ask(served, "unary", "in-3", ITL_MS=0)
        assert len(list(responses)) == 1
        request.cancel()
        responses.cancel()
        assert request.is_cancelled()


def test_each_step_of_an_ensemble_feeds_the_next(served: Served, client: Client) -> None:
    assert client.ask("pipeline", "all", {"N": 3, "ITL_MS": 0}).next() == 3
    served.expect("second", "answered", "all")
    assert served.said("all") == ["started", "answered"] * 2


MODELS = ("unary", "single", "batched", "queued", "oldest", "direct", "stream", "pipeline")


def ask_at_random(client: Client, number: int, random: Random) -> Pending:
    """One request of up to four steps, which leaves at once, soon, by its deadline, or never."""
    model = random.choice(MODELS)
    values: dict[str, Any] = {"N": random.randint(1, 4), "ITL_MS": random.randint(0, 2)}
    name, way = f"random-{number}", random.choice(("cancel", "soon", "deadline", "stay"))
    if model == "stream":
        pending = client.stream()
        client.send(name, **values)
    else:
        options: dict[str, Any] = {"client_timeout": 0.01} if way == "deadline" else {}
        if model in SEQUENCES:
            options |= {"sequence_id": number, "sequence_start": True, "sequence_end": True}
        pending = client.ask(model, name, values, **options)
    if way == "soon":
        later = threading.Timer(random.random() * 0.02, pending.cancel)
        later.start()
        later.join()
    elif way == "cancel" or (model == "stream" and way == "deadline"):
        pending.cancel()
    return pending


def test_random_cancels_leave_nothing(served: Served, client: Client) -> None:
    """Every request ends, and its place is free again, though processes of models die."""
    random = Random(15)
    clients, pending = [], []
    for number in range(1, 401):
        clients.append(Client(served.url))
        pending.append(ask_at_random(clients[-1], number, random))
        if number % 100 == 0:
            killed = ("unary", "batched", "oldest", "stream")[number // 100 - 1]
            pid = served.model(killed).pids[0]
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
    for one in pending:
        one.next()
    for leaver in clients:
        leaver.close()
    served.idle()
    served.until(lambda: not any(model._restarts for model in served.repository.python_models))
    for name in ("unary", "batched", "single", "queued"):
        assert client.ask(name, f"after-{name}", {"ITL_MS": 0}).next() == 1
