"""Requests over HTTP, whatever its version: the server's frontends, header fields and bodies."""

import httpx
import msgspec

from harness.client.conversation import LoadClient
from harness.client.dialect import dialect_of, request_body
from harness.client.stream import StreamMachine
from harness.client.transport import SocketTransport
from harness.client.wire_log import WireLog
from harness.records import Delivery, Role
from harness.workload.abandon import RequestSpec, ToolCallPlan
from harness.workload.load import AbandonLoad
from harness.workload.plan import LoadPlan
from harness.workload.session import ChatMessage
from harness.workload.target import Target

Message = tuple[bytes, list[tuple[bytes, bytes]], bytes]  # path, header fields, body


class TargetFrontend:
    """One of the server's frontends. A user keeps to one."""

    def __init__(self, url: str, number: int, plan: LoadPlan, api_key: str | None) -> None:
        self.number = number
        self._base = url.rstrip("/")
        self.url = httpx.URL(self._base + plan.target.path)
        self.transport = SocketTransport(
            self.url,
            ca_file=plan.ca_file,
            keep_alive=plan.run.keep_alive,
            address=plan.address,
        )
        self.fields = _fields(plan, self.url, api_key)

    def path(self, path: str) -> bytes:
        return httpx.URL(self._base + path).raw_path


class HttpClient(LoadClient):
    def __init__(self, plan: LoadPlan, *, api_key: str | None, wire: WireLog | None = None) -> None:
        super().__init__(plan)
        self.wire = wire
        urls = enumerate(plan.urls or [plan.url])
        load = plan.load
        leavers = load.leavers if isinstance(load, AbandonLoad) else ()
        self._has_tool = any(isinstance(one, ToolCallPlan) for one in leavers)
        self._frontends = [TargetFrontend(url, number, plan, api_key) for number, url in urls]

    def close(self) -> None:
        for frontend in self._frontends:
            frontend.transport.close()

    def frontend_of(self, user: int) -> TargetFrontend:
        return self._frontends[user % len(self._frontends)]

    def machine(self, spec: RequestSpec, sent_ns: int) -> StreamMachine:
        target = self._target_of(spec)
        return StreamMachine(
            spec,
            sent_ns=sent_ns,
            continuous_usage=target.continuous_usage,
            usage_per_choice=target.usage_per_choice,
            dialect=dialect_of(target),
            calibration=self.event_scale.now,
        )

    def message(self, spec: RequestSpec, prompt: str) -> Message:
        frontend, target = self.frontend_of(spec.user), self._target_of(spec)
        raw_path = frontend.url.raw_path if spec.path is None else frontend.path(spec.path)
        body = request_body(
            target,
            self.plan.model,
            [*spec.messages, ChatMessage("user", prompt)],
            max_tokens=spec.max_tokens,
            delivery=spec.delivery,
            n=spec.n,
            temperature=0.0 if spec.role is Role.CANARY else None,
        )
        if spec.turn is not None:
            body |= target.session_body
        if spec.response_id is not None:
            body["previous_response_id"] = spec.response_id
        if spec.priority is not None and target.priority_key is not None:
            body[target.priority_key] = spec.priority
        if self._has_tool:
            body |= dialect_of(target).put_tool("required" if spec.counts_calls else "none")
        if spec.text is not None:
            body |= spec.text.conditions(has_tasks=target.lifecycle)
        encoded = msgspec.json.encode(body if spec.body is None else {**body, **spec.body})
        is_stream, given = spec.delivery is Delivery.STREAM, spec.headers or {}
        fields = [
            *frontend.fields,
            (b"x-request-id", spec.request_id.encode()),
            (b"accept", b"text/event-stream" if is_stream else b"application/json"),
            *((name.lower().encode(), text.encode()) for name, text in given.items()),
        ]
        return raw_path, fields, encoded

    def _target_of(self, spec: RequestSpec) -> Target:
        """The target as the request sees it: another route has a dialect of its own."""
        if spec.path is None:
            return self.plan.target
        other = {"path": spec.path, "dialect": None, "limit_key": None}
        return self.plan.target.model_copy(update=other)


def _fields(plan: LoadPlan, url: httpx.URL, api_key: str | None) -> list[tuple[bytes, bytes]]:
    headers = httpx.Headers(
        {
            "host": url.netloc.decode("ascii"),
            "user-agent": "walkaway",
            "accept-encoding": "identity",
            "connection": "keep-alive" if plan.run.keep_alive else "close",
            "content-type": "application/json",
        }
    )
    if api_key is not None:
        headers["authorization"] = f"Bearer {api_key}"
    headers.update(plan.headers)
    ours = (b"accept", b"x-request-id", b"content-length")
    return [pair for pair in headers.raw if pair[0].lower() not in ours]
