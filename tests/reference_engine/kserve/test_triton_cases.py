"""What Triton does with a cancelled request, case by case, with its own client, in both manners.

In the faithful manner the server does what Triton 2.51 was seen to do; by default it does what
Triton's documents say, and a cancelled request leaves the queue at once.
"""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import tritonclient.grpc.aio
from grpc import StatusCode

from reference_engine.kserve.in_process import InferenceRequest, ResponseIterator
from reference_engine.kserve.model import InferenceError
from tests.reference_engine.kserve.served_repository import (
    STEPS,
    Client,
    Pending,
    Served,
    inputs_for,
)

LOCALLY = "CANCELLED Locally cancelled by application!"
SEQUENCES = ("oldest", "direct")
LEAVER = """
import sys
from tests.reference_engine.kserve.served_repository import Client, inputs_for
Client(sys.argv[1]).infer(sys.argv[2], inputs_for(sys.argv[2]), request_id=sys.argv[3])
"""


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


class TestRunning:
    """1. However the client leaves, the model sees the one thing: `is_cancelled()`."""

    def test_the_client_cancels(self, served: Served, client: Client) -> None:
        pending = client.ask("unary", "leaves")
        served.expect("unary", "started", "leaves")
        pending.cancel()
        assert pending.next() == LOCALLY
        served.expect("unary", "cancelled", "leaves")

    def test_the_deadline_passes(self, served: Served, client: Client) -> None:
        pending = client.ask("unary", "late", client_timeout=0.3)
        assert pending.next() == "DEADLINE_EXCEEDED Deadline Exceeded"
        served.expect("unary", "cancelled", "late")

    def test_the_channel_is_closed(self, served: Served, client: Client) -> None:
        with served.client() as other:
            pending = other.ask("unary", "hangs-up")
            served.expect("unary", "started", "hangs-up")
        assert pending.next() == "CANCELLED Channel closed!"
        served.expect("unary", "cancelled", "hangs-up")

    def test_the_client_is_killed(self, served: Served, client: Client) -> None:
        here = Path(__file__).parents[3]
        command = [sys.executable, "-c", LEAVER, served.url, "unary", "dies"]
        with subprocess.Popen(command, cwd=here) as process:
            served.expect("unary", "started", "dies")
            process.send_signal(signal.SIGKILL)
        served.expect("unary", "cancelled", "dies")

    def test_a_stream_is_cancelled(self, served: Served, client: Client) -> None:
        pending = client.stream()
        client.send("stream-leaves", N=3)
        assert [pending.next(), pending.next()] == [1, 2]
        pending.cancel()
        assert pending.next() == LOCALLY
        served.expect("stream", "cancelled", "stream-leaves")

    def test_a_model_that_does_not_look_keeps_its_slot(
        self, served: Served, client: Client
    ) -> None:
        pending = client.ask("unary", "blind", {"CHECK": 0})
        served.expect("unary", "started", "blind")
        pending.cancel()
        assert pending.next() == LOCALLY
        after = client.ask("unary", "after", {"ITL_MS": 0})
        served.waiting("unary", 1)
        served.open("blind")
        assert after.next() == 1
        served.expect("unary", "answered", "after")
        assert served.said("blind") == ["started", "answered"]
        order = [(what, about) for _, what, about in served.events]
        assert order.index(("answered", "blind")) < order.index(("started", "after"))


class TestQueued:
    """2. Without a policy, Triton executes a cancelled request all the same."""

    @pytest.mark.parametrize("model", ["unary", "single", "queued"])
    @pytest.mark.parametrize("leaving", ["cancel", "deadline"])
    def test_a_queued_request(
        self, served: Served, client: Client, model: str, leaving: str
    ) -> None:
        name = f"{model}-{leaving}"
        first = client.ask(model, f"{name}-1")
        served.expect(model, "started", f"{name}-1")
        options = {"client_timeout": 0.3} if leaving == "deadline" else {}
        second = client.ask(model, f"{name}-2", {"CHECK": 0, "ITL_MS": 0}, **options)
        served.waiting(model, 1)
        third = client.ask(model, f"{name}-3", {"ITL_MS": 0})
        served.waiting(model, 2)
        if leaving == "cancel":
            second.cancel()
        assert str(second.next()).split()[0] in ("CANCELLED", "DEADLINE_EXCEEDED")
        served.cancelled(model, f"{name}-2")
        served.waiting(model, 2 if served.is_faithful else 1)
        served.open(f"{name}-1")
        assert (first.next(), third.next()) == (1, 1)
        served.expect(model, "answered", f"{name}-3")
        runs = served.is_faithful and model != "queued"
        assert served.said(f"{name}-2") == (["started", "answered"] if runs else [])

    def test_a_timeout_of_its_own(self, served: Served, client: Client) -> None:
        """9. With a policy that allows it."""
        first = client.ask("queued", "long")
        served.expect("queued", "started", "long")
        second = client.ask("queued", "impatient", timeout=10_000)
        assert second.next() == "UNAVAILABLE Request timeout expired"
        served.open("long")
        assert first.next() == 1
        assert served.said("impatient") == []

    def test_a_full_queue(self, served: Served, client: Client) -> None:
        first = client.ask("queued", "fills")
        served.expect("queued", "started", "fills")
        others = [client.ask("queued", f"fills-{i}", {"ITL_MS": 0}) for i in range(3)]
        served.waiting("queued", 3)
        refused = client.ask("queued", "too-many")
        assert refused.next() == "UNAVAILABLE Exceeds maximum queue size"
        served.open("fills")
        assert [pending.next() for pending in (first, *others)] == [1] * 4


