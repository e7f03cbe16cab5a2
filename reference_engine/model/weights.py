"""Random weights from a seed: the same on every machine that runs the same torch."""

import torch
from torch import nn

from reference_engine.model.llama import Llama, Projection

_STD = 0.02
_OUTPUT_STD = 0.12  # logits must differ clearly, yet leave more than a handful of likely words


def fill_with_random(model: Llama, seed: int) -> None:
    """Draw all matrices from N(0, 0.02) (the output matrix from N(0, 0.12)), norms stay at one."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, Projection | nn.Embedding):
            std = _OUTPUT_STD if module is model.lm_head else _STD
            nn.init.normal_(module.weight, std=std, generator=generator)
