"""The bundled engine's own account of a run's requests, read without the help of the harness."""

from typing import Any

from tests.e2e.running import Run

Events = dict[str, dict[str, Any]]


class Log:
    """Each request's events by their names, by the client's request id; `left_ns`: when each left
    that was abandoned."""

    def __init__(self, run: Run) -> None:
        self.events: dict[str, Events] = {}
        for event in run.rows("lifecycle"):
            self.events.setdefault(event["client_request_id"], {})[event["event"]] = event
        rows = run.rows("requests")
        self.left_ns: dict[str, int] = {
            row["request_id"]: row["abandoned_ns"] for row in rows if row["outcome"] == "abandoned"
        }

    def left_with(self, event: str) -> list[Events]:
        """The events of each abandoned request to which this one happened."""
        return [events for i in self.left_ns if event in (events := self.events[i])]

    def is_in_prefill_at(self, t_ns: int, client_id: str) -> bool:
        """Was it admitted by then, and had no token yet?"""
        events = self.events.get(client_id, {})
        has_come = [n in events and events[n]["t_ns"] <= t_ns for n in ("admitted", "first_token")]
        return has_come == [True, False]

    def stopped_with_a_first_token(self) -> int:
        """How many had none when they left, and one when the server saw it and stopped them."""
        return sum(
            events["finished"]["reason"] == "abort"
            and self.left_ns[client_id]
            < events["first_token"]["t_ns"]
            < events["disconnected"]["t_ns"]
            for client_id, events in self.events.items()
            if client_id in self.left_ns and {"first_token", "disconnected"} <= events.keys()
        )
