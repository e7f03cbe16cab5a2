"""One `walkaway conform`, as typed, and the cases that it asks for.

The dated suites are lists of cases that stay as they are once they are released: suites/DATE.txt
names one case per line. A case that comes later is in a later suite, and none is ever renamed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Final

from harness.client.wire_log import MASK
from harness.conform.bad_server import WAYS
from harness.conform.case import CASES, Case, is_meant, select
from harness.conform.cases import load_cases
from harness.conform.contact import JudgedConfig
from harness.conform.gateway.cases import gateway_cases
from harness.conform.gentle_case import GENTLE_ID, GENTLE_S, gentle_case
from harness.conform.pacing import in_order
from harness.errors import ConfigError, check_extra
from harness.place import LOAD_THIS_HOST
from harness.workload.workload import EngineSettings

# The bundled engine as a target: steps of a fixed length, and so few blocks that memory has an end.
OWN_ENGINE: Final = EngineSettings(
    runner="simulated",
    sim_fixed_ms=10,
    sim_decode_token_ms=0,
    max_num_seqs=8,
    max_model_len=4096,
    max_num_batched_tokens=256,  # a long prompt in many chunks
    num_blocks=512,
)


MOST_TRIES: Final = 8  # of a gateway's case: the upstream has slots for all cases at once
_SUITES: Final = files("harness.conform") / "suites"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConformConfig(JudgedConfig):
    """One `walkaway conform`, as typed."""

    wanted: Sequence[str] = ()
    direct: str | None = None
    configuration: str | None = None
    tries: int | None = None
    strict: bool = False
    quick: bool = False
    suite: str | None = None
    max_seconds: float | None = None
    fail_fast: bool = False
    against: str | None = None  # a bundled server, "good" or "bad"
    gentle: bool = False
    upstream: str | None = None  # [HOST:]PORT of the bundled upstream, behind a gateway
    usage: str | None = None  # an adapter, and its place
    expected: Path | None = None

    @property
    def gentle_s(self) -> float:
        return self.max_seconds or GENTLE_S

    @property
    def own_engine(self) -> EngineSettings:
        """The settings of the bundled engine, where no target is named."""
        if self.against != "bad":
            return OWN_ENGINE
        return OWN_ENGINE.model_copy(update={"faults": [way.fault for way in WAYS]})

    def flags(self, *, model: str, slots: int | None) -> list[str]:
        """The flags of a command that repeats a case: all that were given, except the cases, where
        the results go, and how far the run was to go."""
        values: list[tuple[str, object]] = [
            ("--target", self.target_url),
            ("--against", self.against),
            ("--engine", self.target_url and self.engine),
            ("--model", self.target_url and model),
            ("--upstream", self.upstream),
            ("--usage", self.usage),
            ("--slots", None if self.upstream else self.target_url and slots),
            *(("--metrics-url", url) for url in self.metrics_urls),
            ("--api-key-env", self.api_key_env),
            *(("--header", f"{name}={MASK}") for name in self.headers),
            ("--ca-file", self.ca_file),
            ("--pid", self.pid),
            ("--direct", self.direct),
            ("--adapter", self.adapter),
            ("--configuration", self.configuration),
            ("--tries", self.tries),
            ("--expected-failures", self.expected),
            ("--seed", self.seed),
            ("--max-seconds", self.gentle_s if self.gentle else None),
        ]
        words = [word for flag, value in values if value is not None for word in (flag, str(value))]
        words += ["--strict"] if self.strict else []
        words += ["--quick"] if self.quick else []
        words += ["--gentle"] if self.gentle else []
        return [*words, LOAD_THIS_HOST] if self.loads_any_host else words


def all_cases() -> list[Case]:
    load_cases()
    return list(CASES.values())


def known_suites() -> list[str]:
    """The oldest first."""
    names = (file.name for file in _SUITES.iterdir())
    return sorted(name.removesuffix(".txt") for name in names if name.endswith(".txt"))


def cases_of(suite: str, cases: Iterable[Case]) -> list[Case]:
    """The cases of the suite. Raises ConfigError for an unknown suite."""
    known = known_suites()
    if suite not in known:
        raise ConfigError(f"--suite {suite}: there is no such suite; known: {', '.join(known)}")
    ids = set((_SUITES / f"{suite}.txt").read_text(encoding="utf-8").split())
    return [case for case in cases if case.id in ids]


def _gentle(config: ConformConfig) -> Case:
    """Raises ConfigError if cases of the suite are asked for, too."""
    others = [one for one in config.wanted if one != GENTLE_ID]
    others += ["--quick"] if config.quick else []
    others += ["--suite"] if config.suite is not None else []
    if others:
        raise ConfigError(
            "--gentle watches a server while its users use it, and runs no cases: leave out "
            f"{', '.join(others)}"
        )
    check_extra("load", "walkaway conform --gentle")  # its averages are numpy's
    return gentle_case(config.gentle_s)


def _is_of_gateway(word: str) -> bool:
    return any(is_meant(one.case, word) for one in gateway_cases().values())


def _of_gateway(config: ConformConfig) -> list[Case]:
    """The cases in the order of their declaration. Raises ConfigError."""
    flags = {
        "--gentle": config.gentle,
        "--suite": config.suite is not None,
        "--against": config.against is not None,
        "--direct": config.direct is not None,
        "--adapter": config.adapter is not None,
        "--slots": config.slots is not None,
    }
    if unfit := [flag for flag, is_given in flags.items() if is_given]:
        raise ConfigError(f"--upstream judges a gateway: leave out {', '.join(unfit)}")
    if (config.tries or 0) > MOST_TRIES:
        raise ConfigError(
            f"--tries {config.tries}: with --upstream at most {MOST_TRIES}, since all run at once"
        )
    chosen = select([one.case for one in gateway_cases().values()], config.wanted)
    return [one for one in chosen if one.quick or config.wanted or not config.quick]


def chosen_cases(config: ConformConfig) -> list[Case]:
    """The cases in the order in which they run. Raises ConfigError."""
    if config.upstream is not None:
        return _of_gateway(config)
    if config.usage is not None:
        raise ConfigError("--usage is about a gateway: name the port behind it with --upstream")
    if config.gentle:
        return [_gentle(config)]
    known = all_cases()
    for word in config.wanted:
        if _is_of_gateway(word) and not any(is_meant(case, word) for case in known):
            raise ConfigError(f"{word} is a case of gateways: add --upstream PORT")
    chosen = select(known, config.wanted)
    if config.suite is not None:
        chosen = cases_of(config.suite, chosen)
        if not chosen:
            raise ConfigError(f"--suite {config.suite} has none of {', '.join(config.wanted)}")
    if config.quick and not config.wanted:
        chosen = [one for one in chosen if one.quick]
    return in_order(chosen)
