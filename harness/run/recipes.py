"""Real engines on this machine: installed into folders of their own, started on loopback, ended.

recipes.toml holds what differs between them. An engine that is up has a file up.json in its folder,
with each process and when that one began: so `down` ends exactly what `up` started, also if `up`
itself was killed, and never a process that got a used number.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Final, Literal, Self

import httpx
import msgspec
import psutil

from harness.errors import ConfigError, TargetError, did_you_mean
from harness.http_client import check_target_url
from harness.place import address_elsewhere
from harness.run.process import LOG_TAIL_LINES, Interruption
from harness.run.tiny_model import SHAPES, Format, make_model

HOME_VARIABLE: Final = "WALKAWAY_ENGINES"
PYTHON: Final = f"{sys.version_info.major}.{sys.version_info.minor}"
CONTEXT: Final = 4096  # tokens of a request
BLOCK_TOKENS: Final = 32
BUDGET, BATCH = 128, 32  # tokens of a step, small enough for long prompts to come in chunks
READY_S: Final = 180.0
POLL_S: Final = 0.1
LOOPBACK: Final = "127.0.0.1"
PORTS: Final = range(18_100, 32_000, 3)
END_S: Final = 15.0  # from SIGINT to SIGKILL
UP, INSTALLED = "up.json", "installed.json"


class Recipe(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A table of recipes.toml. `like` takes another's, in whose texts `change` replaces words."""

    name: str = ""
    like: str | None = None
    change: dict[str, str] = {}
    engine: str = ""
    version: str = ""
    pip: list[list[str]] = []
    remove: list[str] = []
    newest_python: str = ""  # that its packages are built for; empty: any
    debian: str | None = None
    copies: dict[str, str] = {}
    files: dict[str, str] = {}
    run_files: dict[str, str] = {}
    model: Format | None = None
    most_slots: int | None = None
    env: dict[str, str] = {}
    commands: list[list[str]] = []
    url: str = "$url"
    served: str = "random"
    ready: str = ""
    ready_text: str = ""
    metrics: list[str] = []

    @property
    def is_hop(self) -> bool:
        return "$direct" in "".join(self.run_files.values())

    @property
    def takes_slots(self) -> bool:
        texts = [*self.run_files.values(), *(word for words in self.commands for word in words)]
        return any("$slots" in text for text in texts)

    @property
    def home(self) -> Path:
        """The folder with what is installed; a recipe like another shares that one's."""
        return engines_home() / (self.like or self.name)

    @property
    def up_file(self) -> Path:
        return engines_home() / f"{self.name}.{UP}"

    @property
    def log(self) -> Path:
        return engines_home() / f"{self.name}.log"

    @property
    def pins(self) -> bytes:
        return msgspec.json.encode([self.pip, self.remove, self.copies, self.files])


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
    pids: list[int] = []
    log: str = ""
    processes: list[Process] = []


class Wish(msgspec.Struct, kw_only=True):
    """A user's choices for a start."""

    slots: int = 4
    port: int | None = None
    model: str = "small"
    direct: str | None = None


def engines_home() -> Path:
    return Path(os.environ.get(HOME_VARIABLE) or Path.home() / ".cache" / "walkaway" / "engines")


def load_recipes() -> dict[str, Recipe]:
    text = (files("harness.run") / "recipes.toml").read_bytes()
    own = msgspec.toml.decode(text, type=dict[str, Recipe])
    return {name: _whole(name, one, own) for name, one in own.items()}


def _whole(name: str, one: Recipe, own: Mapping[str, Recipe]) -> Recipe:
    if one.like is None:
        return msgspec.structs.replace(one, name=name)
    model = own[one.like]

    def changed(text: str) -> str:
        for old, new in one.change.items():
            text = text.replace(old, new)
        return text

    return msgspec.structs.replace(
        model,
        name=name,
        like=one.like,
        run_files={path: changed(text) for path, text in model.run_files.items()},
        commands=[[changed(word) for word in command] for command in model.commands],
    )


