"""The cases of cancellation on several servers with the same models, as one table.

    python -m tests.reference_engine.triton.side_by_side
    python -m tests.reference_engine.triton.side_by_side --triton 'COMMAND {repository} {port}'

The second adds a column for NVIDIA's server, started by the command. Each server gets a copy of the
repository, whose models report what they do. Pauses give a server time;
the tests, whose server is at hand, look inside instead.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from tritonclient.grpc import InferenceServerClient

from tests.reference_engine.triton.served_repository import Client, Pending, Watched

PAUSE_S = 0.5
OURS = (
    f"{sys.executable} -m reference_engine --runner none --port 0 --kserve-port {{port}} "
    "--model-repository {repository}"
)
OF_CLIENT = ("Locally cancelled", "Channel closed", "Deadline Exceeded", "Stream removed")
Case = Callable[["Side"], str]


class Side:
    """One server, and a client for each case."""

    def __init__(self, watched: Watched, url: str) -> None:
        self.watched, self.url = watched, url
        self._numbers = count(1)

    def client(self) -> "Client":
        return Client(self.url)

    def arrived(self, name: str, pending: Pending) -> None:
        """Returns when the server has the request."""
        threading.Event().wait(PAUSE_S / 5)

    def seen(self, *names: str) -> None:
        """Returns when the server has seen that these requests were cancelled."""
        threading.Event().wait(PAUSE_S)

    def is_over(self, name: str, pending: Pending) -> bool:
        return not pending.is_silent()

    def start(self, client: Client, model: str, **options: Any) -> tuple[str, Pending]:
        """A request that runs, until its gate is opened."""
        name, pending = self.ask(client, model, **options)
        self.watched.expect(model, "started", name)
        return name, pending

    def ask(
        self, client: Client, model: str, values: dict[str, int] | None = None, **options: Any
    ) -> tuple[str, Pending]:
        name = f"{model}-{next(self._numbers)}"
        pending = client.ask(model, name, values, **options)
        self.arrived(name, pending)
        return name, pending

    def end(self, pending: Pending) -> str:
        said = pending.next()
        if not isinstance(said, str) or said == "final":
            return "OK"
        is_of_client = any(text in said for text in OF_CLIENT)
        return said.split()[0] + ("" if is_of_client else "/server")

    def what(self, name: str) -> str:
        said = self.watched.said(name)
        if "cancelled" in said:
            return "the model stops"
        return "executed" if "answered" in said else "dropped"


def running(looks: int) -> Case:
    def case(side: Side) -> str:
        with side.client() as client:
            name, pending = side.start(client, "unary", values={"CHECK": looks})
            pending.cancel()
            after, last = side.ask(client, "unary", {"ITL_MS": 0})
            side.seen(name)
            if looks:  # the model's process hears of it later than the server
                side.watched.expect("unary", "cancelled", name)
            side.watched.open(name)
            side.end(last)
            side.watched.expect("unary", "answered", after)
            return side.what(name).replace("executed", "runs to its end and keeps its slot")

    return case


def queued(model: str, *, deadline: bool = False) -> Case:
    def case(side: Side) -> str:
        with side.client() as client:
            name, first = side.start(client, model)
            options = {"client_timeout": 0.3} if deadline else {}
            gone, second = side.ask(client, model, {"CHECK": 0, "ITL_MS": 0}, **options)
            last, third = side.ask(client, model, {"ITL_MS": 0})
            if not deadline:
                second.cancel()
            side.end(second)
            side.seen(gone)
            side.watched.open(name)
            ends = side.end(first), side.end(third)
            side.watched.expect(model, "answered", last)
            assert ends == ("OK", "OK")
            return side.what(gone)

    return case


def timeout_of_its_own(side: Side) -> str:
    with side.client() as client:
        name, first = side.start(client, "queued")
        _, second = side.ask(client, "queued", timeout=100_000)
        ended = second.next()
        side.watched.open(name)
        side.end(first)
        return str(ended)


def sequence(model: str, cancelled: int) -> Case:
    def case(side: Side) -> str:
        with side.client() as client:
            number = next(side._numbers)
            name, first = side.start(client, model, sequence_id=number, sequence_start=True)
            options = {"sequence_id": number}
            others = [side.ask(client, model, {"ITL_MS": 0}, **options) for _ in range(3)]
            names, pending = zip((name, first), *others, strict=True)
            pending[cancelled - 1].cancel()
            side.seen(names[cancelled - 1])
            when = "at once" if side.is_over(names[3], pending[3]) else "at its turn"
            side.watched.open(name)
            ends = [side.end(one) for one in pending]
            _, further = side.ask(client, model, {"ITL_MS": 0}, sequence_id=number)
            goes_on = side.end(further)
            again = {"sequence_start": True, "sequence_end": True}
            _, anew = side.ask(client, model, {"ITL_MS": 0}, sequence_id=number, **again)
            told = f", number 4 {when}" if ends[3] != "OK" else ""
            return f"{', '.join(ends)}{told}; further: {goes_on}; anew: {side.end(anew)}"

    return case


def started_twice(side: Side) -> str:
    with side.client() as client:
        options = {"sequence_id": next(side._numbers), "sequence_start": True}
        first = side.end(side.ask(client, "oldest", {"ITL_MS": 0}, **options)[1])
        second = side.end(side.ask(client, "oldest", {"ITL_MS": 0}, **options)[1])
        return f"{first}, {second}"


def one_of_a_batch(side: Side) -> str:
    with side.client() as client:
        alone, first = side.start(client, "batched")
        batch = [side.ask(client, "batched") for _ in range(3)]
        side.watched.open(alone)
        for name, _ in batch:
            side.watched.expect("batched", "started", name)
        batch[1][1].cancel()
        side.seen(batch[1][0])
        side.watched.open(*(name for name, _ in batch))
        return ", ".join(side.end(pending) for pending in (first, *(one for _, one in batch)))


def after_the_answer(side: Side) -> str:
    with side.client() as client:
        name, pending = side.ask(client, "unary", {"ITL_MS": 0})
        ended = side.end(pending)
        pending.cancel()
        side.seen(name)
        return f"{ended}, then {'silent' if pending.is_silent() else side.end(pending)}"


def after_a_stream(side: Side) -> str:
    with side.client() as client:
        pending = client.stream()
        client.send("complete", N=2, ITL_MS=0)
        ends = [side.end(pending) for _ in range(3)]
        pending.cancel()
        return f"{', '.join(ends)}, then {side.end(pending)}"


def half_close(side: Side) -> str:
    with side.client() as client:
        pending = client.stream()
        client.send("half", N=2)
        side.end(pending)
        side.watched.open("half")
        client.stop_stream()
        return ", ".join(side.end(pending) for _ in range(2))


def two_on_a_stream(side: Side) -> str:
    with side.client() as client:
        pending = client.stream()
        for name in ("twin-1", "twin-2"):
            client.send(name)
            side.watched.expect("stream", "started", name)
        pending.cancel()
        ended = side.end(pending)
        for name in ("twin-1", "twin-2"):
            side.watched.expect("stream", "cancelled", name)
        return f"{ended}, {'once' if pending.is_silent() else 'again'}; both models stop"


def ensemble(side: Side) -> str:
    with side.client() as client:
        name, pending = side.ask(client, "pipeline", {"CHECK": 0})
        side.watched.expect("unary", "started", name)
        pending.cancel()
        side.seen(name)
        side.watched.open(name)
        side.watched.expect("unary", "answered", name)
        side.seen(name)
        flush, last = side.ask(client, "second", {"ITL_MS": 0})
        side.end(last)
        side.watched.expect("second", "answered", flush)
        models = [model for model, what, about in side.watched.events if about == name]
        return "the second step starts" if "second" in models else "no further step starts"


CASES: dict[str, Case] = {
    "running, the model looks": running(1),
    "running, the model does not look": running(0),
    "queued, no batcher: cancel": queued("unary"),
    "queued, no batcher: deadline": queued("unary", deadline=True),
    "queued, dynamic batcher: cancel": queued("single"),
    "queued, dynamic batcher: deadline": queued("single", deadline=True),
    "queued, queue policy: cancel": queued("queued"),
    "queued, queue policy: deadline": queued("queued", deadline=True),
    "queued, queue policy: `timeout`": timeout_of_its_own,
    **{
        f"sequence, {model}: number {number} of 4": sequence(model, number)
        for model in ("oldest", "direct")
        for number in (1, 2, 3)
    },
    "sequence, started twice": started_twice,
    "batch: number 2 of 3": one_of_a_batch,
    "unary, cancel after the answer": after_the_answer,
    "stream, cancel after the last response": after_a_stream,
    "stream, half-close": half_close,
    "stream, two requests, one cancel": two_on_a_stream,
    "ensemble, cancel in the first step": ensemble,
}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextmanager
def serving(command: str) -> Iterator[Side]:
    with tempfile.TemporaryDirectory(prefix="kserve-") as folder:
        watched, port = Watched(Path(folder)), free_port()
        filled = command.format(repository=watched.folder, port=port)
        with (Path(folder) / "log").open("w") as log:
            process = subprocess.Popen(
                ["/bin/sh", "-c", f"exec {filled}"], stdout=log, stderr=log, start_new_session=True
            )
        try:
            url = f"127.0.0.1:{port}"
            wait_for(url, process)
            yield Side(watched, url)
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)
            watched.stop_listening()


def wait_for(url: str, process: "subprocess.Popen[bytes]") -> None:
    with InferenceServerClient(url) as client:
        for _ in range(600):
            try:
                if client.is_server_ready():
                    return
            except Exception:
                if process.poll() is not None:
                    raise
            threading.Event().wait(0.1)
    raise TimeoutError(f"{url} is not ready")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--triton", metavar="COMMAND", help="with {repository} and {port}")
    given = parser.parse_args().triton
    sides = {"by default": OURS, "--triton-faithful": f"{OURS} --triton-faithful"}
    if given:
        sides = {"Triton": given, **sides}
    rows: dict[str, list[str]] = {name: [] for name in CASES}
    for command in sides.values():
        with serving(command) as side:
            for name, case in CASES.items():
                rows[name].append(case(side))
                sys.stderr.write(f"{name}: {rows[name][-1]}\n")
    sys.stdout.write(f"| case | {' | '.join(sides)} |\n|{' --- |' * (len(sides) + 1)}\n")
    for name, cells in rows.items():
        sys.stdout.write(f"| {name} | {' | '.join(cells)} |\n")


if __name__ == "__main__":
    main()
