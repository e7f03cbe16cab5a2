"""KServe v2 over gRPC: one request, from start to row, as a call of ModelStreamInfer.

The user's thread reads the answer; a second one, the watch, acts when its time has come: the user
leaves, or the answer is late. A lock orders the two. Under Locust threads are greenlets, and
`use_gevent` must come first. `leave` stamps t0 immediately before the act:

    CANCEL           the call is cancelled: a frame RST_STREAM, the connection stays open
    DEADLINE         the call has a deadline from its beginning; t0 is the moment when it passes
    CHANNEL_CLOSED   the call has a channel of its own, which is closed
    PROCESS_KILLED   a process of its own has the channel's connection, and gets a SIGKILL
    HALF_CLOSE       no further request will come on the stream, whose answers are read to the end:
                     the control, since it cancels nothing

Without such a way a call shares one channel with all others to that server, as clients of
tritonclient do. `tokens_read` is what gRPC has handed over by t0: what came and is still in its
hands does not count.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import grpc
from grpc.experimental.gevent import init_gevent
from tritonclient.grpc.service_pb2 import (
    ModelInferRequest,
    ModelInferResponse,
    ModelStreamInferResponse,
)
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from harness.client.chunk import Choice, Chunk, UsageCounts
from harness.client.connection import Deadline, RelayProcess
from harness.client.conversation import LoadClient, limits
from harness.client.states import State
from harness.client.stream import StreamMachine
from harness.client.wire_log import WireLog
from harness.errors import in_words
from harness.records import Outcome, Protocol, RequestRow, Way, WireClose
from harness.workload.abandon import LeaveRule, RequestSpec
from harness.workload.plan import LoadPlan
from harness.workload.target import KServeSource

_OPTIONS: Final = (
    ("grpc.use_local_subchannel_pool", 1),  # else two channels to one place share a connection
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_receive_message_length", -1),
)
_DEADLINE_GRAIN_S: Final = 0.001  # of gRPC: so that none passes before its moment
_FINAL: Final = "triton_final_response"
_WANTS_FINAL: Final = "triton_enable_empty_final_response"
_PARAMETER_FIELDS: Final[dict[type, str]] = {
    bool: "bool_param",
    int: "int64_param",
    float: "double_param",
    str: "string_param",
}
_SOME_TEXT: Final = " "  # the text itself is never looked at


@cache
def use_gevent() -> None:
    """Let gRPC wait in gevent's loop, before anything else of it is used in a patched process."""
    init_gevent()


class KServeEndpoint:
    """A server's place, and the channel that most calls share. `address`: of its host, if the run
    has found it. `is_connected`: a request has gone out on that channel."""

    def __init__(self, url: str, ca_file: str | None, address: str | None = None) -> None:
        parts = urlsplit(url if "://" in url else f"grpc://{url}")
        self._authority, self._name = parts.netloc, parts.hostname or ""
        self._host, self._port = address or self._name, parts.port or 0
        host = f"[{self._host}]" if ":" in self._host else self._host
        self._place = self._authority if address is None else f"{host}:{self._port}"
        self._credentials = None
        if parts.scheme in ("grpcs", "https"):
            ca = None if ca_file is None else Path(ca_file).read_bytes()
            self._credentials = grpc.ssl_channel_credentials(ca)
        self.shared = self._channel(self._place)
        self.is_connected = False

    def channel_for(
        self, way: Way | None, stack: ExitStack, connect_s: float
    ) -> tuple[grpc.Channel, "RelayProcess | None"]:
        """The channel for a user that leaves in this way; one of the user's own ends with `stack`.
        Raises OSError if no process could get a connection."""
        if way not in (Way.CHANNEL_CLOSED, Way.PROCESS_KILLED):
            return self.shared, None
        relay = None
        if way is Way.PROCESS_KILLED:
            relay = RelayProcess(self._host, self._port, connect_s)
            stack.callback(relay.kill)
        channel = self._channel(self._place if relay is None else relay.place)
        stack.callback(channel.close)
        return channel, relay

    def _channel(self, place: str) -> grpc.Channel:
        options = [*_OPTIONS, ("grpc.default_authority", self._authority)]
        if self._credentials is None:
            return grpc.insecure_channel(place, options)
        options.append(("grpc.ssl_target_name_override", self._name))
        return grpc.secure_channel(place, self._credentials, options)


