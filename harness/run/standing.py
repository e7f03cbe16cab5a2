"""Real engines and gateways on this machine: started on loopback from their recipes, and ended.

One that is up has a file up.json in its folder, with each process and when that one began: so
`down` ends exactly what `up` started, also if `up` itself was killed, and never a process that got
a used number.
"""

import json
import os
import secrets
import shutil
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal, Self
from urllib.parse import urlsplit

import httpx
import msgspec
import psutil

from harness.errors import ConfigError, TargetError, check_extra
from harness.http_client import check_target_url
from harness.place import address_elsewhere, look_up, split_place
from harness.run.installation import is_installed, tail
from harness.run.process import Interruption
from harness.run.recipes import (
    PATHS,
    GatewayRoute,
    ModelFormat,
    Recipe,
    engines_home,
    filled,
    places,
    write_files,
)
from harness.workload.target import DialectName

CONTEXT: Final = 4096  # tokens of a request
BLOCK_TOKENS: Final = 32
BUDGET, BATCH = 128, 32  # tokens of a step, small enough for long prompts to come in chunks
READY_S: Final = 180.0
POLL_S: Final = 0.1
LOOPBACK: Final = "127.0.0.1"
PORTS: Final = range(18_100, 32_000, 3)
END_S: Final = 15.0  # from SIGINT to SIGKILL
MODEL: Final = "small"
PROXIES: Final = ("http_proxy", "https_proxy", "all_proxy")


class Process(msgspec.Struct, kw_only=True):
    pid: int
    began_s: float  # of the epoch, as the kernel says

    @classmethod
    def of(cls, pid: int) -> Self:
        return cls(pid=pid, began_s=psutil.Process(pid).create_time())

    @property
    def is_alive(self) -> bool:
        with suppress(psutil.NoSuchProcess):
            one = psutil.Process(self.pid)
            return one.create_time() == self.began_s and one.status() != psutil.STATUS_ZOMBIE
        return False

    def group(self) -> list[psutil.Process]:
        """All that it started and that still run. While the group has members, its number is given
        to no new process: a process with that number and another beginning means an empty group."""
        if psutil.pid_exists(self.pid) and not self.is_alive:
            with suppress(psutil.NoSuchProcess):
                if psutil.Process(self.pid).create_time() != self.began_s:
                    return []
        members = []
        for one in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if os.getpgid(one.pid) == self.pid and one.status() != psutil.STATUS_ZOMBIE:
                    members.append(one)
        return members


class Up(msgspec.Struct, kw_only=True):
    """The line that `walkaway targets up` prints, and keeps for `down`."""

    name: str
    state: Literal["starting", "ready"] = "starting"
    url: str = ""
    engine: str = ""
    model: str | None = None
    metrics_urls: list[str] = []
    slots: int | None = None
    direct: str | None = None
    routes: dict[DialectName, GatewayRoute] = {}  # of a gateway: how it is asked in each dialect
    http2: bool = False  # without TLS, on the same port
    target: str | None = None  # of a gateway: a target's file, for `walkaway conform --engine`
    usage: str | None = None  # of a gateway: what to name as `walkaway conform --usage`
    pids: list[int] = []
    log: str = ""
    processes: list[Process] = []


class Wish(msgspec.Struct, kw_only=True):
    """A user's choices for a start. `model`: its size, or of a gateway its name on the server."""

    slots: int = 4
    port: int | None = None
    model: str | None = None
    direct: str | None = None


