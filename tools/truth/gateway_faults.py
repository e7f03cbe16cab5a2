"""The switches of tools/truth/faulty_gateway.py."""

from dataclasses import dataclass
from typing import Any, Final

from tools.truth.gateway_bill import Meter

LENGTHS: Final = ("max_tokens", "max_completion_tokens", "max_output_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """A client leaves:
    `late_s`: the connection to the upstream is closed this much later, and not read meanwhile.
    `at_next_write`: the leave is noticed only when there is something to write.
    `half_closed`: a FIN is no leave; the answer is passed on until a write fails.
    `drain_s`: the answer is read for this long, then the connection is closed; below 0: no cap.
    `never`: the answer is read to its end, and billed as if the client had stayed.
    `leaked_connection`: the connection to the upstream is neither closed nor used again.
    `leaked_gauge`: the request stays in flight.
    `retries`: the upstream is asked once more.
    `early_retries`: it is, but only if no token had been sent to the client.
    `backoff_s`: the time before it is asked once more.
    `penalty`: after this number of leaves each request gets 503, for `penalty_s`.
    `dies`, `wedges`: after this number of leaves the process ends, or no request has an answer.

    The bill:
    `lost_usage`: a client that leaves before the usage pays nothing.
    `full_bill`: a client that leaves pays for all that the gateway has read, also in a drain.
    `double_usage`: the usage that the upstream sends is billed twice.

    The upstream:
    `silent_cut`: a stream that the upstream breaks has the end of a whole one.
    `failure_retries`: how often it is asked again when it fails before its answer begins.
    `renames`: the model's name upstream.
    `fewest`: tokens that the upstream is asked for, at least.
    `two_upstreams`: the URL of the other one; they take turns.

    Answers:
    `buffers`: a stream is sent as a whole, at its end.
    `answers_from_cache`: prompts that differ only in their order for the upstream have one answer.
    `needs_key`: the only key that is taken.
    `compresses`: by gzip, unless the client forbids it.
    `one_dialect`: the only one that is spoken.
    """

    late_s: float = 0.0
    at_next_write: bool = False
    half_closed: bool = False
    drain_s: float = 0.0
    never: bool = False
    leaked_connection: bool = False
    leaked_gauge: bool = False
    retries: bool = False
    early_retries: bool = False
    backoff_s: float = 0.0
    penalty: int = 0
    penalty_s: float = 1.0
    dies: int = 0
    wedges: int = 0
    lost_usage: bool = False
    full_bill: bool = False
    double_usage: bool = False
    silent_cut: bool = False
    failure_retries: int = 0
    renames: str = ""
    fewest: int = 0
    two_upstreams: str = ""
    buffers: bool = False
    answers_from_cache: bool = False
    needs_key: str = ""
    compresses: bool = False
    one_dialect: str = ""

    @property
    def reads_on(self) -> bool:
        return self.never or self.drain_s != 0

    @property
    def cap_s(self) -> float | None:
        return None if self.never or self.drain_s < 0 else self.drain_s

    def asks_again(self, delivered: int) -> bool:
        """For a client that has left. `delivered`: tokens that it got."""
        return self.retries or (self.early_retries and not delivered)

    def asks(self, asked: dict[str, Any]) -> dict[str, Any]:
        """What the upstream is asked, for what the client asks."""
        longer = {key: max(self.fewest, asked[key]) for key in LENGTHS if key in asked}
        return asked | longer | ({"model": self.renames} if self.renames else {})

    def is_zipped(self, headers: dict[str, str]) -> bool:
        return self.compresses and "gzip" in headers.get("accept-encoding", "gzip")

    def takes_key(self, headers: dict[str, str]) -> bool:
        key = headers.get("authorization", "").removeprefix("Bearer ")
        return self.needs_key in ("", key, headers.get("x-api-key"))

    def speaks(self, dialect: str) -> bool:
        return self.one_dialect in ("", dialect)

    def bill(self, meter: Meter, outcome: str, delivered: int) -> tuple[int, int]:
        """Tokens of the prompt and of the answer. `delivered`: tokens that the client got."""
        read = meter.usage or (meter.prompt, meter.tokens)
        if outcome == "refused" or (outcome == "left" and self.lost_usage):
            return 0, 0
        if outcome == "left" and not self.full_bill:
            return meter.prompt, delivered
        times = 2 if self.double_usage and meter.usage else 1
        return read[0] * times, read[1] * times
