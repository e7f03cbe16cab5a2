"""The benchmark `model_speed` on a CUDA device."""

from collections.abc import Iterator
from importlib.util import find_spec

from tests.bench import model_speed
from tests.bench.ratio import Ratio, UnavailableError


def measure(*, quick: bool = False) -> Iterator[Ratio]:
    if find_spec("torch") is None:
        raise UnavailableError("needs torch: pip install 'walkaway[engine]'")
    import torch

    if not torch.cuda.is_available():
        raise UnavailableError("torch sees no CUDA device here")
    yield from model_speed.measure(quick=quick, device="cuda")
