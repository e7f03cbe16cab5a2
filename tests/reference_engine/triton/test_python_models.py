"""The process of a model: Triton's module for models, and models that go wrong."""

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import InferInput, InferRequestedOutput
from tritonclient.utils import InferenceServerException

from tests.reference_engine.triton.served_repository import Pending, Served, tensor

ODD = Path(__file__).parent / "repository_odd"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("odd"), source=ODD)
    try:
        served.start()
        yield served
    finally:
        served.close()


def text(name: str, *values: str) -> InferInput:
    return tensor(name, np.array([value.encode() for value in values], dtype=np.object_))


def ask(served: Served, do: str, *more: InferInput, **options: Any) -> Any:
    with served.client() as client:
        return client.infer("odd", [text("DO", do), *more], **options)


def words(result: Any) -> list[str]:
    return [word.decode() for word in result.as_numpy("SAID")]


def stream(served: Served, do: str) -> list[list[str] | str]:
    """Its responses, or the error's text, up to the end."""
    pending, said = Pending(), list[list[str] | str]()
    with served.client() as client:
        client.start_stream(pending.note)
        client.async_stream_infer(
            "odd_stream", [text("DO", do)], enable_empty_final_response=True, request_id=do
        )
        while True:
            result, error = pending._ends.get(timeout=20)
            if error is not None:
                return [*said, error.message()]
            assert result is not None
            if result.as_numpy("SAID") is not None:
                said.append(words(result))
            if result.get_response().parameters["triton_final_response"].bool_param:
                return said


def test_a_model_sees_its_configuration_and_the_request(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    result = ask(
        served,
        "tell",
        request_id="r-1",
        timeout=5000,
        parameters={"depth": 3, "mood": "good"},
        outputs=[InferRequestedOutput("SAID")],
    )
    assert words(result) == [
        *("odd", "odd_0_0", "1", "CPU", "hello", "TYPE_FP32", "[-1]", "r-1"),
        *('{"depth": 3, "mood": "good"}', "5000", '["SAID"]'),
    ]
    assert "odd_0_0: asked by r-1" in caplog.messages


def test_a_model_owns_its_inputs_and_gets_only_wanted_outputs_out(served: Served) -> None:
    more = tensor("MORE", np.array([1.5, -2], np.float32))
    result = ask(served, "double", more, outputs=[InferRequestedOutput("TWICE")])
    assert result.as_numpy("TWICE").tolist() == [3, -4]
    assert result.as_numpy("SAID") is None
    assert result.get_response().parameters["by"].int64_param == 2
    assert ask(served, "huge").as_numpy("TWICE").shape == (17 << 20,)  # over a frame of the wire


@pytest.mark.parametrize(
    ("do", "said"),
    [
        ("raises", "ValueError: no such thing"),
        ("too_few", "execute returned 0 for 1 requests"),
        ("no_answer", "the model let go of the request without a final response"),
        ("nothing", "the model let go of the request without a final response"),
        ("unknown_output", "its configuration has no output 'OTHER'"),
        ("strange_type", "Tensors of datetime64[s] are not supported."),
        ("calls_others", "A model cannot call other models on this server."),
        ("missing", "has no attribute 'missing'"),
    ],
)
def test_a_wrong_answer_is_an_internal_error_and_logged_at_most_once(
    served: Served, caplog: pytest.LogCaptureFixture, do: str, said: str
) -> None:
    with pytest.raises(InferenceServerException) as failed:
        ask(served, do)
    assert failed.value.status() == "StatusCode.INTERNAL"
    assert said in failed.value.message()
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) <= 1
    assert words(ask(served, "by_sender")) == ["sent"]
    served.idle()


def test_an_error_of_the_model_keeps_its_status(served: Served) -> None:
    with pytest.raises(InferenceServerException, match="not today") as failed:
        ask(served, "error")
    assert failed.value.status() == "StatusCode.UNAVAILABLE"


def test_the_first_of_two_answers_counts(served: Served) -> None:
    assert words(ask(served, "both_ways")) == ["sent"]
    served.idle()


