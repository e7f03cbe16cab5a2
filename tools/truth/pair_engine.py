"""An engine with one defect that shows only where two features meet.

It is a small engine of its own: slots, a queue by priority, prompts computed in chunks, a cache of
prefixes, memory that preempts, several answers to a request, schemas that are compiled first, and
an adapter. Without a defect it is right. No case of `walkaway conform` brings these pairs together;
`python -m tools.truth.search_faults` asks whether `walkaway search` does.

It does no input or output and reads no clock: tools/truth/pair_server.py steps it.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final
from zlib import crc32

SLOTS: Final = 4
MEMORY: Final = 2048  # tokens, of prompts and of answers so far
CONTEXT: Final = 768
CHUNK: Final = 64  # tokens of prompts that a step computes
BLOCK: Final = 16
COMPILE_STEPS: Final = 6  # of a schema, in a slot
CANCELLED_STEPS: Final = 4
SLOW_LEAK: Final = 20
ADAPTER: Final = "letters"
WORDS: Final = ("all", "but", "can", "day", "eye", "few", "get", "how", "ink", "joy", "key", "let")

DEFECTS: Final = {
    "n-preempted": "an answer of several that is preempted does not end with its request",
    "cancel-preempted": "the cancel endpoint does not find a request that is preempted",
    "schema-again": "a schema and prompt left while they are compiled are never compiled again",
    "prefix-chunk": "an abort between two chunks of a prompt loses the memory of its cached prefix",
    "id-again": "an id cancelled before its first token ends the next request that has it",
    "stop-last": "a request with stop strings left at its last token keeps its slot",
    "priority-queued": "a queued request with a priority that leaves takes the next one with it",
    "unary-half-close": "a queued unary request whose client half-closes keeps its slot for ever",
    "tools-twin": "a request with tools that leaves cuts the one with the same prompt",
    "adapter-twin": "when a request leaves, the same prompt on another adapter gets its model",
    "unary-fan-out": "several answers in one piece left before a token lower the gauge twice",
    "reset-chat": "a chat whose connection is reset is counted as a whole answer",
    "slot-in-20": "the slot of every twentieth request that leaves is lost",
}


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """`deliver` gets each word, the answer that it is of, and whether it is the request's last;
    `cut` is called if the server ends the request early."""

    name: str
    prompt: str
    tokens: int
    deliver: Callable[[int, str, bool], None]
    cut: Callable[[], None]
    n: int = 1
    model: str = ""
    priority: int = 0
    is_stream: bool = True
    is_chat: bool = False
    has_schema: bool = False
    has_tools: bool = False
    has_stop: bool = False
    parts: list["Part"] = field(default_factory=list)
    is_over: bool = False
    is_doomed: bool = False

    @property
    def open_parts(self) -> list["Part"]:
        return [part for part in self.parts if not part.has_ended]

    @property
    def made(self) -> int:
        return sum(part.made for part in self.parts)


@dataclass(slots=True, eq=False, kw_only=True)
class Part:
    """One answer of a request. `computed`: tokens of its prompt and of its answer so far, `cached`
    of them found in the cache. `is_held`: its last word waits until no stop string can follow."""

    request: Request
    index: int
    model: str
    compiles: float = 0
    computed: int = 0
    cached: int = 0
    made: int = 0
    was_preempted: bool = False
    is_held: bool = False
    keeps_slot: bool = False
    has_ended: bool = False

    @property
    def size(self) -> int:
        return len(self.request.prompt) + self.made

    @property
    def is_in_prefill(self) -> bool:
        return self.computed < self.size


class PairEngine:
    """`ended`: requests by how they ended, as its page counts them."""

    def __init__(self, defect: str = "") -> None:
        if defect and defect not in DEFECTS:
            raise ValueError(f"unknown defect {defect!r}; there are: {', '.join(DEFECTS)}")
        self.defect = defect
        self.steps = 0
        self.waiting: list[Part] = []
        self.running: list[Part] = []
        self.lost_slots = self.lost_tokens = self.gauge_error = 0
        self.ended = Counter[str](abort=0, length=0)
        self.generated = 0
        self._cached = set[int]()
        self._stuck = set[str]()  # prompts whose compilation was left
        self._cancelled = dict[str, int]()  # ids, until which step
        self._num_left = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def held_tokens(self) -> int:
        return self.lost_tokens + sum(part.size for part in self.running)

    # Clients' acts, between two steps...

    def submit(self, request: Request) -> None:
        request.is_doomed = self._cancelled.get(request.name, 0) > self.steps
        for index in range(request.n):
            part = Part(request=request, index=index, model=request.model)
            part.compiles = COMPILE_STEPS if request.has_schema else 0
            if request.has_schema and request.prompt in self._stuck:
                part.compiles = math.inf
            request.parts.append(part)
            places = [
                p for p, one in enumerate(self.waiting) if one.request.priority > request.priority
            ]
            self.waiting.insert(places[0] if places else len(self.waiting), part)

    def leave(self, request: Request, way: str = "fin") -> None:
        """`way`: fin, rst, half-close or cancel."""
        if request.is_over:
            return
        request.is_over = True
        self._count_left(request, way)
        self._harm_others(request, way)
        for part in request.open_parts:
            if not self._overlooks(part, way):
                self._drop(part)

    def _overlooks(self, part: Part, way: str) -> bool:
        """It runs on for nobody."""
        if part not in self.waiting:
            return False
        match self.defect:
            case "n-preempted":
                return part.was_preempted and part.index > 0
            case "cancel-preempted":
                return part.was_preempted and way == "cancel"
            case "unary-half-close":
                part.keeps_slot = way == "half-close" and not part.request.is_stream
                return part.keeps_slot
            case _:
                return False

    def _drop(self, part: Part) -> None:
        part.has_ended = True
        if part in self.running:
            self.running.remove(part)
            in_chunk = part.is_in_prefill and part.computed > part.cached
            if self.defect == "prefix-chunk" and in_chunk:
                self.lost_tokens += part.cached
            if self.defect == "stop-last" and part.is_held:
                self.lost_slots += 1
            return
        if part not in self.waiting:  # another one took it along
            return
        place = self.waiting.index(part)
        takes_next = self.defect == "priority-queued" and part.request.priority > 0
        del self.waiting[place : place + 1 + takes_next]

    def _count_left(self, request: Request, way: str) -> None:
        is_lie = self.defect == "reset-chat" and way == "rst" and request.is_chat
        self.ended["length" if is_lie else "abort"] += 1
        has_slot = any(part in self.running for part in request.parts)
        self._num_left += has_slot
        if self.defect == "slot-in-20" and has_slot and self._num_left % SLOW_LEAK == 0:
            self.lost_slots += 1

    def _harm_others(self, request: Request, way: str) -> None:
        twins = [
            part
            for part in self.running
            if part.request is not request and part.request.prompt == request.prompt
        ]
        match self.defect:
            case "schema-again" if any(part.compiles for part in request.open_parts):
                self._stuck.add(request.prompt)
            case "id-again" if way == "cancel" and not request.made:
                self._cancelled[request.name] = self.steps + CANCELLED_STEPS
            case "tools-twin" if request.has_tools:
                for part in twins:
                    if part.request.has_tools:
                        self._cut(part.request)
            case "adapter-twin":
                for part in twins:
                    part.model = request.model
            case "unary-fan-out" if not request.is_stream and request.n > 1 and not request.made:
                self.gauge_error -= 1
            case _:
                return

    def _cut(self, request: Request) -> None:
        if request.is_over:
            return
        request.is_over = True
        for part in request.open_parts:
            self._drop(part)
        request.cut()

    # The engine's steps, one after the other...

    def step(self) -> None:
        self.steps += 1
        self._admit()
        self._preempt()
        room = CHUNK
        for part in list(self.running):
            if part in self.running:
                room -= self._advance(part, room)

    def _admit(self) -> None:
        while self.waiting and len(self.running) + self.lost_slots < SLOTS:
            part = self.waiting[0]
            if self.held_tokens + part.size >= MEMORY:
                return
            del self.waiting[0]
            part.computed = part.cached = self._find_cached(part)
            self.running.append(part)

    def _preempt(self) -> None:
        """The latest gives its memory up, and begins again before all others that wait."""
        while len(self.running) > 1 and self.held_tokens > MEMORY:
            part = self.running.pop()
            part.computed, part.was_preempted = 0, True
            self.waiting.insert(0, part)

    def _find_cached(self, part: Part) -> int:
        """The last token is always computed."""
        prompt = part.request.prompt
        ends = range(BLOCK, len(prompt), BLOCK)
        return max((end for end in ends if hash(prompt[:end]) in self._cached), default=0)

    def _advance(self, part: Part, room: int) -> int:
        """Returns the tokens of its prompt that were computed."""
        if part.compiles:
            part.compiles -= 1
            return 0
        computed = min(room, part.size - part.computed)
        part.computed += computed
        prompt = part.request.prompt
        first = (part.computed - computed) // BLOCK * BLOCK
        for end in range(first + BLOCK, min(part.computed, len(prompt)) + 1, BLOCK):
            self._cached.add(hash(prompt[:end]))
        if not part.is_in_prefill:
            self._make_token(part)
        return computed

    def _make_token(self, part: Part) -> None:
        request = part.request
        if request.is_doomed:
            self._cut(request)
            return
        if not part.is_held:
            part.made += 1
            part.computed += 1
            self.generated += 1
        is_end = part.made == request.tokens
        if is_end and request.has_stop and not part.is_held:
            part.is_held = True
            return
        if is_end:
            self._end(part)
        if not request.is_over:
            request.is_over = is_end and not request.open_parts
            self.ended["length"] += request.is_over
            request.deliver(part.index, word(part), request.is_over)

    def _end(self, part: Part) -> None:
        part.has_ended = True
        self.running.remove(part)
        self.lost_slots += part.keeps_slot

    def page(self) -> str:
        running = len(self.running) + self.lost_slots + self.gauge_error
        lines = [
            f"vllm:num_requests_running {running}",
            f"vllm:num_requests_waiting {len(self.waiting)}",
            f"vllm:generation_tokens_total {self.generated}",
        ]
        lines += [
            f'vllm:request_success_total{{finished_reason="{how}"}} {count}'
            for how, count in self.ended.items()
        ]
        return "\n".join(lines) + "\n"


def word(part: Part) -> str:
    """The latest of its answer, which its prompt, its place and its model determine."""
    number = crc32(f"{part.request.prompt}{part.model}".encode()) + part.made * (3 + part.made % 5)
    return " " + WORDS[number % len(WORDS)]
