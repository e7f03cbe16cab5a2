"""Handlers in Python and chains of them, with the calls of NVIDIA Dynamo's runtime.

    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")

    async def generate(request, context):          # in one process; the context is optional
        async for item in await leaf.generate(request, context=context):
            yield item
    await runtime.endpoint("lab.middle.generate").serve_endpoint(generate)

    client = await runtime.endpoint("lab.middle.generate").client()        # in another one
    await client.wait_for_instances()
    stream = await client.generate({"prompt": "hello"}, context=context)

With `context=`, the call gets a child of that context: same id, linked signals. Without it, the
call ends when its stream is dropped, which is one generator close later. docs/dynamo.md compares
the two runtimes, case by case.
"""

import asyncio
import os
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from random import Random

from reference_engine.context import Context
from reference_engine.dynamo.client import (
    Annotated,
    Client,
    HandlerError,
    Links,
    ResponseStream,
    WorkerLostError,
)
from reference_engine.dynamo.discovery import Instance, discovery_folder, read_path, registered
from reference_engine.dynamo.router import NoInstanceError
from reference_engine.dynamo.serving import Handler, HandlerServer, Served
from reference_engine.wire import Beats

__all__ = [
    "Annotated",
    "Client",
    "Context",
    "DistributedRuntime",
    "Endpoint",
    "HandlerError",
    "NoInstanceError",
    "ResponseStream",
    "WorkerLostError",
]


class DistributedRuntime:
    """A process's part in a graph of handlers: it serves some, calls others, or both.

    Discovery is by files in a folder (DYN_FILE_KV), calls go over TCP, and the port is on the
    loopback address unless `host` or DYN_TCP_RPC_HOST names another one.
    """

    def __init__(
        self,
        event_loop: asyncio.AbstractEventLoop,
        discovery_backend: str = "file",
        request_plane: str = "tcp",
        *,
        folder: Path | None = None,
        host: str | None = None,
        beats: Beats | None = None,
    ) -> None:
        if (discovery_backend, request_plane) != ("file", "tcp"):
            raise ValueError(
                f"discovery {discovery_backend!r} over {request_plane!r} is not supported here: "
                "use 'file' and 'tcp'"
            )
        self.loop = event_loop
        self.folder = discovery_folder(os.environ) if folder is None else folder
        self.host = host or os.environ.get("DYN_TCP_RPC_HOST") or "127.0.0.1"
        self.instance_id = secrets.randbits(63)
        self.links = Links(f"{socket.gethostname()}-{os.getpid()}-{self.instance_id:x}", beats)
        self._server = HandlerServer(self.instance_id, secrets.token_hex(16), beats)
        self._is_shut_down = asyncio.Event()
        self._has_counts = False

    def endpoint(self, path: str) -> "Endpoint":
        return Endpoint(self, read_path(path))

    def client(self, path: str) -> Client:
        return Client(path, self.folder, self.links, Random())

    def shutdown(self) -> None:
        """New calls are refused; the graceful endpoints' calls run to their ends."""
        self._is_shut_down.set()
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if not self._server.served:
            self._server.close()
            self.links.close()

    def _serve_counts(self, environment: Mapping[str, str]) -> None:
        port = environment.get("DYN_SYSTEM_PORT", "-1")
        if not self._has_counts and port.isdecimal():
            self._has_counts = True
            host = environment.get("DYN_SYSTEM_HOST") or "127.0.0.1"
            from reference_engine.dynamo.metrics import Counts  # a library that few processes need

            Counts(self._server.served).serve(host, int(port))

    async def serve(self, served: Served, *, graceful: bool) -> None:
        if served.path in self._server.served:
            raise ValueError(f"{served.path} is being served by this runtime already")
        port = await self._server.listen(self.host)
        self._serve_counts(os.environ)
        instance = Instance(
            instance_id=self.instance_id, host=self.host, port=port, secret=self._server.secret
        )
        self._server.served[served.path] = served
        try:
            with registered(self.folder, served.path, instance):
                await self._is_shut_down.wait()
            if graceful:
                await served.end()
        finally:
            del self._server.served[served.path]
            for call in list(served.calls.values()):
                call.context.kill()
            self._close_if_idle()


class Endpoint:
    def __init__(self, runtime: DistributedRuntime, path: str) -> None:
        self._runtime = runtime
        self._path = path

    async def serve_endpoint(self, handler: Handler, graceful_shutdown: bool = True) -> None:
        """Serve until the runtime is shut down, or this is cancelled.

        `handler(request)` or `handler(request, context)`: an async generator.
        """
        served = Served(self._path, handler)
        await self._runtime.serve(served, graceful=graceful_shutdown)

    async def client(self) -> Client:
        return self._runtime.client(self._path)

    def connection_id(self) -> int:
        """This process's id among the instances."""
        return self._runtime.instance_id