def bring_up(recipe: Recipe, wish: Wish, *, interruption: Interruption) -> Up:
    """Start it and wait until it serves. It keeps running when this process ends.

    Raises ConfigError if it is up, not installed or cannot be started so, and TargetError if it
    does not serve in time. Processes of a failed start are ended.
    """
    _check(recipe, wish)
    file = recipe.up_file
    up = Up(name=recipe.name, engine=recipe.engine, direct=wish.direct, log=str(recipe.log))
    try:
        with file.open("xb") as started:  # of two at the same time one starts
            started.write(msgspec.json.encode(up))
    except FileExistsError:
        raise ConfigError(_why_not_again(recipe)) from None
    try:
        with httpx.Client(timeout=5.0, trust_env=False) as client:
            _start(recipe, wish, up, client, interruption)
    except BaseException:
        take_down(recipe)
        raise
    up.state = "ready"
    file.write_bytes(msgspec.json.encode(up))
    return up


def _check_model(recipe: Recipe, name: str) -> None:
    extra = "gguf" if recipe.model == "gguf" else "load"  # the weights are made with its numpy
    check_extra(extra, f"walkaway targets up {recipe.name}")
    from harness.run.tiny_model import SHAPES

    if name not in SHAPES:
        raise ConfigError(f"--model {name}: must be one of {', '.join(SHAPES)}")


def _check(recipe: Recipe, wish: Wish) -> None:
    if recipe.most_slots is not None and wish.slots > recipe.most_slots:
        raise ConfigError(
            f"--slots {wish.slots}: {recipe.name} runs at most {recipe.most_slots} at once"
        )
    if not recipe.is_hop:
        _check_model(recipe, wish.model or MODEL)
    if recipe.is_hop != (wish.direct is not None):
        raise ConfigError(
            f"{recipe.name} stands in front of another server: name that with --direct URL"
            if recipe.is_hop
            else f"--direct is for hops; {recipe.name} is a server itself"
        )
    if wish.direct is not None and (address := address_elsewhere(_base(wish.direct))) is not None:
        raise ConfigError(
            f"--direct {wish.direct}: {address} is not loopback, which a hop would hide from a run"
        )
    if recipe.up_file.exists():
        raise ConfigError(_why_not_again(recipe))
    if not is_installed(recipe):
        raise ConfigError(
            f"{recipe.name} is not installed in {recipe.home} with the versions of this walkaway: "
            f"walkaway targets install {recipe.name}"
        )


def _why_not_again(recipe: Recipe) -> str:
    up = msgspec.json.decode(recipe.up_file.read_bytes(), type=Up)
    remedy = f"end it first: walkaway targets down {recipe.name}"
    alive = [one.pid for one in up.processes if one.is_alive]
    if up.state == "starting":
        return f"{recipe.name} is being started, or its start was killed; {remedy}"
    if len(alive) < len(up.processes):
        return f"{recipe.name} was up at {up.url}, but a process of it has ended; {remedy}"
    return f"{recipe.name} is up already at {up.url} (processes {alive}); {remedy}"


def _base(direct: str) -> str:
    base = check_target_url(direct, flag="--direct", schemes=("http",))
    if urlsplit(base).path:
        raise ConfigError(f"--direct {direct}: must be a host and a port alone, without a path")
    return base