class KServeClient(LoadClient):
    def __init__(self, plan: LoadPlan, *, api_key: str | None, wire: WireLog | None = None) -> None:
        super().__init__(plan)
        self.wire = wire
        assert plan.target.kserve is not None
        self.source = plan.target.kserve
        self._endpoints = [
            KServeEndpoint(url, plan.ca_file, plan.address) for url in plan.urls or [plan.url]
        ]
        self.metadata = [(name.lower(), value) for name, value in plan.headers.items()]
        if api_key is not None:
            self.metadata.append(("authorization", f"Bearer {api_key}"))

    def frontend_of(self, user: int) -> tuple[int, KServeEndpoint]:
        number = user % len(self._endpoints)
        return number, self._endpoints[number]

    def close(self) -> None:
        for endpoint in self._endpoints:
            endpoint.shared.close()

    def begin(self, spec: RequestSpec, prompt: str, leave_rule: LeaveRule) -> "KServeCall":
        way = None if spec.way is None else spec.way.over(Protocol.GRPC)
        model = self.source.model or self.plan.model
        request = infer_request(self.source, model, spec, prompt)
        return KServeCall(self, request, replace(spec, way=way), leave_rule)


def infer_request(
    source: KServeSource, model: str, spec: RequestSpec, prompt: str
) -> ModelInferRequest:
    request = ModelInferRequest(model_name=model, id=spec.request_id)
    for name, value in {**source.parameters, _WANTS_FINAL: True}.items():
        setattr(request.parameters[name], _PARAMETER_FIELDS[type(value)], value)
    for one in source.inputs:
        field, element = one.element(prompt, spec.max_tokens)
        request.inputs.add(
            name=one.name, datatype=one.datatype, shape=source.shape, contents={field: [element]}
        )
    return request


