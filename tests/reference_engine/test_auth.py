"""Keys: every route is behind them, and nothing that anybody can read has one in it."""

import asyncio
from typing import Any

import httpx
import openai
import pytest

from reference_engine.config import EngineConfig, EngineConfigError, FrontendSettings, RateLimits
from reference_engine.metrics.collector import Collector
from reference_engine.protocol import Ready, ToWorker, encode_frame
from reference_engine.serve.access import OPEN_PATHS, find_key, read_api_keys
from reference_engine.serve.faults import FaultyLink
from reference_engine.serve.server import Frontend
from tests.reference_engine.running_engine import running

pytestmark = pytest.mark.anyio

KEYS = ("sk-first", "sk-second")
CONFIG = EngineConfig(runner="simulated")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Served:
    """A frontend without a process or a worker: what is sent to the worker is kept."""

    def __init__(self, **settings: Any) -> None:
        self.sent: asyncio.Queue[ToWorker] = asyncio.Queue()
        frontend_settings = FrontendSettings(**settings)
        self.link = FaultyLink(
            lambda: 0,
            self.sent.put_nowait,
            settings=frontend_settings,
            collector=Collector(CONFIG),
        )
        worker = Ready(pid=1, device="cpu", vocab_size=2048, gpu_name=None)
        self.frontend = Frontend(self.link, CONFIG, worker, frontend_settings, allow_faults=True)
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=self.frontend.app()),
            base_url="http://engine",
        )

    def methods_and_paths(self) -> list[tuple[str, str]]:
        return [
            (method, route.path_format.format(name="req-1", model="tiny"))
            for route in self.frontend.routes()
            for method in sorted(route.methods or ())
        ]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_no_route_is_open_but_health() -> None:
    served = Served(api_keys=KEYS)
    for method, path in [*served.methods_and_paths(), ("GET", "/nowhere"), ("GET", "/health/")]:
        for headers in ({}, bearer("sk-wrong"), {"authorization": "Basic c2stZmlyc3Q6"}):
            answer = await served.client.request(method, path, headers=headers)
            if path in OPEN_PATHS:
                assert answer.status_code == 200
                continue
            assert answer.status_code == 401, (method, path)
            assert answer.headers["www-authenticate"] == "Bearer"
            if method != "HEAD":
                assert answer.json()["error"]["code"] == "invalid_api_key"


async def test_with_a_key_every_route_answers() -> None:
    served = Served(api_keys=KEYS)
    for method, path in served.methods_and_paths():
        answer = await served.client.request(method, path, headers=bearer(KEYS[1]))
        assert answer.status_code != 401, (method, path)


async def test_without_keys_nobody_needs_one() -> None:
    served = Served()
    for headers in ({}, bearer("whatever")):
        assert (await served.client.get("/v1/models", headers=headers)).status_code == 200


async def test_no_answer_has_a_key_in_it() -> None:
    served = Served(api_keys=KEYS)
    for method, path in served.methods_and_paths():
        answer = await served.client.request(method, path, headers=bearer(KEYS[0]))
        assert "sk-" not in answer.text + str(answer.headers), (method, path)
    assert "sk-" not in repr(FrontendSettings(api_keys=KEYS))


async def test_a_refusal_echoes_the_clients_own_id() -> None:
    served = Served(api_keys=KEYS)
    answer = await served.client.get("/metrics", headers={"x-request-id": "mine"})
    assert answer.headers["x-request-id"] == "mine"


@pytest.mark.parametrize(
    ("header", "key"),
    [
        ("Bearer sk-first", "sk-first"),
        ("bearer sk-second", "sk-second"),
        ("Bearer  sk-first ", "sk-first"),
        ("Bearer sk-firs", None),
        ("Bearer sk-first2", None),
        ("Bearer sk-first,sk-second", None),
        ("Bearer", None),
        ("Bearer ", None),
        ("sk-first", None),
        ("Token sk-first", None),
        ("Bearer \xe9\xff", None),
        (None, None),
    ],
)
def test_a_key_is_found_whole_or_not_at_all(header: str | None, key: str | None) -> None:
    assert find_key(header, KEYS) == key


