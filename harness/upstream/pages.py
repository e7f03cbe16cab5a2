"""The pages that routers and gateways ask a server for, and the log: all but the answers."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec

from harness.upstream.scheduler import UpstreamScheduler
from harness.upstream.truth import PAGE, Truth

_JSON: Final = "application/json"
_TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
_MODELS: Final = "/v1/models/"
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_CONTEXT_TOKENS: Final = 131_072


class PageError(ValueError):
    """A query that cannot be read; the message is a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamPages:
    """`settings`: of the server, for the log's reader. `connections`: how many are open, and how
    many there have been. `num_shown`: how often each page was asked for, as routers do that look
    whether the server is there."""

    model: str
    version: str
    settings: Mapping[str, Any]
    truth: Truth
    scheduler: UpstreamScheduler
    connections: Callable[[], tuple[int, int]]
    num_shown: Counter[str] = field(default_factory=Counter)

    def page(self, target: str) -> tuple[str, bytes] | None:
        """Its content type and its body; None: there is no such page. Raises PageError."""
        parts = urlsplit(target)
        path = parts.path.rstrip("/") or "/"
        if (page := self._page(path, parts.query)) is not None:
            self.num_shown[path if not path.startswith(_MODELS) else _MODELS] += 1
        return page

    def _page(self, path: str, query: str) -> tuple[str, bytes] | None:
        if path in ("/", "/health", "/healthz", "/health_generate", "/ping"):
            return _JSON, b"{}"
        if path == "/metrics":
            return _TEXT, self._metrics().encode()
        body = self._body(path, query)
        return None if body is None else (_JSON, msgspec.json.encode(body))

    def _body(self, path: str, query: str) -> dict[str, Any] | None:
        match path:
            case "/walkaway/truth":
                return self._truth(parse_qs(query))
            case "/v1/models" | "/models":
                return {"object": "list", "data": [self._model(self.model)]}
            case "/get_model_info" | "/model_info":
                return self._model_info()
            case "/get_server_info" | "/server_info":
                return self._server_info()
            case "/version":
                return {"version": self.version}
            case _ if path.startswith(_MODELS):
                return self._model(unquote(path.removeprefix(_MODELS)))
            case _:
                return None

    def _truth(self, query: Mapping[str, list[str]]) -> dict[str, Any]:
        names = query.get("id")
        since, limit = (_number(query, name) for name in ("since", "limit"))
        found = self.truth.find(names[0] if names else None, since or 0, min(limit or PAGE, PAGE))
        num_open, num_all = self.connections()
        return {
            "schema_version": 1,
            "clock": "CLOCK_MONOTONIC",
            "boot_id": _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else None,
            "now_ns": self.truth.clock_ns(),
            "settings": self.settings,
            "running": self.scheduler.num_running,
            "waiting": self.scheduler.num_waiting,
            "connections": {"open": num_open, "opened": num_all},
            "pages": dict(self.num_shown),
            "asked": self.truth.num_asked,
            "forgotten": self.truth.num_forgotten,
            "requests": [record.shown() for record in found],
        }

    def _model(self, name: str) -> dict[str, Any]:
        owner = {"owned_by": "walkaway", "max_model_len": _CONTEXT_TOKENS}
        return {"id": name, "object": "model", "created": 0, **owner}

    def _model_info(self) -> dict[str, Any]:
        """The model in the words of SGLang, as the next page."""
        return {
            "model_path": self.model,
            "tokenizer_path": self.model,
            "served_model_name": self.model,
            "is_generation": True,
            "max_context_length": _CONTEXT_TOKENS,
        }

    def _server_info(self) -> dict[str, Any]:
        more = {"tp_size": 1, "dp_size": 1, "version": self.version, "internal_states": [{}]}
        return self._model_info() | {"max_running_requests": self.settings["slots"]} | more

    def _metrics(self) -> str:
        gauges = {
            "running": ("Requests that have a slot.", self.scheduler.num_running),
            "waiting": ("Requests that wait for a slot.", self.scheduler.num_waiting),
        }
        lines = []
        for name, (text, value) in gauges.items():
            metric = f"vllm:num_requests_{name}"
            lines += [f"# HELP {metric} {text}", f"# TYPE {metric} gauge"]
            lines.append(f'{metric}{{model_name="{self.model}"}} {value}')
        return "\n".join(lines) + "\n"


def _number(query: Mapping[str, list[str]], name: str) -> int | None:
    text = query.get(name, [None])[0]
    if text is None:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 18:
        raise PageError(f"{name}: must be a whole number of at most 18 digits")
    return int(text)