def names_at_start(recipe: Recipe, wish: Wish, ports: list[int], run: Path) -> dict[str, str]:
    """What the names in the recipe's texts stand for, but for its model and the server behind."""
    return places(recipe) | {
        **{name: str(port) for name, port in zip(("port", "port2", "port3"), ports, strict=True)},
        "url": f"http://{LOOPBACK}:{ports[0]}",
        "run": str(run),
        "secret": secrets.token_hex(16),
        "slots": str(wish.slots),
        "context": str(CONTEXT),
        "together": str(CONTEXT * wish.slots),
        "budget": str(max(BUDGET, 2 * wish.slots)),
        "batch": str(max(BATCH, 2 * wish.slots)),
        "blocks": str(max(CONTEXT, CONTEXT * wish.slots // 3) // BLOCK_TOKENS),
        "served": recipe.served,
    }


def _start(
    recipe: Recipe, wish: Wish, up: Up, client: httpx.Client, interruption: Interruption
) -> None:
    ports = _ports(wish.port)
    run = engines_home() / f"{recipe.name}.run"
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir()
    known = names_at_start(recipe, wish, ports, run)
    if recipe.model is not None:
        known["model"] = str(_model(recipe.model, wish.model or MODEL))
    if wish.direct is not None:
        known |= _behind(client, _base(wish.direct), wish.model)
    write_files(run, recipe.run_files, known)
    environment = _environment(recipe, known)
    recipe.log.unlink(missing_ok=True)
    for command in recipe.commands:
        words = [filled(word, known) for word in command]
        up.processes.append(_spawn(words, recipe.log, environment))
        up.pids = [one.pid for one in up.processes]
        recipe.up_file.write_bytes(msgspec.json.encode(up))
    _wait(recipe, up, client, filled(recipe.ready, known), interruption)
    known = _set_up(recipe, client, known)
    up.url, up.model = filled(recipe.url, known), known["served"]
    up.metrics_urls = [filled(url, known) for url in recipe.metrics]
    up.slots = wish.slots if recipe.takes_slots else None
    up.http2 = recipe.http2
    if recipe.is_hop:
        up.routes = _routes(recipe, known)
        up.model = next(iter(up.routes.values())).model
        up.target = str(_write_target(run / f"{recipe.name}.toml", up))
        up.usage = filled(recipe.usage, known) or None


def _write_target(file: Path, up: Up) -> Path:
    """JSON's strings are TOML's, too."""
    lines = [
        f"description = {json.dumps(f'{up.name}, a gateway')}",
        f"path = {json.dumps(next(iter(up.routes.values())).path)}",
        "stream_options = { include_usage = true }",
        "settle_s = 2.0",
    ]
    for dialect, route in up.routes.items():
        headers = ", ".join(
            f"{json.dumps(name)} = {json.dumps(text)}" for name, text in route.headers.items()
        )
        lines += [
            f"\n[routes.{dialect}]",
            f"path = {json.dumps(route.path)}",
            f"model = {json.dumps(route.model)}",
            f"headers = {{ {headers} }}",
        ]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def _environment(recipe: Recipe, known: Mapping[str, str]) -> dict[str, str]:
    """The environment without the user's proxies, which would stand between two servers on this
    machine."""
    own = {key: filled(text, known) for key, text in recipe.env.items()}
    return {key: text for key, text in os.environ.items() if key.lower() not in PROXIES} | own


def _behind(client: httpx.Client, direct: str, model: str | None) -> dict[str, str]:
    host, port = split_place(direct)
    address = next(iter(look_up(direct)), host)
    return {
        "direct": direct,
        "direct_host": address,
        "direct_port": str(port),
        "served": model or _only_model(client, direct),
    }


def _set_up(recipe: Recipe, client: httpx.Client, known: dict[str, str]) -> dict[str, str]:
    """Make the recipe's calls. Returns what is known with what they took from their answers."""
    for call in recipe.calls:
        url, body = filled(call.url, known), filled(call.body, known)
        try:
            answer = client.request(
                call.method, url, content=body, headers={"content-type": "application/json"}
            ).raise_for_status()
            for name, keys in call.takes.items():
                value: Any = answer.json()
                for key in keys.split("."):
                    value = value[key]
                known = known | {name: str(value)}
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise TargetError(
                f"{recipe.name} could not be set up: {call.method} {url}: {error}"
            ) from error
    return known


def _routes(recipe: Recipe, known: Mapping[str, str]) -> dict[DialectName, GatewayRoute]:
    """A recipe that names no dialect has routes for all of them."""
    named = recipe.routes or {dialect: GatewayRoute() for dialect in PATHS}
    return {
        dialect: GatewayRoute(
            path=filled(one.path or PATHS[dialect], known),
            model=filled(one.model, known),
            headers={
                key: filled(text, known) for key, text in (recipe.headers | one.headers).items()
            },
        )
        for dialect, one in named.items()
    }


def _ports(first: int | None) -> list[int]:
    """Three ports in a row, as many as a server may need. If `first` is None, they lie below the
    ports that clients get for their connections, and below 2^15, the largest that Dynamo takes."""
    if first is None:
        first = next((one for one in PORTS if all(map(_is_unused, range(one, one + 3)))), None)
        if first is None:
            raise TargetError(f"no port from {PORTS[0]} to {PORTS[-1]} is free")
    elif not _is_unused(first, after_others=True):
        raise ConfigError(f"--port {first}: another server listens there; name another port")
    return [first, first + 1, first + 2]


def _is_unused(port: int, *, after_others: bool = False) -> bool:
    """`after_others`: though old connections still linger there, which stops Triton."""
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, after_others)
        try:
            one.bind((LOOPBACK, port))
            one.listen()
        except OSError:
            return False
    return True


def _model(kind: ModelFormat, preset: str) -> Path:
    """Made once for each shape; under another name until it is whole."""
    from harness.run.tiny_model import SHAPES, make_model

    shape = "-".join(map(str, SHAPES[preset]))
    path = engines_home() / "models" / f"{preset}-{shape}.{kind}"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        make_model(unfinished, kind, preset)
        unfinished.rename(path)
    return path


def _only_model(client: httpx.Client, direct: str) -> str:
    try:
        models = client.get(f"{direct}/v1/models").raise_for_status().json()
        return str(models["data"][0]["id"])
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
        raise TargetError(f"--direct {direct}: it does not list its models ({error})") from error


def _spawn(command: list[str], log: Path, environment: Mapping[str, str]) -> Process:
    """Start it in a session of its own: it outlives this process, and no Ctrl-C reaches it."""
    output = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    files = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(log), output, 0o644),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    try:
        pid = os.posix_spawn(command[0], command, environment, file_actions=files, setsid=True)
    except OSError as error:
        raise TargetError(f"{command[0]}: {error.strerror}; is it installed?") from error
    return Process.of(pid)


