"""Find out, with a few short requests, how many tokens a server makes of a prompt's bytes."""

from typing import Final

import httpx

from harness.load.dialect import NONSENSE, Chunk, decode_chunk, refusal_message, request_body
from harness.load.plan import LoadPlan
from harness.load.prompts import prompt
from harness.prompt_scale import PromptScale, fit_scale
from harness.records import Delivery

_SIZES: Final = (64, 256, 512, 1024)  # bytes; some 15 to 300 tokens of a usual tokenizer
_NOBODY: Final = -1  # the user whose prompts these are: no user of the load


class CalibrationError(Exception):
    """The server's count is not to be had; the message says why."""


def calibrate(client: httpx.Client, plan: LoadPlan) -> PromptScale:
    """Ask for one token after prompts of several sizes. Raises CalibrationError."""
    samples = [(size, _prompt_tokens(client, plan, size)) for size in _SIZES]
    scale = fit_scale(samples)
    if scale is None:
        raise CalibrationError(f"its counts make no sense: {samples} (bytes, tokens)")
    return scale


def _prompt_tokens(client: httpx.Client, plan: LoadPlan, size: int) -> int:
    text = prompt(seed=plan.seed, user=_NOBODY, n=size, num_bytes=size)
    body = request_body(plan, text, max_tokens=1, delivery=Delivery.UNARY, n=1)
    try:
        answer = client.post(
            plan.url.rstrip("/") + plan.path,
            content=body,
            headers={"content-type": "application/json"},
            timeout=plan.timeouts.next_byte_s,
        )
    except httpx.HTTPError as error:
        raise CalibrationError(str(error)) from error
    if answer.status_code != 200:
        raise CalibrationError(refusal_message(answer.status_code, answer.content))
    usage = _decode(answer.content).usage
    if usage is None or usage.prompt_tokens is None:
        raise CalibrationError("its answers do not tell the tokens of the prompt (`usage`)")
    return usage.prompt_tokens


def _decode(body: bytes) -> Chunk:
    try:
        return decode_chunk(body)
    except NONSENSE as error:
        raise CalibrationError(f"its answer makes no sense ({error})") from error
