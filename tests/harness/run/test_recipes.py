"""An engine is installed, started, watched until it serves, and ended; nothing else is.

The engine here is Python's own file server.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from string import Template

import httpx
import psutil
import pytest
from msgspec import structs

from harness.errors import ConfigError, TargetError
from harness.run.installation import INSTALLED, install
from harness.run.process import Interruption
from harness.run.recipes import GatewayRoute, Recipe, SetupCall, load_recipes
from harness.run.standing import (
    Process,
    Up,
    Wish,
    as_json,
    bring_up,
    names_at_start,
    take_down,
)
from harness.run.tiny_model import QUIET, make_model
from harness.workload.workload import load_target

SERVER = Recipe(
    name="files",
    engine="openai",
    copies={"$home/page": __file__},
    commands=[[sys.executable, "-m", "http.server", "--bind", "127.0.0.1", "$port"]],
    ready="$url/",
    metrics=["$url/metrics"],
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("WALKAWAY_ENGINES", str(tmp_path))
    yield tmp_path
    take_down(SERVER)


def up(recipe: Recipe = SERVER, wish: Wish | None = None) -> Up:
    return bring_up(recipe, wish or Wish(), interruption=Interruption())


def test_what_was_started_serves_and_is_ended_with_its_children() -> None:
    assert install(SERVER)
    assert not install(SERVER)
    shell = f"{sys.executable} -m http.server --bind 127.0.0.1 $port; true"
    recipe = structs.replace(SERVER, commands=[["/bin/sh", "-c", shell]])
    started = up(recipe)
    assert httpx.get(started.url).is_success
    assert started.metrics_urls == [f"{started.url}/metrics"]
    with pytest.raises(ConfigError, match=f"up already at {started.url}.*targets down files"):
        up(recipe)
    assert len(take_down(recipe)) == 2
    with pytest.raises(httpx.ConnectError):
        httpx.get(started.url)
    assert take_down(recipe) == []


def test_a_step_has_room_for_each_slot(home: Path) -> None:
    """vLLM, Dynamo and llama.cpp do not start with fewer tokens a step than slots, and with as many
    prompts would wait for ever."""
    install(SERVER)
    of_a_step = {"vllm": "$budget", "dynamo": "$budget", "llamacpp": "$batch"}
    for name, tokens in of_a_step.items():
        words = load_recipes()[name].commands[0]
        assert tokens in words
    recipe = structs.replace(SERVER, run_files={"sizes": "$slots $budget $batch"})
    for slots, sizes in ((4, "4 128 32"), (256, "256 512 512")):
        up(recipe, Wish(slots=slots))
        assert (home / "files.run" / "sizes").read_text() == sizes
        take_down(recipe)


def test_a_killed_engine_and_a_killed_start_are_cleared_up(home: Path) -> None:
    install(SERVER)
    (pid,) = up().pids
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with pytest.raises(ConfigError, match=r"a process of it has ended; end it first"):
        up()
    assert take_down(SERVER) == []
    (home / "files.up.json").write_text('{"name": "files"}')
    with pytest.raises(ConfigError, match=r"its start was killed; end it first"):
        up()


def test_another_process_with_a_used_number_is_left_alone(home: Path) -> None:
    with subprocess.Popen(["/bin/sleep", "60"], start_new_session=True) as stranger:
        known = Process.of(stranger.pid)
        used = {"pid": known.pid, "began_s": known.began_s - 5}
        state = {"name": "files", "state": "ready", "processes": [used]}
        (home / "files.up.json").write_text(json.dumps(state))
        assert take_down(SERVER) == []
        assert stranger.poll() is None
        stranger.kill()


@pytest.mark.parametrize(
    ("recipe", "wish", "said"),
    [
        (SERVER, Wish(model="huge"), "must be one of tiny, small"),
        (SERVER, Wish(direct="http://127.0.0.1:1"), "is a server itself"),
        (load_recipes()["nginx"], Wish(), "name that with --direct URL"),
        (load_recipes()["nginx"], Wish(direct="http://192.0.2.1"), "not loopback"),
        (load_recipes()["nginx"], Wish(direct="http://127.0.0.1:1/base"), "without a path"),
        (load_recipes()["llamacpp"], Wish(slots=257), "llamacpp runs at most 256 at once"),
        (load_recipes()["vllm"], Wish(), r"vllm is not installed in .*targets install vllm"),
    ],
)
def test_a_wrong_wish_is_refused(recipe: Recipe, wish: Wish, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        up(recipe, wish)


def test_an_engine_that_is_not_built_for_this_python_is_not_installed(home: Path) -> None:
    with pytest.raises(ConfigError, match=r"files is built for Python 3\.8 at most, and this is 3"):
        install(structs.replace(SERVER, newest_python="3.8"))
    assert list(home.iterdir()) == []


def test_a_start_that_fails_leaves_nothing(home: Path) -> None:
    install(SERVER)
    dies = structs.replace(SERVER, commands=[["/bin/sh", "-c", "echo no model; exit 3"]])
    with pytest.raises(TargetError, match=r"(?s)files ended while it started:.*no model"):
        up(dies)
    with pytest.raises(TargetError, match="No such file"):
        up(structs.replace(SERVER, commands=[["/no/such/program"]]))
    assert not (home / "files.up.json").exists()
    assert (home / "files" / INSTALLED).exists()


GATEWAY = """
import http.server
import json


