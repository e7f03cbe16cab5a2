"""A process's worth of runtime for each handler, and one that calls them, on one event loop."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from reference_engine.dynamo import Client, DistributedRuntime
from reference_engine.dynamo.serving import Handler, Served

PATH = "lab.leaf.generate"


class Lab:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._serving: list[asyncio.Task[None]] = []
        self.served: list[Served] = []
        self.runtimes: list[DistributedRuntime] = []
        self.caller = self._runtime()

    def _runtime(self, **settings: Any) -> DistributedRuntime:
        return DistributedRuntime(asyncio.get_running_loop(), folder=self._folder, **settings)

    async def client(self, *handlers: Handler, **settings: Any) -> Client:
        for handler in handlers:
            runtime, served = self._runtime(**settings), Served(PATH, handler)
            self.runtimes.append(runtime)
            self.served.append(served)
            self._serving.append(asyncio.create_task(runtime.serve(served, graceful=False)))
        client = await self.caller.endpoint(PATH).client()
        await client.wait_for_instances()
        await until(lambda: len(client.instance_ids()) >= len(handlers))
        return client

    async def end(self) -> None:
        for runtime in (*self.runtimes, self.caller):
            runtime.shutdown()
        await asyncio.gather(*self._serving)
        await until(lambda: not any(served.calls for served in self.served))


@asynccontextmanager
async def lab(folder: Path) -> AsyncIterator[Lab]:
    made = Lab(folder)
    try:
        async with asyncio.timeout(20):
            yield made
    finally:
        await made.end()


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 the other side of a connection sets no event
        await asyncio.sleep(0.001)