def test_a_model_that_dies_is_started_again(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """Its request fails; the requests behind it, and other models, do not."""
    [before] = served.model("odd").pids
    with served.client() as client:
        ends = [Pending(), Pending()]
        client.async_infer("odd", [text("DO", "dies")], ends[0].note)
        client.async_infer("odd", [text("DO", "tell")], ends[1].note)
        _, error = ends[0]._ends.get(timeout=20)
        assert error.status() == "StatusCode.INTERNAL"
        assert "odd_0_0 ended with status 7" in error.message()
        result, error = ends[1]._ends.get(timeout=20)
        assert (words(result)[0], error) == ("odd", None)
    assert [before] != served.model("odd").pids
    assert len([m for m in caplog.messages if "ended with status 7" in m]) == 1
    served.idle()


def test_a_model_that_does_not_start_again_refuses_until_it_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Waiting requests are refused, too; the reason is logged once."""
    served = Served(tmp_path, source=ODD)
    try:
        served.start()
        file = served.folder / "odd" / "1" / "model.py"
        code = file.read_text()
        file.write_text("nonsense")
        [pid] = served.model("odd").pids
        assert pid is not None
        with served.client() as client:
            ends = [Pending(), Pending()]
            client.async_infer("odd", [text("DO", "hangs")], ends[0].note)
            served.until(lambda: served.model("odd")._scheduler.num_running == 1)
            client.async_infer("odd", [text("DO", "tell")], ends[1].note)
            served.waiting("odd", 1)
            os.kill(pid, signal.SIGKILL)
            assert str(ends[0].next()).startswith("INTERNAL")
            assert ends[1].next() == "UNAVAILABLE no instance of 'odd' runs"
            assert not client.is_model_ready("odd")
            served.until(lambda: served.model("odd").pids != [pid])
            tried = served.model("odd").pids
            served.until(lambda: served.model("odd").pids not in (tried, [None]))
            file.write_text(code)
            served.until(lambda: served.model("odd").is_ready)
            assert words(ask(served, "tell"))[0] == "odd"
        assert len([message for message in caplog.messages if "nonsense" in message]) == 1
    finally:
        served.close()


def test_a_request_that_is_never_answered_ends_at_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reference_engine.triton.instance.GRACE_S", 0.2)
    served = Served(tmp_path, source=ODD)
    try:
        served.start()
        with pytest.raises(InferenceServerException) as failed:
            ask(served, "hangs", client_timeout=0.3)
        assert failed.value.status() == "StatusCode.DEADLINE_EXCEEDED"
        assert served.model("odd")._scheduler.num_running == 1
        served.repository.check_integrity()
    finally:
        served.close()  # although the model never returns


def test_decoupled_senders(served: Served) -> None:
    assert stream(served, "from_thread") == [["one"], ["two"]]
    assert stream(served, "none") == []
    assert stream(served, "after_final") == [["last"]]
    [problems] = stream(served, "tell_problems")
    assert [str(problem).removeprefix("Unable to send response. ") for problem in problems] == [
        "Inference Response object must be provided when no flag is set.",
        "Unsupported flag provided.",
        "Response sender has been closed.",
    ]
    served.idle()


@pytest.mark.parametrize(
    ("do", "said"),
    [
        ("lets_go", [["first"], "the model let go of the request without a final response"]),
        ("raises", [["first"], "ValueError: no such thing"]),
        ("returns", ["execute of a decoupled model must return None"]),
    ],
)
def test_a_stream_that_goes_wrong_ends_with_an_error(
    served: Served, do: str, said: list[Any]
) -> None:
    *responses, error = stream(served, do)
    assert responses == said[:-1]
    assert said[-1] in error
    served.idle()


def test_coroutines_run_side_by_side(served: Served) -> None:
    """The first request waits for the second one."""
    pending = Pending()
    with served.client() as client:
        client.start_stream(pending.note)
        for do in ("waits", "wakes"):
            client.async_stream_infer("odd_async", [text("DO", do)])
        ends = [pending._ends.get(timeout=20) for _ in range(2)]
    assert sorted(words(result) for result, _ in ends) == [["waits"], ["wakes"]]
    served.idle()


def test_a_cancelled_request_may_still_send(served: Served) -> None:
    """`is_cancelled()` stays True after the final flag."""
    pending = Pending()
    with served.client() as client:
        client.start_stream(pending.note)
        client.async_stream_infer("odd_stream", [text("DO", "until_cancelled")])
        result, _ = pending._ends.get(timeout=20)
        assert words(result) == ["started"]
        client.stop_stream(cancel_requests=True)
    assert stream(served, "tell_problems") == [["True", "True"]]
    served.idle()
