import pytest

from reference_engine.worker.engine import AnswerText


def pushed(stop: tuple[str, ...], *texts: str) -> tuple[list[str], bool]:
    answer = AnswerText(stop)
    sent, stopped = [], False
    for text in texts:
        part, stopped = answer.push(text)
        sent.append(part)
        if stopped:
            break
    else:
        sent.append(answer.flush())
    return sent, stopped


@pytest.mark.parametrize(
    ("stop", "texts", "sent", "stopped"),
    [
        ((), ("a", "b"), ["a", "b", ""], False),
        (("x",), ("a", "b"), ["a", "b", ""], False),
        (("end",), ("the e", "nd is"), ["the ", ""], True),  # straddles two tokens
        (("end",), ("the e", "asy"), ["the ", "easy", ""], False),  # looked like it, was not
        (("end",), ("the e",), ["the ", "e"], False),  # held back, then flushed
        (("bc", "ab"), ("xabc",), ["x"], True),  # the earliest counts
        (("aab",), ("aa", "ab"), ["", "a"], True),
    ],
)
def test_stop_strings(
    stop: tuple[str, ...], texts: tuple[str, ...], sent: list[str], stopped: bool
) -> None:
    assert pushed(stop, *texts) == (sent, stopped)
