"""Requests that generate nothing: documents to rank, texts to embed."""

import time
from collections.abc import Iterator
from contextlib import closing
from statistics import median
from typing import Any, Final, NamedTuple

from harness.client.dialect import dialect_of_path, route
from harness.conform.bench import Bench
from harness.conform.case import case, reports
from harness.conform.finding import Evidence, Finding, found
from harness.conform.routes import Routes
from harness.experiments.outcome import CannotDecideError, RefusedError
from harness.experiments.patience import READY_S
from harness.records import Delivery, Outcome
from harness.store.conform_result import Failure, Level
from harness.workload.session import ChatMessage

TRIES: Final = 3
FIRST_DOCUMENTS: Final = 32
MOST_DOCUMENTS: Final = 1024
LONG_S: Final = 0.25  # a request that takes this long is worth leaving
LONG_TIMES: Final = 10  # times one document: else no queue of documents forms
LEAVES_AFTER: Final = 0.1  # of the time that all its documents take
WORDS: Final = 40  # a document


class PoolingRoute(NamedTuple):
    name: str
    path: str

    def body(self, model: str, documents: list[str]) -> dict[str, Any]:
        texts = [ChatMessage("user", text) for text in documents]
        return {"model": model, **dialect_of_path(self.path).put(texts)}


class Pooling:
    """One of the server's routes for documents."""

    def __init__(self, bench: Bench, routes: Routes, which: PoolingRoute) -> None:
        self._bench, self._routes, self._route = bench, routes, which

    def offers(self) -> bool:
        return self._routes.post(self._route.path, self._body(1)).status == 200

    def takes_s(self, documents: int) -> float:
        """Raises CannotDecideError if it is refused."""
        sent_s = time.perf_counter()
        reply = self._routes.post(self._route.path, self._body(documents))
        if reply.status != 200:
            raise CannotDecideError(f"{documents} documents were refused: status {reply.status}")
        return time.perf_counter() - sent_s

    def wait_beside_s(self, documents: int, longest_s: float, *, leaves: bool) -> float:
        """How long one document takes when a client with `documents` is served, or has left."""
        bench = self._bench
        asked = self._body(documents)
        spec = bench.short(1, delivery=Delivery.UNARY, path=self._route.path, body=asked)
        began_s = time.perf_counter()
        stream = bench.start(spec, "")
        bench.pause(LEAVES_AFTER * longest_s)
        if leaves:
            stream.leave()
            row = stream.join(READY_S)
            if row is None or row.outcome is not Outcome.ABANDONED:
                raise CannotDecideError("the client with many documents could not leave")
        waited_s = self.takes_s(1)
        stream.join(READY_S)
        bench.pause(max(0.0, began_s + longest_s - time.perf_counter()))  # what may still run
        return waited_s

    def _body(self, documents: int) -> dict[str, Any]:
        texts = [f"{self._bench.rng.getrandbits(64)} {'word ' * WORDS}" for _ in range(documents)]
        return self._route.body(self._bench.session.plan.model, texts)


@case(
    "pooling/leave",
    Level.SHOULD,
    "Documents of a client that left are neither ranked nor embedded.",
    wire="A request with many documents (to /v1/rerank, /rerank and /v1/embeddings, as far as the "
    "server has them) is left after a tenth of its time, and a request with one document comes; in "
    "the control the client stays. Three times.",
    passes="at the median the one document waits less than half of what it waits for a client that "
    "stays, beyond its time on the idle server",
    methods="R W",
    why="A list of documents becomes many requests inside; what is not yet dispatched when the "
    "client leaves is forgotten by the abort, and computed.",
    remedy="abort all documents of a request with it, also documents that are not yet queued",
    needs=("http",),
    caught=reports("vllm-project/vllm#55502 antflydb/antfly#838 ggml-org/llama.cpp#6421"),
)
def leave(bench: Bench) -> Finding:
    with closing(Routes(bench.session.plan, bench.known)) as routes:
        findings = [find(pooling, name) for name, pooling in offered(bench, routes)]
    if not findings:
        raise RefusedError("the server neither ranks nor embeds documents")
    red = [one for one in findings if one.failure is not None]
    evidence = {key: value for one in findings for key, value in one.evidence.items()}
    said = "; ".join(one.reason for one in red or findings)
    return found(said, said if red else None, evidence, Failure.NEVER)


def offered(bench: Bench, routes: Routes) -> Iterator[tuple[str, Pooling]]:
    """Each route that the server has, by its name; of two routes to one thing, the first."""
    path = bench.session.plan.target.path
    ranks = [PoolingRoute("rerank", route(path, "rerank")), PoolingRoute("rerank", "/rerank")]
    for ways in (ranks, [PoolingRoute("embeddings", route(path, "embeddings"))]):
        for which in ways:
            pooling = Pooling(bench, routes, which)
            if pooling.offers():
                yield which.name, pooling
                break


def find(pooling: Pooling, name: str) -> Finding:
    documents, longest_s, one_s = enough_documents(pooling)
    stays = [pooling.wait_beside_s(documents, longest_s, leaves=False) for _ in range(TRIES)]
    left = [pooling.wait_beside_s(documents, longest_s, leaves=True) for _ in range(TRIES)]
    return judge(name, documents, one_s, stays=stays, left=left)


def enough_documents(pooling: Pooling) -> tuple[int, float, float]:
    """How many documents take long enough, how long they take, and how long one takes (s)."""
    one_s = min(pooling.takes_s(1) for _ in range(TRIES))
    documents = FIRST_DOCUMENTS
    while True:
        longest_s = pooling.takes_s(documents)
        if longest_s >= max(LONG_S, LONG_TIMES * one_s) or documents >= MOST_DOCUMENTS:
            return documents, longest_s, one_s
        documents *= 2


def judge(
    name: str, documents: int, one_s: float, *, stays: list[float], left: list[float]
) -> Finding:
    """`stays`, `left`: how long one document took (s) when a client stayed, or had left.
    Raises CannotDecideError if the client that stayed did not hold it up."""
    beside_s, after_s = median(stays) - one_s, median(left) - one_s
    evidence: Evidence = {
        f"{name}_documents": documents,
        f"{name}_one_ms": round(1e3 * one_s, 1),
        f"{name}_beside_ms": round(1e3 * beside_s, 1),
        f"{name}_after_leave_ms": round(1e3 * after_s, 1),
    }
    if beside_s < max(one_s, LONG_S / 4):
        raise CannotDecideError(
            f"{name}: when a client with {documents} documents stays, another document waits only "
            f"{1e3 * beside_s:.0f} ms: it would not show that they are still computed"
        )
    said = (
        f"{name}: one document waits {1e3 * after_s:.0f} ms when the client with {documents} has "
        f"left, and {1e3 * beside_s:.0f} ms when it stays"
    )
    return found(said, said if after_s > beside_s / 2 else None, evidence, Failure.NEVER)
