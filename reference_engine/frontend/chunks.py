"""The JSON of answers: OpenAI's objects for both endpoints, whole and in pieces.

An aborted request's last piece, or its body, is marked `partial` and says in `cancellation_info`
what became of it.
"""

from typing import Any

import msgspec

from reference_engine.frontend.client_request import ClientRequest
from reference_engine.protocol import Output

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


class AnswerWriter:
    """Writes the answers to one request.

    `include_usage`: at the end of a stream; `continuous_usage`: with each of its pieces. `head`:
    what every body begins with.
    """

    def __init__(
        self, request: ClientRequest, *, include_usage: bool = False, continuous_usage: bool = False
    ) -> None:
        self._request = request
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        kind = "chat.completion" if request.chat else "text_completion"
        self.head = {
            "id": request.answer_id,
            "object": kind,
            "created": request.created,
            "model": request.model,
        }
        self._chunk = {**self.head, "object": "chat.completion.chunk" if request.chat else kind}

    def opening(self) -> bytes:
        """The events before the first token: chat announces its role."""
        if not self._request.chat:
            return b""
        content = {"delta": {"role": "assistant", "content": ""}}
        choices = [_choice(choice.index, content, None) for choice in self._request.choices]
        return b"".join(self._event([choice], 0) for choice in choices)

    def token(self, index: int, output: Output) -> bytes:
        """The event of one output: text, or the finish reason with none."""
        num_generated = 0
        if self._continuous_usage:
            others = sum(c.num_sent for c in self._request.choices if c.index != index)
            num_generated = others + output.num_generated
        return self._event([self._piece(index, output)], num_generated)

    def closing(self, aborted: list[tuple[int, Output]]) -> bytes:
        """What follows the last token: the ends of aborted answers, usage, and the end mark."""
        request = self._request
        if aborted:
            choices = [self._piece(index, output) for index, output in aborted]
            return _event({**self._chunk, "choices": choices, **self._partial()}) + DONE
        if not self._include_usage:
            return DONE
        return _event({**self._chunk, "choices": [], "usage": usage(request)}) + DONE

    def whole(self, texts: list[str]) -> dict[str, Any]:
        """The body of an answer that was not streamed, or that was aborted. A text a choice."""
        request = self._request
        choices = [
            _choice(choice.index, self._whole_content(text), choice.finish_reason)
            for choice, text in zip(request.choices, texts, strict=True)
        ]
        end = self._partial() if request.is_aborted else {"usage": usage(request)}
        return {**self.head, "choices": choices, **end}

    def _whole_content(self, text: str) -> dict[str, Any]:
        if self._request.chat:
            return {"message": {"role": "assistant", "content": text}}
        return {"text": text}

    def _piece(self, index: int, output: Output) -> dict[str, Any]:
        if not self._request.chat:
            content: dict[str, Any] = {"text": output.text}
        elif output.finish_reason is None or output.text:
            content = {"delta": {"content": output.text}}
        else:
            content = {"delta": {}}
        return _choice(index, content, output.finish_reason)

    def _partial(self) -> dict[str, Any]:
        request = self._request
        info = cancellation_info(request)
        return {"usage": usage(request), "partial": True, "cancellation_info": info}

    def _event(self, choices: list[dict[str, Any]], num_generated: int) -> bytes:
        chunk: dict[str, Any] = {**self._chunk, "choices": choices}
        if self._continuous_usage:
            chunk["usage"] = _usage(self._request.num_prompt_tokens, num_generated)
        return _event(chunk)


def usage(request: ClientRequest) -> dict[str, Any]:
    """OpenAI's: the prompt once, all answers' tokens; cached tokens are those of the first answer.

    The other answers find the prompt in the cache because the first one computed it.
    """
    counts: dict[str, Any] = _usage(request.num_prompt_tokens, request.num_generated)
    ending = request.choices[0].ending
    if ending is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": ending.num_cached_tokens}
    return counts


def cancellation_info(request: ClientRequest) -> dict[str, Any]:
    """How an aborted request ended.

    `position`: tokens that the frontend had when it was cancelled; a step in flight may have added
    one, which `tokens_generated` has. `reason` is null if nobody here had asked for the abort.
    """
    cancellation = request.token.cancellation
    return {
        "reason": None if cancellation is None else cancellation.reason,
        "phase": request.phase,
        "position": request.num_generated if cancellation is None else request.num_at_cancel,
        "tokens_generated": request.num_generated,
        "tokens_remaining": request.num_remaining,
    }


def error_event(message: str) -> bytes:
    """The last event of a stream that cannot go on."""
    error = {"message": message, "type": "server_error", "param": None, "code": None}
    return _event({"error": error})


def _choice(index: int, content: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, **content, "logprobs": None, "finish_reason": finish_reason}


def _usage(num_prompt: int, num_generated: int) -> dict[str, int]:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
    }


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + _encode(chunk) + b"\n\n"