class Gateway(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/login":
            self.answer({}, cookie=asked["password"])
        elif self.headers["cookie"] == "session=$secret":
            self.answer({"keys": {"first": asked["for"] + "-key"}})
        else:
            self.answer({}, status=401)

    def answer(self, page, status=200, cookie=""):
        self.send_response(status)
        self.send_header("set-cookie", "session=" + cookie)
        self.end_headers()
        self.wfile.write(json.dumps(page).encode())


http.server.HTTPServer(("127.0.0.1", $port), Gateway).serve_forever()
"""
BEHIND = Wish(direct="http://127.0.0.1:9/v1/", model="some/model")


def gateway(*calls: SetupCall) -> Recipe:
    return structs.replace(
        SERVER,
        run_files={"gateway.py": GATEWAY},
        commands=[[sys.executable, "$run/gateway.py"]],
        metrics=[],
        calls=list(calls),
        headers={"authorization": "Bearer $key", "x-to": "$direct_host $direct_port"},
        routes={
            "chat": GatewayRoute(model="behind/$served"),
            "messages": GatewayRoute(path="/claude", headers={"x-to": "$direct"}),
        },
    )


def test_a_gateway_is_set_up_by_calls_and_says_how_it_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://192.0.2.1")
    login = SetupCall(url="$url/login", body='{"password": "$secret"}')
    make_key = SetupCall(url="$url/keys", body='{"for": "$served"}', takes={"key": "keys.first"})
    recipe = gateway(login, make_key)
    install(recipe)
    started = up(recipe, BEHIND)
    key = {"authorization": "Bearer some/model-key"}
    assert started.routes == {
        "chat": GatewayRoute(
            path="/v1/chat/completions",
            model="behind/some/model",
            headers=key | {"x-to": "127.0.0.1 9"},
        ),
        "messages": GatewayRoute(
            path="/claude", model="some/model", headers=key | {"x-to": "http://127.0.0.1:9"}
        ),
    }
    assert json.loads(as_json(started))["routes"]["messages"]["path"] == "/claude"
    assert started.model == "behind/some/model"
    assert started.target is not None
    target = load_target(started.target)
    assert {name: route.model_dump() for name, route in target.routes.items()} == {
        name: structs.asdict(route) for name, route in started.routes.items()
    }
    assert "HTTP_PROXY" not in psutil.Process(started.pids[0]).environ()
    take_down(recipe)
    with pytest.raises(TargetError, match=r"could not be set up: POST .*/keys: .*401"):
        up(gateway(make_key), BEHIND)
    keyless = structs.replace(make_key, takes={"key": "keys.second"})
    with pytest.raises(TargetError, match=r"could not be set up: POST .*/keys: 'second'"):
        up(gateway(login, keyless), BEHIND)
    assert not recipe.up_file.exists()


PROGRAMS = {
    "apt-get": 'for word; do case $word in Dir::*=*) touch "${word#*=}/one.deb";; esac; done',
    "dpkg-deb": 'mkdir "$3/usr" && cp "$2" "$3/usr/one"',
    "npm": 'for last; do :; done; cp package.json "$last"',
}


def test_packages_of_debian_and_of_npm_are_put_into_the_folder(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, script in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    recipe = structs.replace(
        SERVER, debian=["one=1-*"], npm=["two@2"], overrides={"three": "3.0.0"}
    )
    assert install(recipe)
    assert not install(recipe)
    assert (home / "files" / "usr" / "one").exists()
    assert not (home / "files" / "debian").exists()
    assert '"three":"3.0.0"' in (home / "files" / "two@2").read_text()
    assert install(structs.replace(recipe, overrides={"three": "3.0.1"}))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(TargetError, match="this needs the program apt-get"):
        install(recipe)


@pytest.mark.parametrize("recipe", load_recipes().values(), ids=lambda recipe: recipe.name)
def test_a_recipe_uses_known_names_only_and_installs_the_version_that_it_claims(
    recipe: Recipe, tmp_path: Path
) -> None:
    known = set(names_at_start(recipe, Wish(), [1, 2, 3], tmp_path))
    known |= {"direct", "direct_host", "direct_port"} if recipe.is_hop else set()
    known |= {"model"} if recipe.model else set()
    for call in recipe.calls:
        assert known >= names_in([call.url, call.body])
        known |= set(call.takes)
    texts = [*recipe.run_files.values(), *recipe.env.values(), *recipe.headers.values()]
    texts += [word for command in recipe.commands for word in command]
    texts += [recipe.url, recipe.ready, recipe.usage, *recipe.metrics]
    for route in recipe.routes.values():
        texts += [route.path, route.model, *route.headers.values()]
    assert known >= names_in(texts)
    pins = [word for words in (*recipe.pip, recipe.npm, recipe.debian) for word in words]
    assert not recipe.is_hop or any(recipe.version in pin for pin in pins)


def names_in(texts: list[str]) -> set[str]:
    return {name for text in texts for name in Template(text).get_identifiers()}


def test_a_hop_like_another_differs_in_the_words_that_it_changes() -> None:
    recipes = load_recipes()
    plain, unbuffered = (
        recipes[name].run_files["nginx.conf"] for name in ("nginx", "nginx-unbuffered")
    )
    assert plain.replace("proxy_buffering on", "proxy_buffering off") == unbuffered != plain


def test_a_model_is_read_by_the_libraries_of_its_formats(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    tokenizers = pytest.importorskip("tokenizers")
    make_model(tmp_path / "hf", "hf", "tiny")
    header = (tmp_path / "hf" / "model.safetensors").read_bytes()
    assert len(safetensors.deserialize(header)) == 4 * 9 + 3
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "hf" / "tokenizer.json"))
    text = "two words\n\u00e9"
    numbers = tokenizer.encode(text).ids
    assert len(numbers) == len(text.encode())
    assert max(numbers) < QUIET
    assert tokenizer.decode([*numbers, QUIET]) == f"{text} w0"
    gguf = pytest.importorskip("gguf")
    make_model(tmp_path / "one.gguf", "gguf", "tiny")
    reader = gguf.GGUFReader(tmp_path / "one.gguf")
    assert len(reader.tensors) == 4 * 9 + 3
    assert not reader.tensors[-1].data[:QUIET].any()


def test_a_recipe_like_another_differs_in_its_words() -> None:
    batching, plain = (load_recipes()[name] for name in ("transformers", "transformers-plain"))
    assert "--continuous-batching" in batching.commands[0][-1]
    assert "--continuous-batching" not in plain.commands[0][-1]
    assert plain.home == batching.home
    assert not plain.takes_slots
    assert load_recipes()["triton"].takes_slots
