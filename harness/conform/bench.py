"""What every case stands on: a server with its slots, its step, and the methods that time it.

The methods need no metrics, see docs/conform.md:

    P  probe behind full slots: `recovery`. Slots stay full, a probe queues, one stream leaves; its
       control is a natural end. Judged in steps.
    O  occupancy: `held`. Some leave; after the settle time as many long probes as slots start at
       once; how many wait tells how many slots are still held.
    K  capacity: `capacity`. Long contexts are opened until one has to wait.
    B  bystander: greedy streams beside a load, against a control without leaving.
    R  repeat: what the next request gets.
    W  wire: what the client saw.       C  counters: the server's own.
"""

from collections.abc import Callable, Sequence
from typing import Any

from harness.conform.case import Finding
from harness.load.session import LoadSession
from harness.records import RequestRow
from harness.workload.abandon import RequestSpec


class Bench:
    """`slots`: how many requests the server runs at once. `step_s`, `ttft_s`: of the idle server.
    `lag_s`: how late this client is (its median). `tries`: of a case that is judged by method P."""

    session: LoadSession
    slots: int
    step_s: float
    ttft_s: float
    lag_s: float
    settle_s: float
    tries: int
    is_quick: bool

    def start(self, spec: RequestSpec, text: str | None = None) -> Any:
        """A LiveStream (harness/load/live.py) that ends with the case at the latest."""
        raise NotImplementedError

    def ask(self, spec: RequestSpec, text: str | None = None) -> RequestRow:
        """Read to its end."""
        raise NotImplementedError

    def recovery(self, leaver: Any, *, bound_steps: float = 4.0) -> Finding:
        """Method P with this kind of leaver (harness/load/slot_recovery.py), judged: ok, late,
        never."""
        raise NotImplementedError

    def held(self, leave: Callable[[], int], *, settle: bool = True) -> int:
        """Method O: `leave` makes some leave and returns how many; the slots then still held."""
        raise NotImplementedError

    def capacity(self) -> int:
        """Method K, in requests of a long prompt."""
        raise NotImplementedError

    def greedy_texts(self, prompts: Sequence[str], tokens: int) -> list[str]:
        raise NotImplementedError

    def counters(self) -> dict[str, float]:
        """Method C: the target's metrics by role, read now; RefusedError without any."""
        raise NotImplementedError
