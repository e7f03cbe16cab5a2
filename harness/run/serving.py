"""Short requests of the harness's own: how many run at once, and whether the server serves at all.

They are no load: the first are sent before anything is measured, the others after it. All of them
are read to their natural end, because leaving them would be an abandon that nobody planned.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import httpx

from harness.load.dialect import DONE, NONSENSE, decode_chunk, request_body
from harness.store.manifest import Probing
from harness.workload.target import Target

PROBES: Final = 3
PROBE_TOKENS: Final = 4
LONGEST_PROBE_S: Final = 20.0
FIRST_STREAMS: Final = 2
MOST_STREAMS: Final = 512
FIRST_TOKENS: Final = 16
MOST_TOKENS: Final = 1024
LONGEST_COUNT_S: Final = 60.0

Span = tuple[int, int]  # from the first token's arrival to the last but one's (ns)


class NotServedError(Exception):
    """A request that was not answered as it should; the message says how."""


class NoAnswerError(NotServedError):
    """No answer came, or none to its end, as opposed to a wrong one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asker:
    """Sends one streaming request and tells when its tokens came.

    Each on a connection of its own: llama.cpp closes one after a stream without having said so, and
    a request that is on its way by then fails.
    """

    client: httpx.Client
    url: str
    target: Target
    model: str
    clock_ns: Callable[[], int]

    def ask(self, prompt: str, max_tokens: int, *, longest_s: float) -> list[int]:
        """The times of arrival of all text events (ns). Raises NotServedError."""
        body = request_body(self.target, self.model, prompt, max_tokens=max_tokens)
        until_ns = self.clock_ns() + int(longest_s * 1e9)
        try:
            with self.client.stream(
                "POST",
                self.url + self.target.path,
                json=body,
                headers={"connection": "close"},
                timeout=longest_s,
            ) as response:
                if response.status_code != httpx.codes.OK:
                    raise NotServedError(f"status {response.status_code}")
                return self._read(response, until_ns)
        except httpx.HTTPError as error:
            raise NoAnswerError(f"{type(error).__name__} within {longest_s:g} s") from error

    def _read(self, response: httpx.Response, until_ns: int) -> list[int]:
        times: list[int] = []
        for line in response.iter_lines():
            now_ns = self.clock_ns()
            if now_ns > until_ns:
                if times:
                    raise NotServedError("an answer without end (is `max_tokens` ignored?)")
                raise NoAnswerError("the answer took too long")
            data = line.removeprefix("data:").strip().encode()
            if not line.startswith("data:") or data == DONE:
                continue
            try:
                chunk = decode_chunk(data)
            except NONSENSE as error:
                raise NotServedError("an event is not in the dialect of OpenAI") from error
            if chunk.error is not None:
                raise NotServedError("an error in the stream")
            if any(choice.has_text() for choice in chunk.choices):
                times.append(now_ns)
        if not times:
            raise NotServedError("the answer was empty")
        return times


def probe_service(asker: Asker, *, longest_s: float) -> Probing:
    """Does the server serve? A few short requests, up to the first that is not answered."""
    probing = Probing(sent=0, healthy=read_health(asker.client, asker.url))
    longest_s = min(longest_s, LONGEST_PROBE_S)
    while probing.sent < PROBES and not probing.errors:
        probing.sent += 1
        sent_ns = asker.clock_ns()
        try:
            first_ns = asker.ask("is anybody there?", PROBE_TOKENS, longest_s=longest_s)[0]
        except NotServedError as error:
            probing.errors.append(str(error))
            probing.is_silent = isinstance(error, NoAnswerError)
        else:
            probing.ttft_s.append((first_ns - sent_ns) / 1e9)
    return probing


def read_health(client: httpx.Client, url: str) -> bool | None:
    """What the server says of its health; None where it has no such page."""
    try:
        status = client.get(f"{url}/health").status_code
    except httpx.HTTPError:
        return False
    if status in (httpx.codes.NOT_FOUND, httpx.codes.METHOD_NOT_ALLOWED):
        return None
    return status == httpx.codes.OK


def count_slots(asker: Asker, *, longest_s: float) -> int | None:
    """How many requests the server runs at once; None where no limit was found, or the clients
    were not served. Takes seconds: some hundred short answers. Who has not shown a limit within
    `LONGEST_COUNT_S` is asked no more."""
    until_ns = asker.clock_ns() + int(LONGEST_COUNT_S * 1e9)

    def ask(num_streams: int, tokens: int) -> list[Span]:
        left_s = (until_ns - asker.clock_ns()) / 1e9
        if left_s <= 0:
            raise NotServedError(f"no limit was found within {LONGEST_COUNT_S:g} s")
        with ThreadPoolExecutor(max_workers=num_streams) as threads:
            prompts = [f"letter {tokens}/{i} of {num_streams}:" for i in range(num_streams)]
            answers = [
                threads.submit(asker.ask, prompt, tokens, longest_s=min(longest_s, left_s))
                for prompt in prompts
            ]
            times = [answer.result() for answer in answers]
        return [(of_one[0], of_one[-2]) for of_one in times if len(of_one) > 1]

    try:
        return find_limit(ask)
    except NotServedError:
        return None


def find_limit(ask: Callable[[int, int], Sequence[Span]]) -> int | None:
    """The smallest number of parallel streams at which one more waits.

    Twice as many streams each time, until fewer run at once than were sent; that number stands when
    answers of twice the length show it again: else the streams had come one after the other and
    were merely too short to meet.
    """
    num_streams, tokens = FIRST_STREAMS, FIRST_TOKENS
    while num_streams <= MOST_STREAMS and tokens <= MOST_TOKENS:
        together = most_at_once(ask(num_streams, tokens))
        if together >= num_streams:
            num_streams *= 2
            continue
        tokens *= 2
        if most_at_once(ask(num_streams, tokens)) == together:
            return together
    return None


def most_at_once(spans: Sequence[Span]) -> int:
    """The largest number of spans that have a moment in common."""
    starts, ends = sorted(first for first, _ in spans), sorted(last for _, last in spans)
    return max((i + 1 - bisect_right(ends, first) for i, first in enumerate(starts)), default=0)