@pytest.mark.parametrize("model", SEQUENCES)
class TestSequences:
    """3. Direct and oldest alike."""

    def ask(self, client: Client, served: Served, model: str, name: str) -> list[Pending]:
        """Four requests of one sequence; the first runs, the others wait."""
        pending = []
        for number in range(1, 5):
            pending.append(
                client.ask(
                    model,
                    f"{name}-{number}",
                    {"ITL_MS": -1 if number == 1 else 0},
                    sequence_id=7,
                    sequence_start=number == 1,
                )
            )
            if number == 1:
                served.expect(model, "started", f"{name}-1")
            else:
                served.waiting(model, number - 1)
        return pending

    def go_on(self, client: Client, model: str, name: str, **flags: bool) -> int | str:
        return client.ask(model, name, {"ITL_MS": 0}, sequence_id=7, **flags).next()

    def check_over(self, client: Client, model: str, name: str) -> None:
        refusal = self.go_on(client, model, f"{name}-5")
        assert str(refusal).startswith("INVALID_ARGUMENT")
        assert "must specify the START flag" in str(refusal)
        assert self.go_on(client, model, f"{name}-6", sequence_start=True, sequence_end=True) == 1

    def test_the_running_one(self, served: Served, client: Client, model: str) -> None:
        name = f"{model}-running"
        pending = self.ask(client, served, model, name)
        pending[0].cancel()
        assert pending[0].next() == LOCALLY
        served.expect(model, "cancelled", f"{name}-1")
        if served.is_faithful:  # it alone ends, and the sequence goes on
            assert [one.next() for one in pending[1:]] == [1, 1, 1]
            assert self.go_on(client, model, f"{name}-5", sequence_end=True) == 1
        else:
            ends = [str(one.next()) for one in pending[1:]]
            assert ends == ["CANCELLED the request was cancelled"] * 3
            self.check_over(client, model, name)

    @pytest.mark.parametrize("number", [2, 3])
    def test_a_waiting_one(self, served: Served, client: Client, model: str, number: int) -> None:
        name = f"{model}-{number}"
        pending = self.ask(client, served, model, name)
        pending[number - 1].cancel()
        assert pending[number - 1].next() == LOCALLY
        served.cancelled(model, f"{name}-{number}")
        if served.is_faithful:  # not before its turn
            served.waiting(model, 3)
        else:
            served.waiting(model, 0)
        served.open(f"{name}-1")
        ends = [one.next() for one in pending if one is not pending[number - 1]]
        of_server = "CANCELLED the request was cancelled"
        alive = number - 1 if served.is_faithful else 1
        assert ends == [1] * alive + [of_server] * (3 - alive)
        self.check_over(client, model, name)
        assert served.said(f"{name}-4") == []

    def test_other_sequences_go_on(self, served: Served, client: Client, model: str) -> None:
        name = f"{model}-other"
        pending = self.ask(client, served, model, name)
        pending[2].cancel()
        served.cancelled(model, f"{name}-3")
        served.open(f"{name}-1")
        flags = {"sequence_start": True, "sequence_end": True}
        assert client.ask(model, f"{name}-x", {"ITL_MS": 0}, sequence_id=8, **flags).next() == 1
        assert [str(one.next()).split()[0] for one in pending][-1] == "CANCELLED"

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


class TestBatch:
    """4. One member is cancelled; the others get all of their answer."""

    def test_one_of_a_batch(self, served: Served, client: Client) -> None:
        first = client.ask("batched", "alone")
        served.expect("batched", "started", "alone")
        batch = []
        for number in range(4):
            batch.append(client.ask("batched", f"member-{number}"))
            served.waiting("batched", number + 1)
        served.open("alone")
        assert first.next() == 1
        for number in range(4):
            served.expect("batched", "started", f"member-{number}")
        batch[2].cancel()
        assert batch[2].next() == LOCALLY
        served.expect("batched", "cancelled", "member-2")
        assert served.said("member-2") == ["started", "cancelled"]  # it ends with the batch
        served.open(*(f"member-{number}" for number in range(4)))
        assert [batch[number].next() for number in (0, 1, 3)] == [1, 1, 1]


