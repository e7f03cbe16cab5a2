"""Which processes serve, where they listen, and what each frontend knows of the others."""

from collections.abc import Mapping
from ipaddress import ip_address
from typing import Any

import msgspec

from reference_engine.config import EngineConfig, FrontendSettings, StepCost
from reference_engine.faults import Faults


class WorkerAddress(msgspec.Struct, frozen=True, kw_only=True):
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def cost_flag(name: str) -> str:
    """The flag of a cost in seconds, which takes milliseconds."""
    return f"--sim-{name.removesuffix('_s').replace('_', '-')}-ms"


def as_flags(settings: Mapping[str, Any]) -> str:
    """Settings of EngineConfig, as on the command line."""
    words = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        match value:
            case StepCost():
                costs = msgspec.structs.asdict(value).items()
                words += [f"{cost_flag(cost)} {seconds * 1e3:g}" for cost, seconds in costs]
            case bool():
                words.append(f"--{flag}" if value else f"--no-{flag}")
            case _:
                words.append(f"--{flag} {value}")
    return " ".join(words)


class Tiers(msgspec.Struct, frozen=True, kw_only=True):
    """Which processes there are. `worker_listen`: a worker alone; `connect`: frontends alone, for
    such workers. Both can have a `name`, since other machines have workers and frontends, too.
    """

    frontends: int = 1
    workers: int = 1
    disaggregated: bool = False
    worker_metrics_port: int | None = None
    worker_listen: WorkerAddress | None = None
    connect: tuple[WorkerAddress, ...] = ()
    secret: str = ""
    name: str | None = None

    @property
    def is_launched(self) -> bool:
        """False for one frontend with one worker, and for a worker alone."""
        return bool(self.connect) or self.disaggregated or self.frontends * self.workers > 1


class FrontendPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A frontend among the others: its name, which says its incarnation, and theirs.

    `workers` are the names that are known before the workers at `addresses` answer.
    """

    name: str = "frontend-0"
    frontends: tuple[str, ...] = ("frontend-0",)
    id_prefix: str = ""
    secret: str = ""
    addresses: tuple[WorkerAddress, ...] = ()
    workers: tuple[str, ...] = ()
    worker_metrics_urls: list[str] = []


class ServeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`port` 0 takes a free one; a `kserve_port` of None serves no gRPC. `triton_faithful`: the
    repository's models are served with Triton's known gaps. `handler_endpoint` goes with the runner
    `handlers`. `given`: what of the `config` is on the command line. Frontends alone have the
    config of their workers, once these have said it.
    """

    host: str
    port: int
    kserve_port: int | None = None
    model_repository: str | None = None
    triton_faithful: bool = False
    handler_endpoint: str | None = None
    config: EngineConfig
    given: dict[str, Any] = {}
    faults: Faults
    frontend: FrontendSettings
    allow_faults: bool
    exit_with_stdin: bool
    tiers: Tiers = Tiers()
    place: FrontendPlace | None = None
