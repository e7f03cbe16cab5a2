"""What the turn after a stopped answer finds in the cache: servers side by side.

    python -m tools.side_by_side.next_turns --block-size 32 vllm=URL reference=URL ...

In each case a prompt of P tokens is answered, and the client leaves after k tokens. At once the
next turn sends the same prompt, the k tokens and ten new ones, and the server says how many of them
were cached. For comparison the same with whole answers of k tokens. All servers get the same
prompts, drawn anew in each run; the answers are their own. Prints a table, and exits with 1 if a
server differs from the reckoning by hand.

By hand: the full blocks of what was computed. The k-th token is computed in the step after the one
that brought it. A client that leaves has read it, so that this step has begun; an answer that
ends with it needs no further step.

The servers must keep blocks of the same size, and say `cached_tokens` in `usage`.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from http.client import HTTPConnection
from itertools import islice
from random import SystemRandom
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from reference_engine.model.runners import VOCAB_SIZE
from reference_engine.model.tokenizer import WordTokenizer

TIMEOUT_S = 120.0
BYTES = range(3, 259)  # the prompts' tokens: one a byte, in the models of all servers
LONG_ANSWER = 400
NEW_TOKENS = 10


class Case(NamedTuple):
    prompt: int
    answer: int
    is_whole: bool

    @property
    def name(self) -> str:
        how = "whole" if self.is_whole else "stopped"
        return f"{self.prompt} + {self.answer}, {how}"

    def by_hand(self, block_size: int) -> int:
        computed = self.prompt + self.answer - self.is_whole
        return computed // block_size * block_size


def cases(block_size: int) -> list[Case]:
    """Lengths around the edges of blocks: of the prompt, and of prompt and answer together."""
    size = block_size
    edges = [(size + size // 4, total) for total in (2 * size, 3 * size)]
    edges += [(size - 1, size), (size, 2 * size), (10 * size + 3, 11 * size)]
    stopped = [
        Case(prompt, total + off - prompt, is_whole=False)
        for prompt, total in edges
        for off in (-1, 0, 1, 2)
        if total + off > prompt
    ]
    whole = [Case(2 * size - 8, 8 + off, is_whole=True) for off in (-1, 0, 1, 2)]
    return [*stopped, *whole]


class Server:
    """`name=URL`: vLLM, or the reference engine, whose words say which tokens they are."""

    def __init__(self, text: str) -> None:
        self.name, _, url = text.partition("=")
        self._host = urlsplit(url).netloc
        tokenizer = WordTokenizer(VOCAB_SIZE)
        self._word_ids = {tokenizer.text_of(one): one for one in tokenizer.sampled_ids}
        connection = self._connect()
        connection.request("GET", "/v1/models")
        model = json.load(connection.getresponse())["data"][0]
        connection.close()
        self._fields = {"model": model["id"], "temperature": 0, "ignore_eos": True}
        if model["owned_by"] == "vllm":
            self._fields |= {"return_token_ids": True}

    def cached_tokens(self, case: Case, prompt: list[int], new: list[int]) -> int:
        answer = self._first_turn(case, prompt)
        connection = self._ask([*prompt, *answer, *new], 1, stream=False)
        body = json.load(connection.getresponse())
        connection.close()
        details = body["usage"]["prompt_tokens_details"]
        return 0 if details is None else details["cached_tokens"] or 0

    def _first_turn(self, case: Case, prompt: list[int]) -> list[int]:
        """The tokens of the answer that the client has read when it ends or is left."""
        max_tokens = case.answer if case.is_whole else LONG_ANSWER
        connection = self._ask(prompt, max_tokens, stream=True)
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"{self.name}: {response.status} {response.read()[:300]!r}")
        lines = (line[len(b"data: ") :] for line in response if line.startswith(b"data: {"))
        tokens = (token for line in lines for token in self._tokens(json.loads(line)))
        answer = list(islice(tokens, case.answer))
        if case.is_whole:
            response.read()
        response.close()
        connection.close()
        assert len(answer) == case.answer, f"{self.name}: {len(answer)} tokens in {case.name}"
        return answer

    def _tokens(self, chunk: dict[str, Any]) -> Iterator[int]:
        for choice in chunk["choices"]:
            if "token_ids" in choice:
                yield from choice["token_ids"] or ()
            else:
                words = choice["text"].split(" ")[1:]
                yield from (self._word_ids[f" {word}"] for word in words)

    def _ask(self, token_ids: list[int], max_tokens: int, *, stream: bool) -> HTTPConnection:
        body = {"prompt": token_ids, "max_tokens": max_tokens, "stream": stream, **self._fields}
        connection = self._connect()
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        return connection

    def _connect(self) -> HTTPConnection:
        return HTTPConnection(self._host, timeout=TIMEOUT_S)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.side_by_side.next_turns")
    parser.add_argument("servers", nargs="+", metavar="NAME=URL", type=Server)
    parser.add_argument("--block-size", type=int, default=32)
    arguments = parser.parse_args()
    names = [server.name for server in arguments.servers]
    _say("| prompt + answer | by hand | " + " | ".join(names) + " |")
    _say("| --- |" + " ---: |" * (len(names) + 1))
    random, num_other = SystemRandom(), 0
    for case in cases(arguments.block_size):
        prompt, new = (random.choices(BYTES, k=k) for k in (case.prompt, NEW_TOKENS))
        found = [server.cached_tokens(case, prompt, new) for server in arguments.servers]
        by_hand = case.by_hand(arguments.block_size)
        num_other += any(one != by_hand for one in found)
        _say(f"| {case.name} | {by_hand} | " + " | ".join(map(str, found)) + " |")
    _say(f"\n{num_other} cases differ")
    return 1 if num_other else 0


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
