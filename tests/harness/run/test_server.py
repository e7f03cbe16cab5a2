"""Finding the server: what is asked of it, and what is said when it is not as expected."""

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from harness.errors import ConfigError, InterruptedRunError, TargetError
from harness.http_client import check_target_url, request_headers
from harness.run.server import Server, attach, engine_command, parse_command, started_command
from harness.workload.target import Target
from harness.workload.workload import EngineSettings, load_target

Script = Callable[[str], tuple[int, dict[str, str], bytes]]
Serve = Callable[[Script], str]

NOWHERE = "http://127.0.0.1:1"


def find(url: str, target: Target, model: str | None = None) -> Server:
    with httpx.Client(trust_env=False) as client:
        return attach(url, target, model=model, client=client, engine=None)


def models(*names: str) -> Script:
    body = json.dumps({"data": [{"id": name} for name in names]}).encode()
    return lambda path: (200, {}, body) if path == "/v1/models" else (404, {}, b"")


def test_the_reference_engine_tells_its_configuration(serve: Serve) -> None:
    config = {"model": "tiny", "max_num_seqs": 8}
    url = serve(lambda path: (200, {}, json.dumps(config).encode()))
    found = find(url, load_target("reference"))
    assert found.config == config
    assert found.model == "tiny"
    assert find(url, load_target("reference"), model="other").model == "other"


def test_the_only_model_of_a_server_is_taken(serve: Serve) -> None:
    assert find(serve(models("small")), load_target("vllm")).model == "small"


@pytest.mark.parametrize("names", [(), ("a", "b")])
def test_several_models_must_be_chosen_from(serve: Serve, names: tuple[str, ...]) -> None:
    url = serve(models(*names))
    with pytest.raises(ConfigError, match=r"name one with --model"):
        find(url, load_target("vllm"))
    assert find(url, load_target("vllm"), model="b").model == "b"


def test_a_server_of_another_kind_is_told_apart_from_one_that_is_not_there(serve: Serve) -> None:
    url = serve(models("small"))
    with pytest.raises(ConfigError, match="not like --engine reference"):
        find(url, load_target("reference"))
    for engine in ("reference", "vllm"):
        with pytest.raises(TargetError, match=r"cannot reach http://127\.0\.0\.1:1/.*--target"):
            find(NOWHERE, load_target(engine))


def test_a_server_without_a_list_of_models_needs_the_flag(serve: Serve) -> None:
    url = serve(lambda path: (404, {}, b""))
    with pytest.raises(ConfigError, match="name one with --model"):
        find(url, load_target("openai"))
    assert find(url, load_target("openai"), model="m").model == "m"


def test_a_closed_port_is_a_dead_server(serve: Serve) -> None:
    url = serve(models("small"))
    Server(url=url, model="m", config=None, engine=None).check_alive()
    with pytest.raises(TargetError, match="is gone"):
        Server(url=NOWHERE, model="m", config=None, engine=None).check_alive()


@pytest.mark.parametrize(
    ("typed", "url"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000"),
        ("https://example.org/llm", "https://example.org/llm"),
    ],
)
def test_a_base_url_may_be_typed_in_several_ways(typed: str, url: str) -> None:
    assert check_target_url(typed) == url


@pytest.mark.parametrize("typed", ["localhost:8000", "ftp://x", "http://", "8000"])
def test_what_is_no_url_is_refused(typed: str) -> None:
    with pytest.raises(ConfigError, match="must be a URL such as"):
        check_target_url(typed)


def test_the_api_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WALKAWAY_TEST_KEY", "secret")
    headers = request_headers({"X-A": "1"}, "WALKAWAY_TEST_KEY")
    assert headers == {"X-A": "1", "Authorization": "Bearer secret"}
    monkeypatch.delenv("WALKAWAY_TEST_KEY")
    with pytest.raises(ConfigError, match="WALKAWAY_TEST_KEY: this environment variable"):
        request_headers({}, "WALKAWAY_TEST_KEY")
    assert request_headers({"X-A": "1"}, None) == {"X-A": "1"}


def test_the_engine_is_told_only_what_was_set() -> None:
    settings = EngineSettings(
        sim_fixed_ms=5, max_num_seqs=2, faults=["leak-blocks=1"], allow_faults=True
    )
    command = engine_command(settings, "simulated", model=None)
    text = " ".join(command)
    assert "-m reference_engine --host 127.0.0.1 --port 0 --exit-with-stdin" in text
    assert "--runner simulated --device auto" in text
    assert "--max-num-seqs 2 --sim-fixed-ms 5.0" in text
    assert "--fault leak-blocks=1 --allow-faults" in text
    assert "--num-blocks" not in command
    assert "--model" not in command


def test_the_model_flag_wins_over_the_workload() -> None:
    command = engine_command(EngineSettings(model="tiny"), "torch", model="other")
    assert command[command.index("--model") + 1] == "other"


def test_engine_settings_become_flags_and_booleans_a_pair_of_them() -> None:
    settings = EngineSettings(
        victim="rebuild-cost", watermark=0.1, enable_prefix_caching=False, reserve_full_isl=True
    )
    command = engine_command(settings, "simulated", model=None)
    assert command[command.index("--victim") + 1] == "rebuild-cost"
    assert command[command.index("--watermark") + 1] == "0.1"
    assert "--no-enable-prefix-caching" in command
    assert "--reserve-full-isl" in command
    assert not [flag for flag in command if "batch-invariant" in flag]


SERVER = """\
import http.server, sys

class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0

    def do_GET(self):
        Handler.asked += self.path == "/health"
        is_well = self.path != "/health" or Handler.asked > 2
        self.send_response(200 if is_well else 503)
        self.end_headers()

    def log_message(self, *_):
        pass

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def start(
    words: list[str], folder: Path, *, ready_s: float = 60.0, is_interrupted: bool = False
) -> None:
    """Start it, see that it answers, and end it."""
    command = parse_command(shlex.join(words))
    with (
        httpx.Client() as client,
        started_command(
            command,
            folder / "engine.log",
            client=client,
            ready_s=ready_s,
            interrupted=lambda: is_interrupted,
        ) as (child, url),
    ):
        assert client.get(f"{url}/health").is_success
    assert child.wait(0) is not None


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code, "{port}"]


def test_it_is_ready_when_it_is_well_and_ends_with_its_run(tmp_path: Path) -> None:
    start(python(SERVER), tmp_path)


def test_one_that_ends_is_told_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="ended with code 3:\n  server: no such model"):
        start(python("print('no such model'); raise SystemExit(3)"), tmp_path)


def test_one_that_never_serves_is_given_up(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"was not ready in 0\.2 s \(target\.ready_s\)"):
        start(python("import signal; signal.pause()"), tmp_path, ready_s=0.2)


def test_waiting_for_it_can_be_interrupted(tmp_path: Path) -> None:
    with pytest.raises(InterruptedRunError):
        start(python("import signal; signal.pause()"), tmp_path, is_interrupted=True)


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"target\.command: no-such-program: No such file"):
        start(["no-such-program", "{port}"], tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("serve --port 8000", "has no {port}: write it as the server's port"),
        ("serve 'the {port}", "No closing quotation"),
    ],
)
def test_a_command_that_cannot_be_used_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_command(text)
    assert said in str(refusal.value)