class KServeCall:
    """`_leaves_at_ns`: when the user leaves; None: not known yet, or never. `_is_out`: the request
    has left this process, so that the server can have it."""

    def __init__(
        self,
        client: KServeClient,
        request: ModelInferRequest,
        spec: RequestSpec,
        leave_rule: LeaveRule,
    ) -> None:
        self._client = client
        self._request = request
        self._spec = spec
        self._leave_rule = leave_rule
        self._tap = None if client.wire is None else client.wire.tap(spec)
        self._frontend, self._endpoint = client.frontend_of(spec.user)
        self._own = ExitStack()
        self._problem: str | None = None
        try:
            self._channel, self._relay = self._endpoint.channel_for(
                spec.way, self._own, client.connect_s
            )
        except OSError as error:
            self._problem = f"no process got a connection: {in_words(error)}"
        self._sent_ns = self._heard_ns = time.perf_counter_ns()
        self._counted_by = client.source.tokens_parameter
        self.stream = StreamMachine(
            spec, sent_ns=self._sent_ns, continuous_usage=self._counted_by is not None
        )
        self._limit, self._later_limit = limits(client.plan.run, spec.delivery, self._sent_ns)
        self._think_ns: int | None = None
        self._leaves_at_ns: int | None = None
        self._killed_ns: int | None = None
        self._complaint: str | None = None
        self._is_out = self._is_over = False
        self._lock = threading.Lock()
        self._has_changed, self._last_word = threading.Event(), threading.Event()
        self._call: Any = None

    def note_wire(self, row: RequestRow) -> None:
        row.frontend = self._frontend
        row.way = "" if self._spec.way is None else self._spec.way.value
        if self._tap is not None:
            self._tap.ended(row)
        if row.outcome is Outcome.FAILED or self._is_out:
            return
        if self._channel is not self._endpoint.shared or not self._endpoint.is_connected:
            row.wire_close = WireClose.UNOPENED

    waits_for_interrupt = False  # the watch leaves

    def leave_at_once(self, way: Way | None) -> None:
        planned = self._spec.way
        way = (way or planned or Way.FIN).over(Protocol.GRPC)
        if way is None or (way not in (Way.CANCEL, Way.HALF_CLOSE) and way is not planned):
            raise ValueError("this way to leave needs a call made for it: name it in the request")
        with self._lock:
            if self._is_over or not self.stream.can_leave:
                return
            self._spec = replace(self._spec, way=way)
            self._think_ns, self._leaves_at_ns = 0, time.perf_counter_ns()
        self._has_changed.set()

    def see_through(self) -> None:
        with self._own:
            if self._problem is not None:
                self.stream.break_off(time.perf_counter_ns(), self._problem)
                return
            self._open()
            self._own.callback(self._end)
            threading.Thread(target=self._watch, daemon=True).start()
            try:
                self._read()
            except BaseException:
                if self._reads_on:  # the cancel that follows is not its user's
                    self.stream.cut(time.perf_counter_ns())
                raise

    def _open(self) -> None:
        self._think_ns = think_ns = self._leave_rule(0)
        deadline_s = None
        if think_ns is not None and self._spec.counts_from_start:
            self._leaves_at_ns = self._sent_ns + think_ns
        if self._spec.way is Way.DEADLINE and self._leaves_at_ns is not None:
            left_s = (self._leaves_at_ns - time.perf_counter_ns()) / 1e9
            deadline_s = max(0.0, left_s) + _DEADLINE_GRAIN_S
        stub = GRPCInferenceServiceStub(self._channel)
        self._call = stub.ModelStreamInfer(
            self._requests(), timeout=deadline_s, metadata=self._client.metadata
        )

    def _end(self) -> None:
        self._is_over = True
        self._call.cancel()
        self._last_word.set()
        self._has_changed.set()

    def _requests(self) -> Iterator[ModelInferRequest]:
        yield self._request
        if self._tap is not None:
            self._tap.wrote(time.perf_counter_ns(), str(self._request).encode())
        with self._lock:  # gRPC asks for another when the first one has gone out
            self._is_out, self._heard_ns = True, time.perf_counter_ns()
            self._endpoint.is_connected |= self._channel is self._endpoint.shared
            if self._think_ns is not None and self._leaves_at_ns is None:
                self._leaves_at_ns = self._heard_ns + self._think_ns
        self._has_changed.set()
        self._last_word.wait()

    # Reading

    def _read(self) -> None:
        stream = self.stream
        try:
            for response in self._call:
                with self._lock:
                    self._take(response, time.perf_counter_ns())
                    if stream.outcome is not None and not self._reads_on:
                        return
            with self._lock:
                self._ended_well(time.perf_counter_ns())
        except grpc.RpcError as error:
            with self._lock:
                self._broke(error, time.perf_counter_ns())

    @property
    def _reads_on(self) -> bool:
        return self._spec.way is Way.HALF_CLOSE and self.stream.outcome is Outcome.ABANDONED

    def _take(self, response: ModelStreamInferResponse, t_ns: int) -> None:
        stream, self._heard_ns, self._is_out = self.stream, t_ns, True
        if self._spec.way is Way.DEADLINE and self._is_due(t_ns):
            self._leave()
        if stream.outcome is not None and not self._reads_on:
            return
        if stream.outcome is None and stream.state is State.SENT:
            stream.accept()
        answer, before = response.infer_response, stream.tokens_read
        if response.error_message:
            stream.chunk(Chunk(error=response.error_message), t_ns)
        elif answer.outputs:
            self._take_tokens(answer, t_ns)
        if self._tap is not None:
            self._tap.read(t_ns, str(response).encode(), stream.tokens_read - before)
        is_final = _FINAL in answer.parameters and answer.parameters[_FINAL].bool_param
        if is_final and stream.outcome is None and stream.state is not State.FINISHED:
            stream.finish()
            self._last_word.set()  # the server ends the stream when it gets no further request

    def _take_tokens(self, answer: ModelInferResponse, t_ns: int) -> None:
        stream, usage = self.stream, None
        if self._counted_by is not None and self._counted_by in answer.parameters:
            usage = UsageCounts(completion_tokens=answer.parameters[self._counted_by].int64_param)
        stream.chunk(Chunk(choices=[Choice(text=_SOME_TEXT)], usage=usage), t_ns)
        if stream.outcome is not None:
            return
        self._limit = self._later_limit
        if (gap_ns := stream.last_gap_ns) is not None:
            self._client.step.observe(gap_ns)
        if self._think_ns is None:
            self._think_ns = think_ns = self._leave_rule(stream.tokens_read)
            if think_ns is not None:
                self._leaves_at_ns = t_ns + think_ns
                self._has_changed.set()

    def _ended_well(self, t_ns: int) -> None:
        stream = self.stream
        if stream.outcome is None and stream.state is State.SENT:
            stream.accept()
        elif stream.outcome is None and stream.state is State.READING:
            stream.finish()
        if stream.outcome is None or self._reads_on:
            stream.body_ended(t_ns)

    def _broke(self, error: grpc.RpcError, t_ns: int) -> None:
        stream, code, why = self.stream, error.code(), error.details()
        if self._complaint is None and self._reads_on:
            stream.body_ended(t_ns)
        if stream.outcome is not None:
            return
        if self._killed_ns is not None and stream.can_leave:
            self._note_leaving(self._killed_ns, WireClose.KERNEL)
        elif self._complaint is not None:
            stream.time_out(t_ns, self._complaint)
        elif code is grpc.StatusCode.DEADLINE_EXCEEDED and self._is_due(t_ns):
            self._leave()
        elif code is grpc.StatusCode.RESOURCE_EXHAUSTED and stream.state is State.SENT:
            self._is_out = True
            stream.turn_away(t_ns, f"{code.name}: {why}")
        else:
            stream.break_off(t_ns, f"{code.name}: {why}")

    # Leaving, and waiting no longer

    def _is_due(self, t_ns: int) -> bool:
        return self._leaves_at_ns is not None and self._leaves_at_ns <= t_ns

    def _watch(self) -> None:
        while not self._is_over:
            self._has_changed.clear()
            with self._lock:
                due_ns, late = min(self._dues(), key=lambda due: due[0])
                left_ns = due_ns - time.perf_counter_ns()
                is_due = left_ns <= 0 and not self._is_over
                if is_due and late is None:
                    self._leave()
                elif is_due and late is not None:
                    self._complaint, self._is_over = late.complaint, True
                    self._call.cancel()
            if left_ns > 0:
                self._has_changed.wait(left_ns / 1e9)

    def _dues(self) -> Iterator[tuple[int, Deadline | None]]:
        """The times at which the user leaves (None) and at which it would have waited too long."""
        way, silent_s = self._spec.way, self._client.plan.run.timeout_s
        may_leave = self.stream.can_leave and self._killed_ns is None and way is not Way.DEADLINE
        if self._leaves_at_ns is not None and may_leave:
            yield self._leaves_at_ns, None
        if self._limit is not None:
            yield self._limit.at_ns, self._limit
        what = "nothing came for"
        if not self._is_out:
            silent_s, what = self._client.connect_s, "the request was not taken within"
        silence = Deadline(self._heard_ns + int(silent_s * 1e9), f"{what} {silent_s:g} s")
        yield silence.at_ns, silence

    def _leave(self) -> None:
        if not self.stream.can_leave:
            return
        t0_ns = time.perf_counter_ns()
        match self._spec.way:
            case Way.CANCEL:
                self._call.cancel()
                self._note_leaving(t0_ns, WireClose.RST_STREAM)
            case Way.DEADLINE:
                assert self._leaves_at_ns is not None
                self._note_leaving(self._leaves_at_ns, WireClose.RST_STREAM)
            case Way.CHANNEL_CLOSED:
                self._channel.close()
                self._note_leaving(t0_ns, WireClose.FIN)
            case Way.HALF_CLOSE:
                self._last_word.set()
                self._note_leaving(t0_ns, WireClose.END_STREAM)
            case Way.PROCESS_KILLED:
                assert self._relay is not None
                self._relay.strike()  # what it has passed on by now is read, and counts
                self._killed_ns = t0_ns
            case way:
                raise ValueError(f"there is no way {way} over gRPC")
        os.sched_yield()  # on a shared core the server should wake up to it first

    def _note_leaving(self, t0_ns: int, wire_close: WireClose) -> None:
        self.stream.leave(t0_ns, think_ns=self._think_ns or 0, wire_close=wire_close)
        if self._tap is not None and self._spec.way is not None:
            self._tap.left(t0_ns, self._spec.way, 0, wire_close)
