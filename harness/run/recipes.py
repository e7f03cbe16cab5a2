"""What is known of real engines and gateways: how each is installed, started, asked and ended.

recipes.toml holds the engines and gateways.toml the gateways, whose `direct` is the server behind.

To add an engine or a gateway:

    harness/targets/NAME.toml     its dialect, its metrics, what it promises (workload/target.py); a
                                  row in docs/targets.md
    recipes.toml, gateways.toml   how it is installed and started; a row in docs/engines.md or
                                  docs/gateways.md
    tools/engines_matrix.py       its settings in `make matrix`; gateways are all in `make gateways`
    tools/engine_logs.py          how its log says that a request was aborted: a second witness
"""

import getpass
import os
import sys
import sysconfig
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Final, Literal

import msgspec

from harness.errors import ConfigError, did_you_mean
from harness.workload.target import DialectName

ModelFormat = Literal["hf", "gguf", "tokenizer"]
HOME_VARIABLE: Final = "WALKAWAY_ENGINES"
PYTHON: Final = f"{sys.version_info.major}.{sys.version_info.minor}"
FILES: Final = ("recipes.toml", "gateways.toml")
PATHS: Final[Mapping[DialectName, str]] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}


class GatewayRoute(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How a gateway is asked in one dialect. `headers`: added to the gateway's own."""

    path: str = ""
    model: str = "$served"
    headers: dict[str, str] = {}


class SetupCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A request that sets up a gateway, once it is ready. `body` is JSON; `takes`: for the texts
    after it, a name and the keys that lead to its value in the answer, with dots."""

    method: Literal["POST", "PUT"] = "POST"
    url: str
    body: str
    takes: dict[str, str] = {}


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
    debian: list[str] = []
    npm: list[str] = []
    overrides: dict[str, str] = {}  # of npm: the versions of packages that others need
    copies: dict[str, str] = {}
    files: dict[str, str] = {}
    run_files: dict[str, str] = {}
    model: ModelFormat | None = None
    most_slots: int | None = None
    env: dict[str, str] = {}
    commands: list[list[str]] = []
    url: str = "$url"
    served: str = "random"
    ready: str = ""
    ready_text: str = ""
    calls: list[SetupCall] = []
    metrics: list[str] = []
    routes: dict[DialectName, GatewayRoute] = {}
    headers: dict[str, str] = {}
    http2: bool = False
    usage: str = ""  # of `walkaway conform --usage`

    @property
    def is_hop(self) -> bool:
        return "$direct" in msgspec.json.encode(self).decode()

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
        return engines_home() / f"{self.name}.up.json"

    @property
    def log(self) -> Path:
        return engines_home() / f"{self.name}.log"

    @property
    def pins(self) -> bytes:
        ours = [self.pip, self.remove, self.copies, self.files]
        theirs = [one for one in (self.debian, self.npm, self.overrides) if one]
        return msgspec.json.encode(ours + theirs)


def engines_home() -> Path:
    return Path(os.environ.get(HOME_VARIABLE) or Path.home() / ".cache" / "walkaway" / "engines")


def load_recipes() -> dict[str, Recipe]:
    own: dict[str, Recipe] = {}
    for name in FILES:
        text = (files("harness.run") / name).read_bytes()
        own |= msgspec.toml.decode(text, type=dict[str, Recipe])
    return {name: _whole(name, one, own) for name, one in own.items()}


def _whole(name: str, recipe: Recipe, own: Mapping[str, Recipe]) -> Recipe:
    if recipe.like is None:
        return msgspec.structs.replace(recipe, name=name)
    model = own[recipe.like]

    def changed(text: str) -> str:
        for old, new in recipe.change.items():
            text = text.replace(old, new)
        return text

    return msgspec.structs.replace(
        model,
        name=name,
        like=recipe.like,
        run_files={path: changed(text) for path, text in model.run_files.items()},
        commands=[[changed(word) for word in command] for command in model.commands],
    )


def find_recipe(name: str) -> Recipe:
    known = load_recipes()
    if name not in known:
        near = did_you_mean(name, known) or f"; there are {', '.join(known)}"
        raise ConfigError(f"there is no recipe `{name}`{near}")
    return known[name]


def places(recipe: Recipe) -> dict[str, str]:
    home = recipe.home
    return {
        "home": str(home),
        "python": str(home / "bin" / "python"),
        "version": PYTHON,
        "site": str(home / "lib" / f"python{PYTHON}" / "site-packages"),
        "libdir": str(sysconfig.get_config_var("LIBDIR")),
        "user": getpass.getuser(),
        "libs": str(next(home.glob("usr/lib/*-linux-*"), "")),
    }


def filled(text: str, known: Mapping[str, str]) -> str:
    return Template(text).substitute(known)


def write_files(folder: Path, texts: Mapping[str, str], known: Mapping[str, str]) -> None:
    for name, text in texts.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(filled(text, known).lstrip() if known else text.lstrip())
