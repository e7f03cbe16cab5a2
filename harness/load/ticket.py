"""What is known of a request before it is sent."""

from dataclasses import dataclass
from typing import Final

from harness.records import Delivery, Role, Way


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """What the user is up to: when and how to leave (`way`; None: stays), and what is asked for.

    `counts_from_start`: who leaves without a token does so at a time that counts from the moment
    before the connection is opened, and not from when the request has gone out.
    """

    plan: str = "never"
    planned_abandon: int | None = None
    way: Way | None = None
    counts_from_start: bool = False
    delivery: Delivery = Delivery.STREAM
    n: int = 1


STAYS: Final = Intent()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """What is known of a request before it is sent; the meanings are those of `RequestRow`."""

    request_id: str
    arm: str
    role: Role
    trial: int | None
    user: int
    max_tokens: int
    intended_start_ns: int
    intent: Intent
    repeats: str | None = None
