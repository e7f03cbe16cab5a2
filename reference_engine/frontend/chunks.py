"""The JSON of answers: OpenAI's objects for both endpoints, whole and in pieces."""

from typing import Any

import msgspec

from reference_engine.frontend.openai_api import Generation
from reference_engine.protocol import Output

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


class AnswerWriter:
    """Writes one answer. `created` is in seconds since the epoch."""

    def __init__(self, generation: Generation, answer_id: str, model: str, created: int) -> None:
        self._generation = generation
        kind = "chat.completion" if generation.chat else "text_completion"
        self._whole = {"id": answer_id, "object": kind, "created": created, "model": model}
        chunk_kind = "chat.completion.chunk" if generation.chat else kind
        self._chunk = {**self._whole, "object": chunk_kind}

    def opening(self) -> bytes:
        """The event before the first token: chat announces its role."""
        if not self._generation.chat:
            return b""
        return self._event([self._choice({"delta": {"role": "assistant", "content": ""}}, None)], 0)

    def token(self, output: Output) -> bytes:
        """The event of one output: text, or the finish reason with none."""
        if not self._generation.chat:
            content: dict[str, Any] = {"text": output.text}
        elif output.finish_reason is None:
            content = {"delta": {"content": output.text}}
        else:
            content = {"delta": {"content": output.text} if output.text else {}}
        choice = self._choice(content, output.finish_reason)
        return self._event([choice], output.num_generated)

    def closing(self, num_generated: int) -> bytes:
        """What follows the last token: usage, where it was asked for, and the end mark."""
        if not self._generation.include_usage:
            return DONE
        usage = {**self._chunk, "choices": [], "usage": self._usage(num_generated)}
        return b"data: " + _encode(usage) + b"\n\n" + DONE

    def whole(self, outputs: list[Output]) -> bytes:
        """The body of an answer that was not streamed."""
        text, last = "".join(output.text for output in outputs), outputs[-1]
        content = (
            {"message": {"role": "assistant", "content": text}}
            if self._generation.chat
            else {"text": text}
        )
        choice = self._choice(content, last.finish_reason)
        usage = self._usage(last.num_generated)
        return _encode({**self._whole, "choices": [choice], "usage": usage})

    def _choice(self, content: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        return {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}

    def _usage(self, num_generated: int) -> dict[str, int]:
        num_prompt = len(self._generation.prompt_token_ids)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
        }

    def _event(self, choices: list[dict[str, Any]], num_generated: int) -> bytes:
        chunk: dict[str, Any] = {**self._chunk, "choices": choices}
        if self._generation.continuous_usage:
            chunk["usage"] = self._usage(num_generated)
        return b"data: " + _encode(chunk) + b"\n\n"


def error_event(message: str) -> bytes:
    """The last event of a stream that cannot go on."""
    error = {"message": message, "type": "server_error", "param": None, "code": None}
    return b"data: " + _encode({"error": error}) + b"\n\n"