def _wait(
    recipe: Recipe, up: Up, client: httpx.Client, url: str, interruption: Interruption
) -> None:
    until_s = time.monotonic() + READY_S
    while time.monotonic() < until_s:
        with suppress(httpx.HTTPError):
            answer = client.get(url)
            if answer.is_success and recipe.ready_text in answer.text:
                return
        if not all(one.is_alive for one in up.processes):
            raise TargetError(f"{recipe.name} ended while it started:\n{tail(recipe.log)}")
        interruption.check(f" while {recipe.name} was starting")
        interruption.pause(POLL_S)
    raise TargetError(f"{recipe.name} did not serve in {READY_S:g} s:\n{tail(recipe.log)}")


def take_down(recipe: Recipe) -> list[int]:
    """End what `bring_up` started, gently first. Returns the numbers of the processes ended."""
    if not recipe.up_file.exists():
        return []
    up = msgspec.json.decode(recipe.up_file.read_bytes(), type=Up)
    ended = [one for process in up.processes for one in process.group()]
    for number, wait_s in ((signal.SIGINT, END_S), (signal.SIGTERM, 3.0), (signal.SIGKILL, 3.0)):
        for one in _remaining(up):  # as Ctrl-C in a terminal
            with suppress(psutil.NoSuchProcess):
                one.send_signal(number)
        psutil.wait_procs(list(_remaining(up)), timeout=wait_s)
    recipe.up_file.unlink(missing_ok=True)
    shutil.rmtree(engines_home() / f"{recipe.name}.run", ignore_errors=True)
    return [one.pid for one in ended]


def _remaining(up: Up) -> Iterator[psutil.Process]:
    for process in up.processes:
        yield from process.group()


def as_json(up: Up) -> str:
    hidden = {"processes", "state"} if up.routes else {"processes", "state", "routes", "http2"}
    shown = msgspec.to_builtins(up)
    return json.dumps({key: value for key, value in shown.items() if key not in hidden})
