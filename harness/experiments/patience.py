"""How long experiments wait: one rule, for runs and for the conformance suite."""

from typing import Final, NamedTuple, Self

READY_S: Final = 30.0  # for what a server that serves at all does at once
QUEUED_STEPS: Final = 6  # beyond its time on the idle server, after which a request surely waits
SLOWER: Final = 1.5  # than typical: the steps of an answer that runs on for nobody
_UNKNOWN_SETTLE_S: Final = 2.0
_LIFE_IN_SETTLES: Final = 2.2  # of a stream that holds a slot
_OUTLASTS: Final = 1.2  # times the wait of a request that counts what is held
_READ_TOKENS: Final = 96  # that a stream may have got before it leaves
_FEWEST_TOKENS: Final = 64
_PROMPT_STEPS: Final = 16
FIRST_TOKENS: Final = 3  # that a stream that fills a slot outlasts, one after the other


class Patience(NamedTuple):
    """All times follow from the settle time, the step, and the context of the server.

    A server has the settle time to give a slot back when its client has left: `settle_s`, the
    target's time, or its number of steps where these take longer; 2 s where neither is known.

    - A stream that holds a slot asks for `answer_tokens`: more than twice the settle time, and
      longer than `filler_s`, as far as the context allows; plus the time to three first tokens: one
      for a stream that ends, one for a probe behind it, and one to spare. So a request that runs on
      for nobody still holds its slot when the settle time is over, and when the requests that count
      what is held have begun.
    - A probe behind full slots is waited for `probe_s` beyond its time on the idle server: the
      settle time, but at most half of such an answer. After that, the end of a forgotten answer
      would look like a slot that was given back.
    - A stream that is to fill a slot is waited for `filler_s`: the settle time, for the slot, and
      what as many requests as slots take to begin on the idle server. The requests that count
      what is still held have the same time.
    - A stream that leaves has read at most `longest_read` tokens before; the streams that fill the
      slots last for these tokens, too.
    - A stream that leaves would have run on for `outlives` times a probe's wait. One that fills a
      slot lasts for `spare_s` longer, so that it serves for more than one try: where many slots are
      filled, of a server that is known to stop.
    """

    settle_s: float
    answer_tokens: int
    probe_s: float
    filler_s: float
    outlives: float = 2.2
    spare_s: float = 0.0
    longest_read: int = 64

    @classmethod
    def of(
        cls,
        settle_s: float,
        settle_steps: int | None,
        *,
        step_s: float,
        begin_s: float,
        most_tokens: int,
        ttft_s: float = 0.0,
    ) -> Self:
        """`begin_s`: until as many requests as slots have begun on the idle server. `most_tokens`:
        of an answer. `ttft_s`: to a first token on the idle server; 0: none is waited for behind a
        stream that fills a slot."""
        settle_s = settle_time(settle_s, settle_steps, step_s) or _UNKNOWN_SETTLE_S
        filler_s = settle_s + begin_s
        life_s = max(_LIFE_IN_SETTLES * settle_s, _OUTLASTS * filler_s) + FIRST_TOKENS * ttft_s
        wanted = int(life_s / step_s) + _READ_TOKENS
        answer_tokens = max(_FEWEST_TOKENS, min(wanted, most_tokens))
        probe_s = min(settle_s, answer_tokens * step_s / 2)
        return cls(settle_s, answer_tokens, probe_s, filler_s)


def settle_time(seconds: float, steps: int | None, step_s: float | None) -> float:
    if steps is None or step_s is None:
        return seconds
    return max(seconds, steps * step_s)


def prompts_s(idle_s: float, step_s: float) -> float:
    """How long prompts that may not fit into memory are waited for: twice as long as they take if
    nothing is in their way, plus some steps of the streams that run meanwhile."""
    return 2 * idle_s + _PROMPT_STEPS * step_s
