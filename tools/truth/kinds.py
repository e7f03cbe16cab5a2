"""The kinds of servers of the field that `walkaway conform` is held to, clean and defective:
scripted servers with slots (tests/harness/conform/slot_server.py), of services and of other
dialects (tools/truth), and the bundled engine. tools/truth/conform_kinds.py measures them."""

import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from harness.store.conform_result import Failure
from tests.e2e.running import TruthServer, dialect_server, service_server
from tests.harness.conform.slot_server import Manners, serving
from tests.reference_engine.running_engine import RunningEngine
from tools.truth.conform_cases import HABITS, ODD, Odd, engine_flags

TARGET: Final = """
description = "A scripted server"
stream_options = { include_usage = true }
bytes_are_tokens = true
slots_from = "workload"
settle_s = 1.0
"""
CONTINUOUS: Final = """
description = "A scripted server that counts as it goes"
stream_options = { include_usage = true, continuous_usage_stats = true }
continuous_usage = true
bytes_are_tokens = true
slots_from = "workload"
settle_s = 1.0
uncached_body = { cache_salt = "{random}" }
"""
GAUGES: Final = "".join(
    f'\n[metrics.{name}]\nname = "slots_{name}"\nrefresh = "at once"\ntrust = "exact"\n'
    for name in ("running", "waiting")
)
STEP_S: Final = 0.02
TOKENS_A_S: Final = 10_000  # that the server and this client still manage on two processors
BLOCKS: Final = 2048  # for a slot

Settings = Mapping[str, Any]
Flags = AbstractContextManager[list[str]]


def step_for(settings: Settings, slots: int) -> float:
    given_s: float = settings.get("step_s", STEP_S)
    return max(given_s, slots / TOKENS_A_S)


def _slots(declared: str = "") -> Callable[[Settings, int, Path], Flags]:
    """`declared`: what the target says besides."""

    @contextmanager
    def serve(settings: Settings, slots: int, folder: Path) -> Iterator[list[str]]:
        given = {"slots": slots, **settings, "step_s": step_for(settings, slots)}
        target = TARGET + declared + (GAUGES if settings.get("metrics") else "")
        with serving(Manners(**given), folder / "server.log") as url:
            yield ["--target", url, *_engine(folder, target)]

    return serve


slot_server: Final = _slots()


def _truth(
    start: Callable[..., AbstractContextManager[TruthServer]],
) -> Callable[[Settings, int, Path], Flags]:
    @contextmanager
    def serve(settings: Settings, slots: int, folder: Path) -> Iterator[list[str]]:
        given = {**settings, "slots": slots, "step_s": step_for(settings, slots)}
        with start(**given, num_blocks=BLOCKS * slots) as server:
            yield ["--target", server.url, *_engine(folder, CONTINUOUS)]

    return serve


@contextmanager
def bundled_engine(settings: Settings, slots: int, folder: Path) -> Iterator[list[str]]:
    del folder
    changes = {"max_num_seqs": slots, "sim_fixed_ms": 1e3 * step_for({}, slots)}
    # A step has room for a token of each stream and for prompts.
    changes["max_num_batched_tokens"] = max(256, 4 * slots)
    flags = engine_flags(settings.get("fault", ""), num_blocks=64 * slots, **changes)
    engine = RunningEngine(*flags, stderr=subprocess.DEVNULL)
    try:
        yield ["--target", engine.url, "--engine", "reference", "--pid", str(engine.process.pid)]
    finally:
        engine.stop()  # a fault may have ended it before


def _engine(folder: Path, target: str) -> list[str]:
    (folder / "target.toml").write_text(target)
    return ["--engine", str(folder / "target.toml")]


class Defect(NamedTuple):
    """What `settings` add to the clean server's, the cases that they must turn red, and in which
    ways. `green`: cases that must not be red."""

    settings: Settings
    red: tuple[str, ...]
    ways: tuple[Failure, ...]
    green: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.settings.items())


class Kind(NamedTuple):
    """`cases`: of the clean server; none: the cases of `--quick`. `may_be_open`: it may leave cases
    undecided, but none red. `sizes`: numbers of slots in place of the numbers asked for."""

    name: str
    about: str
    server: Callable[[Settings, int, Path], AbstractContextManager[list[str]]]
    clean: Settings
    defects: tuple[Defect, ...] = ()
    cases: tuple[str, ...] = ()
    may_be_open: bool = False
    sizes: tuple[int, ...] = ()


LEAVE: Final = "stream/fin-decode"
ENDS: Final = "bystander/ends"
LEFT: Final = (LEAVE, "unary/leave")
QUICK: Final = ("--quick",)
SAME: Final = ("same/answer", "same/prefill", "same/queue", "same/twin")
DEAF: Final = Defect({"forgets": True}, (LEAVE,), (Failure.NEVER,), (ENDS,))
LATE: Final = Defect({"hold_s": 0.5}, (LEAVE,), (Failure.LATE,))


