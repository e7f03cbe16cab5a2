"""Handlers and their callers in one process, over loopback: what reaches whom, and what stays."""

import asyncio
import contextlib
import fcntl
import gc
import logging
from collections.abc import AsyncGenerator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from reference_engine.context import Context
from reference_engine.dynamo import (
    Annotated,
    Client,
    DistributedRuntime,
    HandlerError,
    NoInstanceError,
)
from reference_engine.dynamo.calls import WINDOW_BYTES, Call, ToCaller, encode
from reference_engine.dynamo.client import Outgoing
from reference_engine.dynamo.discovery import Instance, find, registered
from reference_engine.dynamo.metrics import Counts
from reference_engine.dynamo.serving import Running
from reference_engine.wire import Beats, Failed, FrameReader, Hello, LearnedBy, encode_frame
from tests.reference_engine.dynamo.lab import PATH, lab, until


async def numbers(request: Any, context: Context) -> AsyncGenerator[Any, None]:
    for number in range(request):
        yield number


def test_a_stop_leaves_what_is_in_the_stream_and_a_parents_kill_drops_it(tmp_path: Path) -> None:
    async def ten(request: Any, context: Context) -> AsyncGenerator[Any, None]:
        for number in range(10):
            yield number
        await context.stopped()
        yield "after the signal"

    async def main(cancel: Callable[[Context], object]) -> list[Any]:
        async with lab(tmp_path) as here:
            client, context = await here.client(ten), Context("mine", {"user": "7"})
            stream = await client.generate(None, annotated=False, context=context)
            first = await anext(stream)
            await until(lambda: len(stream.unread) == 9)
            await asyncio.to_thread(cancel, context)
            await until(lambda: not here.served[0].calls)
            assert here.served[0].cancellations == {LearnedBy.CONTROL_MESSAGE: 1}
            return [first, *[item async for item in stream]]

    assert asyncio.run(main(Context.stop)) == list(range(10))
    assert asyncio.run(main(Context.kill)) == [0]


def test_a_child_shares_id_and_metadata_and_its_end_is_not_its_parents(tmp_path: Path) -> None:
    seen: list[tuple[str, dict[str, str]]] = []

    async def once(request: Any, context: Context) -> AsyncGenerator[Any, None]:
        seen.append((context.id(), context.metadata))
        yield {"data": request}
        await context.killed()

    async def main() -> None:
        async with lab(tmp_path) as here:
            client, context = await here.client(once), Context("mine", {"user": "7"})
            stream = await client.round_robin("hello", context=context)
            assert await anext(stream) == Annotated({"data": "hello"})
            del stream
            await until(lambda: not here.served[0].calls)
            assert seen == [("mine", {"user": "7"})]
            assert not context.is_stopped()

    asyncio.run(main())


