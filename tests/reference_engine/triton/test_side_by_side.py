"""The engine's two manners, from its command line, as the table of docs/kserve.md has them."""

from pathlib import Path

import httpx
import pytest

from tests.reference_engine.running_engine import running
from tests.reference_engine.triton.served_repository import Client, Pending, Watched
from tests.reference_engine.triton.side_by_side import CASES, OURS, serving


@pytest.mark.e2e
def test_the_faithful_manner_executes_a_cancelled_request_of_a_queue_without_a_policy() -> None:
    with serving(f"{OURS} --triton-faithful") as side:
        assert CASES["queued, no batcher: cancel"](side) == "executed"


@pytest.mark.e2e
def test_the_frontend_counts_who_leaves_a_model_and_checks_its_books(tmp_path: Path) -> None:
    """An ensemble's steps do not count again, and a completed request does not count."""
    watched = Watched(tmp_path)
    flags = ("--runner", "none", "--kserve-port", "0", "--model-repository", str(watched.folder))
    with running(*flags) as engine:
        client = Client(engine.kserve_url)
        stream = client.stream()
        assert client.ask("unary", "stays", {"ITL_MS": 0}).next() == 1
        asked: dict[str, Pending] = {}
        for model in ("unary", "pipeline"):
            asked[model] = client.ask(model, model)
            watched.expect("unary", "started", model)
            asked[model].cancel()
            watched.expect("unary", "cancelled", model)
        client.send("complete", ITL_MS=0)
        assert [stream.next(), stream.next()] == [1, "final"]
        for model in ("stream", "second"):  # the second is not decoupled
            client.send(f"{model}-leaves", model)
            watched.expect(model, "started", f"{model}-leaves")
        stream.cancel()
        for model in ("stream", "second"):
            watched.expect(model, "cancelled", f"{model}-leaves")
        counted = {
            (model, kind): engine.metric(
                "dynamo_frontend_model_cancellation_total",
                model=model,
                endpoint="tensor",
                request_type=kind,
            )
            for model, kind in [
                ("unary", "unary"),
                ("pipeline", "unary"),
                ("stream", "stream"),
                ("second", "stream"),
            ]
        }
        assert counted == dict.fromkeys(counted, 1)
        assert engine.metric("dynamo_frontend_model_cancellation_total") == 4
        assert httpx.get(f"{engine.url}/walkaway/integrity").text == "ok\n"
        client.close()
    watched.stop_listening()
