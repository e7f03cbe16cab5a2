"""The server under test: found at a URL, or started for this run."""

import json
import shlex
import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, TypeVar

import httpx

from harness.client.server_error import error_in, error_message
from harness.errors import ConfigError, TargetError
from harness.http_client import why_unreached
from harness.place import Place, split_place
from harness.records import Protocol, num_slots
from harness.run.process import Child, Interruption, find_ready_line, free_port, python_module
from harness.workload.target import Target
from harness.workload.workload import EngineSettings

T = TypeVar("T")

# Importing torch takes seconds, and many more from a cold disk.
ENGINE_READY_S: Final = 300.0  # it may compile its decode step first
BAD_CONFIGURATION: Final = 2
KNOCK_S: Final = 1.0
PORT: Final = "{port}"
POLL_S: Final = 0.1
_OF_TIERS: Final = ("frontends", "workers", "disaggregated", "migrate")
_MOST_LISTED: Final = 12  # models in a message; a router lists hundreds
_NAMED_BY: Final = "from --target or an arm's `target`"

INSTALL_TORCH: Final = (
    "install it with: pip install 'walkaway[engine]' (without CUDA packages: add "
    "--extra-index-url https://download.pytorch.org/whl/cpu), or use --set engine.runner=simulated"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server that answers. `config` is None unless it speaks the reference engine's contract;
    `place` is None for one that the run started; `slots_found`: its number of batch slots, if the
    harness had to find out, and `slots_unknown` why it could not; `ready`: the line in which an
    engine of ours announced its processes and their pages."""

    url: str
    model: str
    config: dict[str, Any] | None
    engine: Child | None
    place: Place | None = None
    slots_found: int | None = None
    slots_unknown: str = "trying showed no limit; give it with --set load.slots=N"
    ready: Mapping[str, Any] = field(default_factory=dict)

    @property
    def address(self) -> str | None:
        """The one that the run talks to, if it was named by its host."""
        return None if self.place is None else self.place.address

    @property
    def urls(self) -> list[str]:
        """One for each frontend."""
        return list(self.ready.get("urls") or [self.url])

    @property
    def kserve_urls(self) -> list[str]:
        """One for each frontend. Raises ConfigError if none is known."""
        if self.url.startswith("grpc"):
            return [self.url]
        one = self.ready.get("kserve_url")
        places = self.ready.get("kserve_urls") or ([] if one is None else [one])
        if not places:
            raise ConfigError(
                f"load.protocol is grpc, but only an engine that the run itself starts says where "
                f"its gRPC is: leave out --target {self.url}, or take --engine triton with its "
                "grpc://HOST:PORT and --model generate"
            )
        return [f"grpc://{place}" for place in places]

    @property
    def worker_urls(self) -> list[str]:
        """The workers' own pages, if it has tiers."""
        pages: list[str] = self.ready.get("worker_metrics_urls") or []
        return [page.removesuffix("/metrics") for page in pages]

    @property
    def metrics_urls(self) -> list[str]:
        return [f"{url}/metrics" for url in (*self.urls, *self.worker_urls)]

    @property
    def pids(self) -> dict[str, int]:
        """Its process ids by name, as far as its ready line or its config has them."""
        if frontends := self.ready.get("frontend_pids"):
            kinds = {"frontend": frontends, "worker": self.ready["worker_pids"]}
            return {f"{kind} {i}": pid for kind, of in kinds.items() for i, pid in enumerate(of)}
        config = self.config or {}
        names = ("frontend", "worker")
        return {name: int(config[f"{name}_pid"]) for name in names if f"{name}_pid" in config}

    @property
    def context(self) -> int | None:
        """Tokens of prompt and answer together; None if unknown."""
        limit = (self.config or {}).get("max_model_len")
        return None if limit is None else int(limit)

    @property
    def slots(self) -> int | None:
        return num_slots(self.config, self.slots_found)

    def check_alive(self) -> None:
        """Raises TargetError if our process has ended, or the port of another server is closed."""
        if self.engine is None:
            _knock(self.url, self.place)
            return
        code = self.engine.wait(0)
        if code is not None:
            raise TargetError(f"the engine died with code {code}:\n{self.engine.tail()}")


def choose_runner(settings: EngineSettings) -> str:
    has_torch = find_spec("torch") is not None
    match settings.runner:
        case "auto":
            return "torch" if has_torch else "simulated"
        case "torch" if not has_torch:
            raise ConfigError(
                f"engine.runner is torch, but torch is not installed; {INSTALL_TORCH}"
            )
        case runner:
            return runner


def engine_command(
    settings: EngineSettings,
    runner: str,
    *,
    model: str | None,
    teacher: Path | None = None,
    protocol: Protocol = Protocol.HTTP,
    port: int = 0,
) -> list[str]:
    """`port`: 0 for one that is free."""
    command = python_module("reference_engine", "--host", "127.0.0.1", "--port", str(port))
    if protocol is Protocol.GRPC:
        command += ["--kserve-port", "0"]
    command += ["--exit-with-stdin", "--runner", runner, "--device", settings.device]
    by_hand = {"runner", "device", "faults", "allow_faults", *_OF_TIERS}
    values = settings.model_dump(exclude=by_hand)
    if settings.has_tiers:
        values |= {key: getattr(settings, key) or None for key in _OF_TIERS}
        values["worker_metrics_port"] = 0
    values["model"] = model or settings.model
    values["teacher"] = teacher
    for key, value in values.items():
        name = key.replace("_", "-")
        if isinstance(value, bool):
            command.append(f"--{name}" if value else f"--no-{name}")
        elif value is not None:
            command += [f"--{name}", str(value)]
    for fault in settings.faults:
        command += ["--fault", fault]
    if settings.allow_faults:
        command.append("--allow-faults")
    return command


def start_engine(
    command: list[str], log: Path, children: ExitStack, *, interruption: Interruption
) -> tuple[Child, Mapping[str, Any]]:
    """Start the bundled engine; it ends with `children`. Returns its process and its ready line.

    Raises ConfigError if it refuses its settings, TargetError if it does not start, and
    InterruptedRunError if the user interrupts.
    """
    engine = children.enter_context(Child("engine", command, log))
    try:
        ready = engine.wait_until(
            lambda: find_ready_line(log.read_text(errors="replace")),
            timeout_s=ENGINE_READY_S,
            interruption=interruption,
        )
    except TargetError as error:
        if engine.wait(0) == BAD_CONFIGURATION:
            said = (engine.lines() or ["(its log is empty)"])[-1]
            refusal = said.removeprefix("walkaway engine: ").removeprefix("error: ")
            raise ConfigError(
                f"the engine refuses its settings (section [engine] of the workload): {refusal}"
            ) from error
        raise
    return engine, ready


def start_command(
    command: list[str],
    log: Path,
    children: ExitStack,
    *,
    client: httpx.Client,
    ready_s: float,
    interruption: Interruption,
) -> tuple[Child, str]:
    """Start a server by its command; it ends with `children`. Returns its process and its URL.

    Raises ConfigError for a program that cannot be started, TargetError if it ends or is not ready
    within `ready_s` seconds, and InterruptedRunError if the user interrupts.
    """
    port = free_port()
    words = [word.replace(PORT, str(port)) for word in command]
    try:
        server = children.enter_context(Child("server", words, log, quit_s=0))
    except OSError as error:
        raise ConfigError(
            f"target.command: {words[0]}: {error.strerror}; name a program of this machine"
        ) from error
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool | None:
        has_ended = server.wait(0) is not None  # another server may have its port then
        return None if has_ended or not _is_ready(client, url) else True

    server.wait_until(
        is_ready,
        timeout_s=ready_s,
        interruption=interruption,
        poll_s=POLL_S,
        setting=" (target.ready_s)",
    )
    return server, url


def _is_ready(client: httpx.Client, url: str) -> bool:
    try:
        health, models = (client.get(f"{url}{path}") for path in ("/health", "/v1/models"))
    except httpx.HTTPError:
        return False
    return models.is_success and (health.is_success or health.status_code == httpx.codes.NOT_FOUND)


def attach(  # noqa: PLR0913  all that is known of a server beforehand
    url: str,
    target: Target,
    *,
    model: str | None,
    client: httpx.Client,
    engine: Child | None,
    ready: Mapping[str, Any],
    place: Place | None = None,
    takes_first_model: bool = False,
) -> Server:
    config: dict[str, Any] | None = None
    if not target.http:
        assert target.kserve is not None
        _knock(url, place)
        model = model or target.kserve.model
        if model is None:
            raise ConfigError(f"{url} serves models by name; name one with --model")
    elif target.lifecycle:
        config = _read(
            client,
            url,
            "/walkaway/config",
            dict,
            f"{url} answers, but not like --engine {target.name}",
            "name its kind with --engine, see `walkaway targets`",
        )
        model = model or str(config["model"])
    elif model is None:
        model = _listed_model(client, url, takes_first=takes_first_model)
    else:
        _get(client, f"{url}/v1/models")
    return Server(url=url, model=model, config=config, engine=engine, ready=ready, place=place)


def _listed_model(client: httpx.Client, url: str, *, takes_first: bool) -> str:
    models = _read(
        client,
        url,
        "/v1/models",
        _names_of_models,
        f"{url} does not list its models",
        "name one with --model",
    )
    if not models or (len(models) > 1 and not takes_first):
        listed = ", ".join(models[:_MOST_LISTED]) or "none"
        listed += ", ..." if len(models) > _MOST_LISTED else ""
        raise ConfigError(f"{url} has {len(models)} models ({listed}); name one with --model")
    return models[0]


def _names_of_models(content: Any) -> list[str]:
    """A bare list, as Together's, is one of models, too."""
    entries = content if isinstance(content, list) else content["data"] or ()
    return list(dict.fromkeys(str(entry["id"]) for entry in entries))


def _read(
    client: httpx.Client,
    url: str,
    page: str,
    parse: Callable[[Any], T],
    problem: str,
    remedy: str,
) -> T:
    response = _get(client, f"{url}{page}")
    try:
        return parse(response.raise_for_status().json())
    except (httpx.HTTPStatusError, ValueError, KeyError, TypeError) as error:
        status = response.status_code
        if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            remedy = "name the variable with its key: --api-key-env"
        words = words_of_error(response.content)
        came = f"{problem} (GET {page}: status {status}{words})"
        says_why = response.is_success and words  # what is wrong is not the model's name
        raise ConfigError(came if says_why else f"{came}; {remedy}") from error


def words_of_error(body: bytes) -> str:
    """The server's own, after a colon; "" if this is no error in JSON."""
    with suppress(ValueError):
        content = json.loads(body)
        if isinstance(content, dict) and error_in(content, has_name=False) is not None:
            return f": {error_message(content)}"
    return ""


def _knock(url: str, place: Place | None) -> None:
    """Open and close a connection without a request, which would disturb the measurement."""
    host, port = split_place(url)

    def connect(address: str) -> socket.socket:
        return socket.create_connection((address, port), timeout=KNOCK_S)

    try:
        (place or Place(url)).reach(port, connect, (OSError,)).close()
    except TimeoutError:
        return  # slow, not dead
    except OSError as error:
        why = why_unreached(error, host, port)
        raise TargetError(f"the server at {url} is gone: {why}") from error


def _get(client: httpx.Client, url: str) -> httpx.Response:
    try:
        response = client.get(url)
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        why = why_unreached(error, *split_place(url))
        raise TargetError(f"cannot reach {url} ({_NAMED_BY}): {why}") from error
    except httpx.HTTPError as error:
        raise TargetError(
            f"no answer from {url} ({_NAMED_BY}): {str(error) or type(error).__name__}"
        ) from error
    if response.has_redirect_location:
        raise ConfigError(
            f"{url} redirects to {response.headers['location']}: name that address with "
            "--target (its base URL only)"
        )
    return response


def parse_command(text: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"target.command: {text}: {error}") from error
    if not any(PORT in word for word in words):
        raise ConfigError(
            f"target.command: {text}: has no {PORT}: write it as the server's port, such as "
            f"`--port {PORT}`"
        )
    return words