def test_a_caller_that_does_not_read_holds_back_its_handler_and_no_other(tmp_path: Path) -> None:
    ended: list[str] = []

    async def endless(request: Any, context: Context) -> AsyncGenerator[Any, None]:
        num_made = 0
        try:
            while num_made < request:
                num_made += 1
                yield "x" * (WINDOW_BYTES // 8)
        finally:
            ended.append(f"{num_made} made, {context.signal!r}")

    async def main() -> None:
        async with lab(tmp_path) as here:
            client = await here.client(endless)
            held = await client.generate(1000, annotated=False)
            read = await client.generate(30, annotated=False)
            assert len([item async for item in read]) == 30
            assert len(held.unread) == 8
            del held
            await until(lambda: len(ended) == 2)
            assert ended == ["30 made, None", "9 made, <Signal.KILL: 2>"]

    asyncio.run(main())


async def raising(request: Any) -> AsyncGenerator[Any, None]:
    if request == "mistake":
        raise RuntimeError("a mistake")
    if request == "object":
        yield object()
    if request == "cancelled":
        raise asyncio.CancelledError
    yield "good"


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ("mistake", "RuntimeError: a mistake"),
        ("object", "TypeError: .*object is unsupported"),
        ("cancelled", "CancelledError"),
    ],
)
def test_a_handlers_error_is_its_callers_alone_and_logged_once(
    request_: str, message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with lab(tmp_path) as here:
            client = await here.client(raising)
            bad = await client.generate(request_, annotated=False)
            good = await client.generate("good", annotated=False)
            with pytest.raises(HandlerError, match=message):
                await anext(bad)
            assert [item async for item in bad] == []
            assert [item async for item in good] == ["good"]

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert len(caplog.records) == 1


def test_what_cannot_be_a_handler_or_a_request_is_refused_in_words(tmp_path: Path) -> None:
    async def answer(request: Any) -> Any:
        return request

    not_a_generator: Any = answer

    def no_items(request: Any) -> Any:
        return [request]

    async def main() -> None:
        async with lab(tmp_path) as here:
            for bad_path in ("lab.leaf", "lab.leaf.generate.more", "lab/../leaf.a.b"):
                with pytest.raises(ValueError, match=r"namespace\.component"):
                    here.caller.endpoint(bad_path)
            with pytest.raises(TypeError, match="must yield"):
                await here.caller.endpoint("dyn://lab.leaf.generate").serve_endpoint(
                    not_a_generator
                )
            with pytest.raises(ValueError, match="use 'file' and 'tcp'"):
                DistributedRuntime(asyncio.get_running_loop(), "etcd", "nats")
            client = await here.client(no_items)
            with pytest.raises(TypeError, match="object is unsupported"):
                await client.generate(object())
            with pytest.raises(UnicodeEncodeError):
                await client.generate(1, context=Context("\udcff"))
            untyped: Any = {"user": 7}
            with pytest.raises(TypeError, match="metadata are text"):
                await client.generate(1, context=Context(metadata=untyped))
            with pytest.raises(ValueError, match="at most"):
                await client.generate(1, context=Context("x" * 100_000))
            with pytest.raises(HandlerError, match="no async generator"):
                await anext(await client.generate(1))

    asyncio.run(main())


def test_nothing_stays_of_a_call_however_it_ends(tmp_path: Path) -> None:
    async def one_call(client: Client, way: int, context: Context) -> None:
        stream = await client.random(3 if way else 0, annotated=False, context=context)
        if way == 1:
            assert [item async for item in stream] == [0, 1, 2]
        elif way == 2:
            context.stop()
        elif way == 3:
            reading = asyncio.ensure_future(anext(stream))
            del stream
            await asyncio.sleep(0)
            reading.cancel()

    def num_kept() -> int:
        kinds = (Outgoing, Running, Context)
        return sum(type(kept) in kinds for kept in gc.get_objects())  # torch warns of isinstance

    async def main() -> None:
        async with lab(tmp_path) as here:
            client, lasting = await here.client(numbers), Context()
            await one_call(client, 1, lasting)
            await until(lambda: not here.served[0].calls)
            gc.collect()
            gc.disable()
            before = num_kept()
            for number in range(400):
                await one_call(client, number % 4, Context() if number % 4 == 2 else lasting)
            await until(lambda: not here.served[0].calls)
            await until(lambda: num_kept() - before < 10)

    try:
        asyncio.run(main())
    finally:
        gc.enable()


def test_calls_go_where_they_are_sent_and_around_what_does_not_answer(tmp_path: Path) -> None:
    async def named(name: str, request: Any) -> AsyncGenerator[Any, None]:
        yield name

    async def main() -> None:
        async with lab(tmp_path) as here:
            client = await here.client(partial(named, "a"), partial(named, "b"))
            first, second = client.instance_ids()
            streams = [await client.round_robin(None, annotated=False) for _ in range(4)]
            answers = [await anext(stream) for stream in streams]
            assert answers[:2] == answers[2:]
            assert set(answers) == {"a", "b"}
            streams = [await client.direct(None, second, annotated=False) for _ in range(2)]
            assert len({await anext(stream) for stream in streams}) == 1
            with pytest.raises(NoInstanceError, match="no instance 5 is up"):
                await client.direct(None, 5)
            away = Instance(instance_id=9, host="127.0.0.1", port=1, secret="")
            with registered(tmp_path, PATH, away):
                await until(lambda: 9 in client.instance_ids())
                streams = [await client.generate(None, annotated=False) for _ in range(3)]
                assert {await anext(stream) for stream in streams} == {"a", "b"}
                assert set(client.instance_ids()) == {first, second}

    asyncio.run(main())


def test_a_file_without_a_living_process_is_no_instance(tmp_path: Path) -> None:
    alive, dead = (
        Instance(instance_id=number, host="127.0.0.1", port=1, secret="s") for number in (1, 2)
    )
    file = tmp_path / f"{PATH}.{2:016x}"
    file.write_bytes(msgspec.json.encode(dead))
    with registered(tmp_path, PATH, alive):
        with file.open() as opened:
            fcntl.flock(opened, fcntl.LOCK_EX)
            assert set(find(tmp_path, PATH)) == {1, 2}
        assert set(find(tmp_path, PATH)) == {1}
        [kept] = tmp_path.iterdir()
        assert kept.stat().st_mode & 0o077 == 0  # the secret is its user's
    assert not list(tmp_path.iterdir())


async def connect(runtime: DistributedRuntime, folder: Path) -> tuple[Any, Any, str]:
    instance = find(folder, PATH)[runtime.instance_id]
    reader, writer = await asyncio.open_connection(instance.host, instance.port)
    return reader, writer, instance.secret


@pytest.mark.parametrize(
    ("hello", "why"),
    [
        (Hello(peer="other", secret="guessed"), "wrong secret"),
        (Hello(version=99, peer="other", secret="{secret}"), "version 99"),
        (Hello(peer="known", secret="{secret}"), "known is connected already"),
        (Call(number=1, endpoint=PATH, request=encode(1), context_id="", metadata={}), "Hello"),
    ],
)
def test_a_peer_that_does_not_greet_is_told_why_and_harms_no_other(
    hello: Any, why: str, tmp_path: Path
) -> None:
    async def main() -> None:
        async with lab(tmp_path) as here:
            client = await here.client(numbers)
            _, known, secret = await connect(here.runtimes[0], tmp_path)
            known.write(encode_frame(Hello(peer="known", secret=secret)))
            reader, writer, _ = await connect(here.runtimes[0], tmp_path)
            if isinstance(hello, Hello) and hello.secret == "{secret}":
                writer.write(encode_frame(msgspec.structs.replace(hello, secret=secret)))
            else:
                writer.write(encode_frame(hello))
            [payload] = FrameReader().feed(await reader.read())  # to its end
            failed = msgspec.msgpack.decode(payload, type=ToCaller)
            assert isinstance(failed, Failed)
            assert why in failed.message
            stream = await client.generate(2, annotated=False)
            assert [item async for item in stream] == [0, 1]
            for raw in (known, writer):
                raw.close()

    asyncio.run(main())


def test_a_stranger_cannot_fill_the_memory(tmp_path: Path) -> None:
    async def main() -> None:
        async with lab(tmp_path) as here:
            await here.client(numbers)
            reader, writer, secret = await connect(here.runtimes[0], tmp_path)
            writer.write(encode_frame(Hello(peer="x" * 2000, secret=secret)))
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()

    asyncio.run(main())


def test_a_worker_learns_of_a_silent_caller_by_its_heartbeat_and_of_one_that_is_gone_at_once(
    tmp_path: Path,
) -> None:
    async def patient(request: Any, context: Context) -> AsyncGenerator[Any, None]:
        yield "started"
        await context.killed()

    async def main(*, is_silent: bool) -> None:
        async with lab(tmp_path) as here:
            await here.client(patient, beats=Beats(interval_s=0.01, timeout_s=0.1))
            _, writer, secret = await connect(here.runtimes[0], tmp_path)
            writer.write(encode_frame(Hello(peer="raw", secret=secret)))
            call = Call(number=1, endpoint=PATH, request=encode(1), context_id="a", metadata={})
            writer.write(encode_frame(call))
            served = here.served[0]
            await until(lambda: served.calls)
            if not is_silent:
                writer.close()
            await until(lambda: not served.calls)
            learned_by = LearnedBy.HEARTBEAT_TIMEOUT if is_silent else LearnedBy.CONNECTION_DROPPED
            metrics = list(Counts({PATH: served}).collect())
            samples = [sample for metric in metrics for sample in metric.samples]
            seen = {s.labels.get("learned_by", s.name): s.value for s in samples if s.value}
            assert seen == {"dynamo_component_cancellation_total": 1, learned_by: 1}
            assert samples[0].labels["dynamo_component"] == "leaf"
            writer.close()

    asyncio.run(main(is_silent=True))
    asyncio.run(main(is_silent=False))


def test_a_runtime_that_shuts_down_gracefully_ends_its_calls_and_refuses_others(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with lab(tmp_path) as here:
            go_on = asyncio.Event()

            async def slow(request: Any) -> AsyncGenerator[Any, None]:
                yield "first"
                await go_on.wait()
                yield "last"

            runtime = DistributedRuntime(asyncio.get_running_loop(), folder=tmp_path)
            serving = asyncio.create_task(runtime.endpoint(PATH).serve_endpoint(slow))
            other = asyncio.create_task(runtime.endpoint("lab.leaf.other").serve_endpoint(slow))
            client = await here.client()
            await until(lambda: find(tmp_path, "lab.leaf.other"))
            [here_is] = find(tmp_path, PATH).values()
            assert list(find(tmp_path, "lab.leaf.other").values()) == [here_is]  # one port
            stream = await client.generate(None, annotated=False)
            assert await anext(stream) == "first"
            runtime.shutdown()
            await other
            with pytest.raises(HandlerError, match="no longer serves"):
                await anext(await client.generate(None))
            await until(lambda: not client.instance_ids())
            with pytest.raises(NoInstanceError, match="no instance is up"):
                await client.generate(None)
            go_on.set()
            assert [item async for item in stream] == ["last"]
            await serving

    asyncio.run(main())
