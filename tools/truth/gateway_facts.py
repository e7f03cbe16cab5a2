"""What one sees of tools/truth/faulty_gateway.py, in its pages and in the upstream's log."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from harness.upstream.orders import Order
from tests.e2e.running import faulty_gateway, wait_until
from tests.harness.upstream.behind import Caller, Running, body_of, upstream
from tools.truth.gateway_wire import MOST_IDLE

TOKENS = 100  # of an answer that is left
STEP_MS = 8.0
FAULT_S = 0.3  # of a fault that takes its time; the answer and the prefill are longer
AT_ONCE_NS = 150_000_000
UNNOTICED = 2  # tokens that can be written to a client that has closed its socket
STAYED = 4  # requests of `answered`
LEAVES = ("fin", "rst", "half-close", "silent", "unary")
Facts = dict[str, Any]


class Before(Running):
    """The gateway before an upstream, whose log it has."""

    def rows(self, count: int = 0) -> list[dict[str, Any]]:
        """The rows of the gateway's page of usage, once there are `count`."""
        found: list[dict[str, Any]] = []

        def are_there() -> bool:
            found[:] = json.loads(self.get("/usage")[1])
            return len(found) >= count

        wait_until(are_there, f"{count} rows of usage")
        return found

    def gauge(self) -> int:
        lines = dict(
            line.split() for line in self.get("/metrics")[1].decode().splitlines() if line[0] != "#"
        )
        return int(lines["gateway_requests_in_flight"])


@contextmanager
def between(faults: dict[str, Any], **settings: Any) -> Iterator[tuple[Before, Running]]:
    with upstream(**settings) as server, faulty_gateway(server.url, **faults) as one:
        yield Before(httpx.URL(one.url).port or 0, server.log), server


def leave(gateway: Before, name: str) -> tuple[Caller, int]:
    """`name`: how the client leaves, or in which phase. Returns the time before it, too."""
    order = Order(id=name, prefill_ms=400 if name == "silent" else 0)
    caller = Caller(gateway.port, order, tokens=TOKENS, stream=name != "unary", user=name)
    if name == "silent":
        caller.until(b"\r\n\r\n")
    elif name != "unary":
        caller.until(b" w3")
    gateway.log.wait("slot" if name == "silent" else "first_token", name)
    return caller, caller.leave(name if name in ("rst", "half-close") else "fin")


def left(name: str, caller: Caller, t0_ns: int, seen: Facts, row: Facts) -> Facts:
    """When the gateway closed its connection to the upstream, and what it billed."""
    if seen["why"] != "left":
        closes = "to the end"
    else:
        closes = "at once" if seen["closed_ns"] - t0_ns < AT_ONCE_NS else "late"
    made, billed = seen["tokens"], row["completion_tokens"]
    delivered = caller.read.count(b'"text":" w')
    is_all = billed == made == TOKENS
    sent = sum(t_ns < t0_ns + AT_ONCE_NS for t_ns in seen["token_times_ns"])
    most = min(made, sent + UNNOTICED)
    is_right = delivered <= billed <= most
    return {name: closes, f"{name} bill": "all" if is_all else "right" if is_right else billed}


def answered(gateway: Before, server: Running) -> Facts:
    """How a gateway answers clients that stay."""
    facts: Facts = {}
    for name, is_stream in (("stream", True), ("whole", False)):
        asked = Order(id=name, tokens=5)
        answer = post(gateway, asked, stream=is_stream, stream_options={"include_usage": True})
        (seen,) = server.truth(name)
        assert answer.text.count('"text":" w') == (5 if is_stream else 1)
        facts |= {f"{name} bill": gateway.rows()[-1]["completion_tokens"], "model": seen["model"]}
    cut = post(gateway, Order(id="cut", act="break-reset", after=3))
    ends = [word for word in ("error", "[DONE]") if word in cut.text]
    facts["cut"] = [*ends, "is_cut"] if "is_cut" in cut.extensions else ends
    facts["500"] = post(gateway, Order(id="500", act="500", times=1)).status_code
    facts["500 asked"] = len(server.truth("500"))
    return facts


def post(gateway: Before, order: Order, *, stream: bool = True, **more: Any) -> httpx.Response:
    """Its answer, as far as it came."""
    body = body_of("completions", order, tokens=TOKENS, stream=stream, **more)
    url = f"{gateway.url}/v1/completions"
    parts: list[bytes] = []
    with httpx.stream("POST", url, content=body, trust_env=False, timeout=30) as answer:
        try:
            parts += answer.iter_raw()
        except httpx.RemoteProtocolError:
            answer.extensions["is_cut"] = True
    found = httpx.Response(answer.status_code, content=b"".join(parts))
    found.extensions |= answer.extensions
    return found


def observed(faults: Facts) -> Facts:
    with between(faults, slots=16, step_ms=STEP_MS) as (gateway, server):
        facts = answered(gateway, server)
        begun = {name: leave(gateway, name) for name in LEAVES}
        seen = {name: server.over(name) for name in LEAVES}
        rows = {row["user"]: row for row in gateway.rows(STAYED + len(LEAVES))}
        for name, (caller, t0_ns) in begun.items():
            caller.close()
            facts |= left(name, caller, t0_ns, seen[name], rows[name])
        facts["rst asked"] = len(server.truth("rst"))
        facts["after leaves"] = post(gateway, Order(id="after", tokens=1)).status_code
        wait_until(lambda: truth(server)["running"] == 0, "nothing runs upstream")
        facts["connections"] = truth(server)["connections"]["open"] - 1 <= MOST_IDLE
        facts["gauge"] = gateway.gauge()
    return facts


def truth(server: Running) -> Facts:
    page: Facts = json.loads(server.get("/walkaway/truth")[1])
    return page
