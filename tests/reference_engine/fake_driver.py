"""A CUDA driver library that shows made-up devices."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from reference_engine.device import Surroundings


class Card(NamedTuple):
    name: str
    total_bytes: int
    capability: tuple[int, int] = (9, 0)


H200 = Card("NVIDIA H200", 150_100_000_000)
H100 = Card("NVIDIA H100 80GB HBM3", 85_000_000_000)
RTX_3090 = Card("NVIDIA GeForce RTX 3090", 25_300_000_000, (8, 6))
RTX_3070 = Card("NVIDIA GeForce RTX 3070", 8_400_000_000, (8, 6))
T4 = Card("Tesla T4", 15_800_000_000, (7, 5))
SMALL = Card("NVIDIA T400", 2_000_000_000, (8, 0))


class FakeDriver:
    """Its calls answer as the real ones do: by a status, and into the memory that they are given.

    The handle of a device is not its number.
    """

    def __init__(self, *cards: Card, version: int = 13000, init: int = 0) -> None:
        self._cards = {100 + number: card for number, card in enumerate(cards)}
        self._version, self._init = version, init

    def cuInit(self, flags: int) -> int:  # noqa: N802
        assert flags == 0
        return self._init

    def cuDriverGetVersion(self, answer: Any) -> int:  # noqa: N802
        answer._obj.value = self._version
        return 0

    def cuDeviceGetCount(self, answer: Any) -> int:  # noqa: N802
        answer._obj.value = len(self._cards)
        return 0

    def cuDeviceGet(self, answer: Any, number: int) -> int:  # noqa: N802
        answer._obj.value = 100 + number
        return 0

    def cuDeviceGetName(self, name: Any, size: int, device: int) -> int:  # noqa: N802
        name.value = self._cards[device].name.encode()[: size - 1]
        return 0

    def cuDeviceTotalMem_v2(self, answer: Any, device: int) -> int:  # noqa: N802
        answer._obj.value = self._cards[device].total_bytes
        return 0

    def cuDeviceGetAttribute(self, answer: Any, attribute: int, device: int) -> int:  # noqa: N802
        answer._obj.value = self._cards[device].capability[attribute - 75]
        return 0


def no_driver() -> Any:
    raise OSError("libcuda.so.1: cannot open shared object file")


def machine(
    *cards: Card,
    torch: tuple[str, str | None] | None = ("2.13.0+cu130", "13.0"),
    has_triton: bool = True,
    missing_tools: Sequence[str] = (),
    **driver: int,
) -> Callable[[], Surroundings]:
    """A machine with these cards; without any, it has no driver, unless something is said of it."""
    fake = FakeDriver(*cards, **driver)
    load = (lambda: fake) if cards or driver else no_driver
    return lambda: Surroundings(torch, has_triton, missing_tools, load)