def find_recipe(name: str) -> Recipe:
    known = load_recipes()
    if name not in known:
        near = did_you_mean(name, known)
        raise ConfigError(f"there is no recipe `{name}`{near or ';'} there are {', '.join(known)}")
    return known[name]


def install(recipe: Recipe) -> bool:
    """Into its own folder, unless it is there with these versions. Returns whether it was needed.

    Raises ConfigError if there is none for this Python, and TargetError if a step fails. The
    next one throws away all that a failed or killed one left.
    """
    home, marker = recipe.home, recipe.home / INSTALLED
    if _is_installed(recipe):
        return False
    newest = recipe.newest_python
    if newest and sys.version_info[:2] > tuple(map(int, newest.split("."))):
        raise ConfigError(
            f"{recipe.name} is built for Python {newest} at most, and this is {PYTHON}: install "
            f"walkaway with Python {newest}"
        )
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    log = engines_home() / f"{recipe.name}.install.log"
    log.unlink(missing_ok=True)
    if recipe.debian is not None:
        _unpack(recipe.debian, home, log)
    if recipe.pip:
        _step([sys.executable, "-m", "venv", str(home)], log)
        pip = [str(home / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
        for words in recipe.pip:
            _step([*pip, "install", "--quiet", *words], log)
        if recipe.remove:
            _step([*pip, "uninstall", "--quiet", "--yes", *recipe.remove], log)
    known = _places(recipe)
    for to, source in recipe.copies.items():
        _copy(Path(_filled(source, known)), Path(_filled(to, known)))
    _write_files(home, recipe.files, {})
    marker.write_bytes(recipe.pins)
    return True


def _is_installed(recipe: Recipe) -> bool:
    marker = recipe.home / INSTALLED
    return marker.exists() and marker.read_bytes() == recipe.pins


def _unpack(package: str, home: Path, log: Path) -> None:
    """A Debian package without the right to install it; nothing, if its program is there."""
    if _program(home, package) is None:
        _step(["apt-get", "download", package], log, folder=home)
        for file in home.glob("*.deb"):
            _step(["dpkg", "-x", str(file), str(home)], log)


def _program(home: Path, name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=str(home / "usr" / "sbin"))


def _step(command: list[str], log: Path, *, folder: Path | None = None) -> None:
    with log.open("a") as output:
        output.write(f"{' '.join(command)}\n")
        output.flush()
        try:
            code = subprocess.run(
                command, cwd=folder, stdout=output, stderr=output, check=False
            ).returncode
        except OSError as error:
            raise TargetError(f"{command[0]}: {error.strerror}") from error
    if code != 0:
        raise TargetError(f"`{' '.join(command)}` ended with code {code}:\n{_tail(log)}")


def _copy(source: Path, to: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, to, dirs_exist_ok=True)
    else:
        shutil.copy2(source, to)


def _places(recipe: Recipe) -> dict[str, str]:
    home = recipe.home
    return {
        "home": str(home),
        "python": str(home / "bin" / "python"),
        "version": PYTHON,
        "site": str(home / "lib" / f"python{PYTHON}" / "site-packages"),
        "libdir": str(sysconfig.get_config_var("LIBDIR")),
        "program": (recipe.debian and _program(home, recipe.debian)) or "",
    }


def _filled(text: str, known: Mapping[str, str]) -> str:
    return Template(text).substitute(known)


def _write_files(folder: Path, texts: Mapping[str, str], known: Mapping[str, str]) -> None:
    for name, text in texts.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(_filled(text, known).lstrip() if known else text.lstrip())


def bring_up(recipe: Recipe, wish: Wish, *, interruption: Interruption) -> Up:
    """Start it and wait until it serves. It goes on when this process ends.

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


def _check(recipe: Recipe, wish: Wish) -> None:
    if wish.model not in SHAPES:
        raise ConfigError(f"--model {wish.model}: must be one of {', '.join(SHAPES)}")
    if recipe.most_slots is not None and wish.slots > recipe.most_slots:
        raise ConfigError(
            f"--slots {wish.slots}: {recipe.name} runs at most {recipe.most_slots} at once"
        )
    if recipe.is_hop != (wish.direct is not None):
        raise ConfigError(
            f"{recipe.name} stands in front of another server: name that with --direct URL"
            if recipe.is_hop
            else f"--direct is for hops; {recipe.name} is a server itself"
        )
    if wish.direct is not None:
        direct = check_target_url(wish.direct, flag="--direct")
        if (address := address_elsewhere(direct)) is not None:
            raise ConfigError(
                f"--direct {wish.direct}: {address} is not loopback, which a hop would hide from a "
                "run"
            )
    if recipe.up_file.exists():
        raise ConfigError(_why_not_again(recipe))
    if not _is_installed(recipe):
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


def _start(
    recipe: Recipe, wish: Wish, up: Up, client: httpx.Client, interruption: Interruption
) -> None:
    ports = _ports(wish.port)
    run = engines_home() / f"{recipe.name}.run"
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir()
    known = _places(recipe) | {
        **{name: str(port) for name, port in zip(("port", "port2", "port3"), ports, strict=True)},
        "url": f"http://{LOOPBACK}:{ports[0]}",
        "run": str(run),
        "slots": str(wish.slots),
        "context": str(CONTEXT),
        "together": str(CONTEXT * wish.slots),
        "budget": str(max(BUDGET, 2 * wish.slots)),
        "batch": str(max(BATCH, 2 * wish.slots)),
        "blocks": str(max(CONTEXT, CONTEXT * wish.slots // 3) // BLOCK_TOKENS),
        "model": "" if recipe.model is None else str(_model(recipe.model, wish.model)),
        "direct": wish.direct or "",
        "served": recipe.served if wish.direct is None else _only_model(client, wish.direct),
    }
    _write_files(run, recipe.run_files, known)
    environment = os.environ | {key: _filled(text, known) for key, text in recipe.env.items()}
    recipe.log.unlink(missing_ok=True)
    for command in recipe.commands:
        up.processes.append(
            _spawn([_filled(word, known) for word in command], recipe.log, environment)
        )
        up.pids = [one.pid for one in up.processes]
        recipe.up_file.write_bytes(msgspec.json.encode(up))
    _wait(recipe, up, client, _filled(recipe.ready, known), interruption)
    up.url, up.model = _filled(recipe.url, known), known["served"]
    up.metrics_urls = [_filled(url, known) for url in recipe.metrics]
    up.slots = wish.slots if recipe.takes_slots else None


def _ports(first: int | None) -> list[int]:
    """Three in a row, that many may be needed. Found are those below the ones that clients get for
    their connections, and below 2^15, the largest that Dynamo takes."""
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


def _model(kind: Format, preset: str) -> Path:
    """Made once for each shape; under another name until it is whole."""
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
    """In a session of its own: it goes on without us, and no Ctrl-C reaches it."""
    output = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    files = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(log), output, 0o644),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    try:
        pid = os.posix_spawn(command[0], command, environment, file_actions=files, setsid=True)
    except OSError as error:
        raise TargetError(f"{command[0]}: {error.strerror}") from error
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
            raise TargetError(f"{recipe.name} ended while it started:\n{_tail(recipe.log)}")
        interruption.check(f" while {recipe.name} was starting")
        interruption.pause(POLL_S)
    raise TargetError(f"{recipe.name} did not serve in {READY_S:g} s:\n{_tail(recipe.log)}")


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


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    return "\n".join(f"  {line}" for line in lines)


def as_json(up: Up) -> str:
    shown = msgspec.to_builtins(up)
    return json.dumps(
        {key: value for key, value in shown.items() if key not in ("processes", "state")}
    )