def _odd(rows: tuple[Odd, ...], *cases: str) -> tuple[Defect, ...]:
    return tuple(
        Defect(one.settings, (one.case,), (one.kind,)) for one in rows if one.case in cases
    )


def _fault(fault: str, red: str, way: Failure, green: str) -> Defect:
    return Defect({"fault": fault}, (red,), (way,), (green,))


_services, _dialects = _truth(service_server), _truth(dialect_server)
_OTHERS_HARMED: Final = tuple(
    Defect(settings, (LEAVE,), (Failure.HARM,)) for settings in ({"stall_s": 0.4}, {"cuts": True})
)

KINDS: Final = (
    Kind("B1", "short steps", slot_server, {"step_s": 0.0016}, (DEAF, LATE)),
    Kind(
        "B1-uneven",
        "steps of 5 to 80 ms",
        slot_server,
        {"step_s": 0.005, "widest_s": 0.08},
        (DEAF,),
        (*LEFT, "queue/leave", "storm/all", "leak/slots", ENDS),
        sizes=(4,),
    ),
    Kind("B2", "a queue, any number of slots", slot_server, {}, (LATE,)),
    Kind(
        "B2-unlimited",
        "no limit",
        slot_server,
        {"slots": 0, "stream_s": 0.002, "step_s": 0.01},
        (DEAF,),
        LEFT,
        sizes=(0,),
    ),
    Kind(
        "B3",
        "refuses by 429",
        slot_server,
        {"full": 429},
        (DEAF, Defect({"hold_s": -1}, (LEAVE,), (Failure.NEVER,))),
    ),
    Kind("B4", "stalls and cuts", slot_server, {}, _OTHERS_HARMED, (LEAVE, ENDS)),
    Kind("B5", "the same request again", _services, {}, _odd(HABITS, "same/answer"), SAME),
    Kind("B6", "16 events at once", slot_server, {"flush": 16}, (DEAF, LATE)),
    Kind(
        "B6-event",
        "16 tokens an event",
        slot_server,
        {"flush": 16, "events": False},
        (DEAF,),
        (LEAVE, "storm/all", "leak/slots", ENDS),
    ),
    Kind(
        "B7",
        "silent spans",
        _services,
        {"piece_tokens": 16, "silent_tokens": 24},
        _odd(HABITS, "silence/leave", "tools/leave"),
        ("silence/leave", "tools/leave"),
    ),
    Kind(
        "B8",
        "dies of a leave",
        bundled_engine,
        {},
        (_fault("die-on-abort", LEAVE, Failure.HARM, "wedge/health"),),
        (LEAVE, "wedge/health"),
    ),
    Kind(
        "B8-pump",
        "stops 3 s after a leave",
        slot_server,
        {},
        (Defect({"dies_s": 3.0}, ("unary/leave",), (Failure.HARM, Failure.NEVER), (LEAVE, ENDS)),),
        ("unary/leave", ENDS),
        sizes=(4,),
    ),
    Kind(
        "B9",
        "a gateway that asks again",
        slot_server,
        {},
        (
            Defect(
                {"asks_again": True},
                ("stream/before-first",),
                (Failure.NEVER, Failure.LATE),
                (LEAVE,),
            ),
        ),
        ("stream/before-first", LEAVE),
    ),
    Kind(
        "B10",
        "gauges at rest",
        bundled_engine,
        {},
        (_fault("count-left-as-waiting", "gauge/rest", Failure.NEVER, "count/aborts"),),
        ("gauge/rest", "count/aborts"),
    ),
    Kind(
        "B11",
        "lists of prompts",
        _dialects,
        {},
        tuple(one for one in _odd(ODD, "n/prompts") if "keeps_queued" in one.settings),
        ("n/prompts", "n/parent"),
    ),
    Kind(
        "B12",
        "memory grows",
        bundled_engine,
        {},
        (
            _fault("grow-memory=1", "leak/process", Failure.HARM, "leak/slots"),
            Defect({"fault": "grow-with-answers=0.02"}, (), (), ("leak/process",)),
        ),
        ("leak/process", "leak/slots"),
    ),
    Kind(
        "B13",
        "doors and readers",
        _dialects,
        {},
        _odd(ODD, "shape/stall", "h2/rst-one"),
        ("shape/stall", "h2/rst-one", "prefill/leave", "structured/leave"),
    ),
    Kind(
        "B14",
        "it never stops",
        slot_server,
        {},
        (
            Defect(
                {"forgets": True},
                (LEAVE, "stream/rst-decode", "unary/leave", "storm/all", "leak/slots"),
                (Failure.NEVER, Failure.HARM),
                (*QUICK, ENDS, "next/text", "queue/bystander", "wedge/health"),
            ),
        ),
        LEFT,
    ),
    Kind("engine", "the bundled engine", bundled_engine, {}),
    Kind(
        "refuses-503",
        "refuses by 503",
        slot_server,
        {"full": 503},
        (DEAF,),
        (*LEFT, "storm/all", ENDS),
        sizes=(64,),
    ),
    Kind(
        "refuses-closes",
        "closes the connection instead of queueing",
        slot_server,
        {"full": -1},
        (DEAF,),
        (*LEFT, "storm/all", ENDS),
        sizes=(4,),
    ),
    Kind(
        "caches",
        "a cache of answers",
        slot_server,
        {"caches": True},
        (DEAF,),
        sizes=(4,),
    ),
    Kind(
        "drains",
        "declares `drain`, and drains",
        _slots('disconnect = "drain"\n'),
        {"forgets": True},
        (Defect({"forgets": False, "hold_s": -1}, (LEAVE,), (Failure.NEVER,)),),
        (*LEFT, ENDS),
        sizes=(4,),
    ),
    Kind(
        "drains-not",
        "declares `drain`, and cancels",
        _slots('disconnect = "drain"\n'),
        {},
        cases=(*LEFT, ENDS),
        sizes=(4,),
    ),
    Kind("one-slot", "one slot", slot_server, {}, (DEAF, LATE), sizes=(1,)),
    Kind(
        "one-slot-refuses",
        "one slot, refuses by 429",
        slot_server,
        {"full": 429},
        (DEAF,),
        (*LEFT, "storm/all", "leak/slots", "prefill/retry-at-once"),
        sizes=(1,),
    ),
    Kind(
        "refuses-n",
        "refuses more than one choice",
        slot_server,
        {"one_choice": True},
        (DEAF,),
        (LEAVE, "n/parent", ENDS),
        sizes=(4,),
    ),
    Kind(
        "renames",
        "names another model in its answers",
        slot_server,
        {"named": "scripted-2026-11-26"},
        (DEAF,),
        (*LEFT, ENDS),
        sizes=(4,),
    ),
    Kind(
        "rate",
        "8 requests a second",
        slot_server,
        {"rate": 8},
        cases=(*LEFT, "storm/all", ENDS),
        may_be_open=True,
        sizes=(64,),
    ),
    Kind(
        "queue-of-4",
        "4 requests may wait, one more gets a 429",
        slot_server,
        {"queued": 4},
        (DEAF, LATE),
        sizes=(4, 64),
    ),
    Kind(
        "two-servers",
        "two servers in turn, with a queue each",
        slot_server,
        {"pools": 2},
        may_be_open=True,
        sizes=(4, 64),
    ),
    Kind(
        "two-at-random",
        "any of two servers, with a queue each",
        slot_server,
        {"pools": 2, "is_at_random": True},
        may_be_open=True,
        sizes=(4, 64),
    ),
    Kind(
        "two-and-a-gauge",
        "any of two servers, and one gauge",
        slot_server,
        {"pools": 2, "is_at_random": True, "metrics": True},
        (DEAF, LATE),
        (*LEFT, "storm/all", ENDS),
        sizes=(4,),
    ),
    Kind(
        "minute",
        "200 requests a minute",
        slot_server,
        {"rate": 200, "rate_s": 60.0},
        may_be_open=True,
        sizes=(4,),
    ),
    Kind(
        "minute-refuses",
        "refuses by 429, and 150 requests a minute",
        slot_server,
        {"full": 429, "rate": 150, "rate_s": 60.0},
        may_be_open=True,
        sizes=(4,),
    ),
    Kind(
        "cuts-at-3-s",
        "cuts each request after 3 s",
        slot_server,
        {"longest_s": 3.0},
        may_be_open=True,
        sizes=(4,),
    ),
    Kind(
        "stops",
        "answers that may end after any token",
        slot_server,
        {"stops": 0.02},
        may_be_open=True,
        sizes=(4,),
    ),
    Kind(
        "grows",
        "8 slots, then 32",
        slot_server,
        {"slots_later": 32, "later": 150},
        (),
        may_be_open=True,
        sizes=(8,),
    ),
    Kind(
        "restarts",
        "cuts all and is away for a second",
        slot_server,
        {"restarts": 150},
        (),
        may_be_open=True,
        sizes=(4,),
    ),
    Kind(
        "slow",
        "1 token a second",
        slot_server,
        {"step_s": 1.0},
        cases=(LEAVE,),
        may_be_open=True,
        sizes=(4,),
    ),
    Kind(
        "fast",
        "2,000 tokens a second",
        slot_server,
        {"step_s": 0.0005},
        (DEAF,),
        (*LEFT, "storm/all", ENDS),
        sizes=(4,),
    ),
    Kind(
        "waits",
        "3 s to the first token",
        slot_server,
        {"first_s": 3.0},
        (DEAF,),
        (LEAVE,),
        may_be_open=True,
        sizes=(4,),
    ),
)