class TestAfterTheEnd:
    """5. and 6."""

    def test_a_cancel_after_the_answer_is_silent(self, served: Served, client: Client) -> None:
        pending = client.ask("unary", "done", {"ITL_MS": 0})
        assert pending.next() == 1
        pending.cancel()
        assert client.ask("unary", "next", {"ITL_MS": 0}).next() == 1
        assert pending.is_silent()

    def test_a_stream_is_open_after_its_last_response(self, served: Served, client: Client) -> None:
        pending = client.stream()
        client.send("complete", N=2, ITL_MS=0)
        assert [pending.next() for _ in range(3)] == [1, 2, "final"]
        served.expect("stream", "answered", "complete")
        pending.cancel()
        assert pending.next() == LOCALLY
        assert served.said("complete") == ["started", "answered"]

    @pytest.mark.parametrize("half_close", ["stop_stream", "close"])
    def test_a_half_close_cancels_nothing(
        self, served: Served, client: Client, half_close: str
    ) -> None:
        name = f"half-{half_close}"
        with served.client() as other:
            pending = other.stream()
            other.send(name, N=3)
            assert [pending.next(), pending.next()] == [1, 2]
            served.open(name)
            getattr(other, half_close)()
            assert [pending.next(), pending.next()] == [3, "final"]
        assert pending.is_silent()


def test_two_requests_on_one_stream(served: Served, client: Client) -> None:
    """7. One cancel and one error, which names no request; both stop."""
    pending = client.stream()
    for name in ("twin-1", "twin-2"):
        client.send(name)
        served.expect("stream", "started", name)
    pending.cancel()
    assert pending.next() == LOCALLY
    for name in ("twin-1", "twin-2"):
        served.expect("stream", "cancelled", name)
    assert pending.is_silent()


class TestAsyncio:
    """8. Both ways give asyncio.CancelledError."""

    def test_an_iterator_is_cancelled(self, served: Served, client: Client) -> None:
        async def leave() -> None:
            async with tritonclient.grpc.aio.InferenceServerClient(served.url) as aio:
                iterator = aio.stream_infer(_one("aio-1"))
                result, error = await anext(iterator)
                assert (int(result.as_numpy("STEPS").item()), error) == (1, None)
                iterator.cancel()
                await anext(iterator)

        with pytest.raises(asyncio.CancelledError):
            asyncio.run(leave())
        served.expect("stream", "cancelled", "aio-1")

    def test_a_task_is_cancelled(self, served: Served, client: Client) -> None:
        async def leave() -> None:
            async with tritonclient.grpc.aio.InferenceServerClient(served.url) as aio:
                asking = aio.infer("unary", inputs_for("unary"), request_id="aio-2")
                task = asyncio.create_task(asking)
                await asyncio.to_thread(served.expect, "unary", "started", "aio-2")
                task.cancel()
                await task

        with pytest.raises(asyncio.CancelledError):
            asyncio.run(leave())
        served.expect("unary", "cancelled", "aio-2")


async def _one(request_id: str) -> Any:
    yield {
        "model_name": "stream",
        "inputs": inputs_for("stream", N=2),
        "request_id": request_id,
    }


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


class TestEnsemble:
    def test_no_step_starts_after_a_cancel(self, served: Served, client: Client) -> None:
        """The running step is cancelled, too."""
        pending = client.ask("pipeline", "between")
        served.expect("unary", "started", "between")
        pending.cancel()
        assert pending.next() == LOCALLY
        served.expect("unary", "cancelled", "between")
        assert client.ask("second", "flush", {"ITL_MS": 0}).next() == 1
        served.expect("second", "answered", "flush")
        assert {model for model, _, about in served.events if about == "between"} == {"unary"}

    def test_each_step_feeds_the_next(self, served: Served, client: Client) -> None:
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


@pytest.mark.parametrize("kills", [(), ("unary", "batched", "oldest", "stream")])
def test_random_cancels_leave_nothing(
    served: Served, client: Client, kills: tuple[str, ...]
) -> None:
    """Every request ends, and its place is free again, though processes of models die."""
    random = Random(15)
    clients, pending = [], []
    for number in range(1, 401):
        clients.append(Client(served.url))
        pending.append(ask_at_random(clients[-1], number, random))
        if kills and number % 100 == 0:
            pid = served.model(kills[number // 100 - 1]).pids[0]
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
