"""API keys and rate limits: every route but /health needs a key, and no answer shows one."""

import asyncio

import pytest

from reference_engine.config import EngineConfigError, FrontendSettings, RateLimits
from reference_engine.faults import Faults
from reference_engine.protocol import SetFaults
from reference_engine.serve.access import (
    MAX_OWNERS,
    OPEN_PATHS,
    RateLimiter,
    find_key,
    read_api_keys,
)
from reference_engine.wire import encode_frame
from tests.reference_engine.fake_worker import Served, bearer

pytestmark = pytest.mark.anyio

KEYS = ("sk-first", "sk-second")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_no_route_is_open_but_health() -> None:
    served = Served(api_keys=KEYS)
    for method, path in [*served.methods_and_paths(), ("GET", "/nowhere"), ("GET", "/health/")]:
        for headers in ({}, bearer("sk-wrong"), {"authorization": "Basic c2stZmlyc3Q6"}):
            headers |= {"x-request-id": "mine"}
            answer = await served.client.request(method, path, headers=headers)
            if path in OPEN_PATHS:
                assert answer.status_code == 200
                continue
            assert answer.status_code == 401, (method, path)
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.headers["x-request-id"] == "mine"
            if method != "HEAD":
                assert answer.json()["error"]["code"] == "invalid_api_key"


async def test_with_a_key_every_route_answers_and_no_answer_has_the_key_in_it() -> None:
    served = Served(api_keys=KEYS)
    for method, path in served.methods_and_paths():
        answer = await served.client.request(method, path, headers=bearer(KEYS[1]))
        assert answer.status_code != 401, (method, path)
        assert "sk-" not in answer.text + str(answer.headers), (method, path)
    assert "sk-" not in repr(FrontendSettings(api_keys=KEYS))


async def test_a_path_or_a_method_that_is_not_there_is_named() -> None:
    nowhere = await Served().client.get("/nowhere")
    wrong = await Served().client.delete("/v1/models")
    assert (nowhere.status_code, wrong.status_code) == (404, 405)
    assert "no such path" in nowhere.text
    assert "DELETE; /openapi.json lists the methods" in wrong.text


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
    """A key whose bytes can only be compared in constant time."""

    num_compared = 0

    def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
        type(self).num_compared += 1
        return TimedBytes(super().encode(encoding, errors))


class TimedBytes(bytes):
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared in a time that tells how much of it was right")


@pytest.mark.parametrize("given", ["sk-first", "sk-second", "sk-wrong", "s"])
def test_every_key_is_compared_in_constant_time_also_after_the_right_one(given: str) -> None:
    CountedKey.num_compared = 0
    keys = [CountedKey(key) for key in KEYS]
    found = find_key(f"Bearer {given}", keys)
    assert str(found) == (given if given in KEYS else "None")
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


async def test_a_key_over_its_limit_is_refused_with_the_time_to_wait() -> None:
    limits = RateLimits(requests_per_minute=2)
    served = Served(api_keys=KEYS, rate_limits=limits)
    # A request that cannot be served counts too; nothing here needs a worker.
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


async def test_the_request_has_its_owner_and_the_worker_never_sees_the_key() -> None:
    served = Served(api_keys=KEYS)
    posting = asyncio.create_task(
        served.client.post(
            "/v1/completions", headers=bearer(KEYS[0]), json={"model": "tiny", "prompt": "x"}
        )
    )
    await served.worker.arrived.wait()
    (message,) = served.worker.received
    assert [request.owner for request in served.link.live.values()] == [KEYS[0]]
    assert b"sk-" not in encode_frame(message)
    served.link.give_up()
    assert (await posting).status_code == 503


SECOND_NS = 10**9


def limiter(**limits: int | bool) -> RateLimiter:
    return RateLimiter(RateLimits(**limits))  # type: ignore[arg-type]


def test_a_minutes_requests_may_come_at_once_and_then_one_at_a_time() -> None:
    six = limiter(requests_per_minute=6)
    assert [six.admit("k", 0) for _ in range(6)] == [None] * 6
    assert six.admit("k", 0) == pytest.approx(10.0)
    assert six.admit("k", 4 * SECOND_NS) == pytest.approx(6.0), "a refused one is not counted"
    assert six.admit("k", 10 * SECOND_NS) is None
    assert six.admit("k", 10 * SECOND_NS) == pytest.approx(10.0)
    assert [six.admit(owner, 0) for owner in ("a", None)] == [None, None], "each has its own"


@pytest.mark.parametrize("kills", [False, True])
def test_tokens_are_taken_when_they_are_there_and_block_the_next_request(kills: bool) -> None:
    tokens = limiter(tokens_per_minute=60, kills=kills)
    assert tokens.admit("k", 0) is None
    assert not tokens.spend("k", 60, 0)
    assert tokens.spend("k", 30, 0) is kills
    assert tokens.admit("k", 0) == pytest.approx(31.0), "30 in debt, and one is needed"
    assert tokens.admit("k", 31 * SECOND_NS) is None
    assert not tokens.spend("k", 1, 32 * SECOND_NS)


def test_the_memory_of_owners_is_bounded_and_the_least_recent_go() -> None:
    one = limiter(requests_per_minute=1)
    for number in range(MAX_OWNERS):
        one.admit(str(number), 0)
    one.admit("0", 0)
    one.admit("another", 0)
    assert len(one) == MAX_OWNERS
    assert one.admit("0", 0) is not None, "heard of lately, so it is remembered"
    assert one.admit("1", 0) is None, "forgotten"


async def test_faults_are_set_in_the_frontend_and_in_the_worker_or_refused() -> None:
    served = Served()
    wrong = await served.client.put("/walkaway/faults", json={"lose-abort": 7})
    assert (wrong.status_code, served.worker.received) == (400, [])
    right = await served.client.put("/walkaway/faults", json={"delay-abort": 0.25})
    assert right.json()["delay-abort"] == 0.25
    assert served.link.faults == Faults(delay_abort=0.25)
    assert served.worker.received == [SetFaults(faults=Faults(delay_abort=0.25))]
