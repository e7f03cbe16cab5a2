"""A server that still loads its model answers 503: it is waited for, up to a stated time."""

import time
from collections.abc import Callable
from typing import Final

import httpx

from harness.client.server_error import refusal_message
from harness.errors import TargetError
from harness.run.run_state import Preparation, RunState
from harness.run.settle import Asker, NotServedError, SilentServerError

LOADING_S: Final = 120.0
LOADING_POLL_S: Final = 0.5
FIRST_TOKENS: Final = 1

Unready = Callable[[], str | None]


def wait_for_page(run: Preparation, client: httpx.Client, url: str) -> None:
    """Wait until the server has a list of its models (the bundled engine: until it is healthy)."""
    page = "/health" if run.target.lifecycle else "/v1/models"
    wait_while_loading(run, lambda: unready_page(client, url, page))


def wait_for_answer(run: RunState, asker: Asker) -> None:
    """Wait until it answers: llama.cpp lists its models, and refuses all requests, while it loads.
    The bundled engine is known to be ready by now. Raises TargetError also if the server takes the
    request and sends nothing: no later request is then waited for."""
    if run.target.http and not run.target.lifecycle:
        run.progress.phase(f"waiting at most {run.timeout_s:g} s for a first answer")
        wait_while_loading(run, lambda: unready_answer(asker, longest_s=run.timeout_s))


def wait_while_loading(
    run: Preparation, unready: Unready, *, clock_s: Callable[[], float] = time.monotonic
) -> None:
    """`unready` asks once, and gives the server's words if it answers 503. Raises TargetError, and
    InterruptedRunError."""
    said = unready()
    if said is None:
        return
    run.progress.phase(f"waiting at most {LOADING_S:g} s for the server to load its model: {said}")
    until_s = clock_s() + LOADING_S
    while said is not None:
        if clock_s() >= until_s:
            raise TargetError(
                f"the server still answers 503 after {LOADING_S:g} s ({said}): its model is not "
                "loaded yet, or it refuses all requests; run again when it serves"
            )
        run.interruption.pause(LOADING_POLL_S)
        run.interruption.check(" while the server was loading its model")
        said = unready()


def unready_page(client: httpx.Client, url: str, page: str) -> str | None:
    """An unreachable server is left for what asks next. Raises TargetError for a silent one."""
    try:
        answer = client.get(url + page)
    except httpx.ReadTimeout as error:
        raise TargetError(
            f"the server takes connections and does not answer: GET {url}{page} got no answer in "
            "time; restart the server"
        ) from error
    except httpx.HTTPError:
        return None
    if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
        return None
    return f"GET {page}: {refusal_message(answer.status_code, answer.content)}"


def unready_answer(asker: Asker, *, longest_s: float) -> str | None:
    """Raises TargetError if nothing comes in the whole time."""
    try:
        asker.ask("Hello", FIRST_TOKENS, longest_s=longest_s)
    except SilentServerError as error:
        raise TargetError(
            f"the server takes requests and does not answer: POST {asker.url}{asker.target.path} "
            f"got nothing within {longest_s:g} s; restart the server, or, if it is only slow, "
            "raise `run.timeout_s`"
        ) from error
    except NotServedError as error:
        if error.status == httpx.codes.SERVICE_UNAVAILABLE:
            return f"POST {asker.target.path}: {error}"
    return None