class CountedKey(str):
    """A key whose bytes can be compared in constant time, and in no other way."""

    num_compared = 0

    def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
        type(self).num_compared += 1
        return TimedBytes(super().encode(encoding, errors))


class TimedBytes(bytes):
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared in a time that tells how much of it was right")


@pytest.mark.parametrize("given", ["sk-first", "sk-second", "sk-third", "sk-wrong", "s"])
def test_every_key_is_compared_in_constant_time_also_after_the_right_one(given: str) -> None:
    CountedKey.num_compared = 0
    keys = [CountedKey(key) for key in ("sk-first", "sk-second", "sk-third")]
    found = find_key(f"Bearer {given}", keys)
    assert str(found) == (given if given in map(str, keys) else "None")
    assert CountedKey.num_compared == len(keys)


def test_keys_come_from_the_environment() -> None:
    assert read_api_keys({"KEYS": " a ,b,, "}, "KEYS") == ("a", "b")


@pytest.mark.parametrize("value", [None, "", " , ", "ge heim", "\xe9", "x" * 513])
def test_keys_that_cannot_be_used_are_refused_and_not_shown(value: str | None) -> None:
    environment = {} if value is None else {"KEYS": value}
    with pytest.raises(EngineConfigError, match="--api-key-env KEYS") as caught:
        read_api_keys(environment, "KEYS")
    if value and value.strip(" ,"):
        assert value not in str(caught.value)


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "x", **fields}


async def test_who_asks_too_often_is_told_when_to_come_back() -> None:
    limits = RateLimits(requests_per_minute=2)
    served = Served(api_keys=KEYS, rate_limits=limits)
    # What cannot be served counts too; nothing here needs a worker.
    answers = [
        await served.client.post("/v1/completions", headers=bearer(KEYS[0]), content=b"{")
        for _ in range(3)
    ]
    assert [answer.status_code for answer in answers] == [400, 400, 429]
    assert 1 <= int(answers[-1].headers["retry-after"]) <= 30
    error = answers[-1].json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    other = await served.client.post("/v1/completions", headers=bearer(KEYS[1]), content=b"{")
    assert other.status_code == 400, "another key has limits of its own"
    models = await served.client.get("/v1/models", headers=bearer(KEYS[0]))
    assert models.status_code == 200, "only generating is limited"


async def test_the_request_has_its_owner_and_the_worker_never_hears_of_it() -> None:
    served = Served(api_keys=KEYS)
    posting = asyncio.create_task(
        served.client.post("/v1/completions", headers=bearer(KEYS[0]), json=completion())
    )
    message = await served.sent.get()
    assert [request.owner for request in served.link.live.values()] == [KEYS[0]]
    assert b"sk-" not in encode_frame(message)
    served.link.lost()
    assert (await posting).status_code == 503


@pytest.mark.e2e
def test_keys_and_limits_of_a_real_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_KEYS", ",".join(KEYS))
    flags = ["--api-key-env", "ENGINE_KEYS", "--requests-per-minute", "2"]
    with running("--runner", "simulated", "--sim-fixed-ms", "1", *flags) as engine:
        assert httpx.get(f"{engine.url}/health").status_code == 200
        assert httpx.get(f"{engine.url}/metrics").status_code == 401
        shown = httpx.get(f"{engine.url}/walkaway/config", headers=bearer(KEYS[0]))
        assert shown.json()["frontend"]["num_api_keys"] == 2
        assert "sk-" not in shown.text
        with (
            openai.OpenAI(base_url=f"{engine.url}/v1", api_key="no", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError, match="Bearer KEY"),
        ):
            client.completions.create(**completion())
        with openai.OpenAI(base_url=f"{engine.url}/v1", api_key=KEYS[1], max_retries=0) as client:
            answers = [client.completions.create(**completion(max_tokens=1)) for _ in range(2)]
            assert all(answer.choices[0].text for answer in answers)
            with pytest.raises(openai.RateLimitError, match="try again in") as caught:
                client.completions.create(**completion())
            assert int(caught.value.response.headers["retry-after"]) <= 30
