"""Texts that the simulated runner says word by word: a JSON Lines file.

    {"prompt": "Is this review good?", "text": "Good. It praises the food.", "probs": [0.9, 0.8]}

The prompt is that of a completion, or the only message of a chat. A token is a word or a sign with
the space before it, and has the next of the probabilities (else 1). After the text comes the end of
sequence.
"""

import re
from pathlib import Path
from typing import Final

import msgspec

from reference_engine.config import EngineConfigError
from reference_engine.core.request import Request
from reference_engine.model.tokenizer import EOS_TOKEN_ID, encode_bytes

_WORD: Final = re.compile(r"\s*(?:\w+|[^\w\s])|\s+")


class TeacherLine(msgspec.Struct, forbid_unknown_fields=True):
    prompt: str
    text: str
    probs: list[float] = []


class Teacher:
    """`words`: all words of its texts, without repeats; their ids begin with `first_id`."""

    def __init__(self, lines: list[TeacherLine], first_id: int) -> None:
        ids: dict[str, int] = {}
        self._answers: dict[tuple[int, ...], list[tuple[int, float]]] = {}
        for line in lines:
            words = words_of(line.text)
            tokens = [ids.setdefault(word, first_id + len(ids)) for word in words]
            probs = [*line.probs[: len(words)], *[1.0] * (len(words) - len(line.probs))]
            answer = list(zip(tokens, probs, strict=True))
            for prompt in (line.prompt, f"user: {line.prompt}\nassistant:"):
                self._answers[tuple(encode_bytes(prompt))] = answer
        self.words = list(ids)

    def next_token(self, request: Request) -> tuple[int, float] | None:
        """The next token and its probability; None for a prompt that it does not know."""
        prompt = tuple(request.token_ids[: request.num_prompt_tokens])
        answer = self._answers.get(prompt)
        if answer is None:
            return None
        is_over = request.num_generated >= len(answer)
        return (EOS_TOKEN_ID, 1.0) if is_over else answer[request.num_generated]


def words_of(text: str) -> list[str]:
    return _WORD.findall(text)


def read_teacher(path: str, first_id: int) -> Teacher:
    """Raises EngineConfigError, naming the line."""
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise EngineConfigError(f"--teacher {path}: {error.strerror}") from error
    decoder, lines = msgspec.json.Decoder(TeacherLine), []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            lines.append(decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise EngineConfigError(f"--teacher {path}: line {number}: {error}") from error
        if not all(0 <= one <= 1 for one in lines[-1].probs):
            raise EngineConfigError(f"--teacher {path}: line {number}: probs go from 0 to 1")
    return Teacher(lines, first_id)
