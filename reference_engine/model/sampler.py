"""From logits to tokens: greedy if the temperature is 0, else drawn from the softmax.

Drawing inverts the cumulative distribution at a number that is computed from the request's seed
and the token's position, not taken from a stream. So an answer does not depend on the rest of the
batch, and a preemption does not change it.
"""

from typing import TYPE_CHECKING, Final

from reference_engine.core.request import Request
from reference_engine.model.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor, device

_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_GREEDY_BELOW: Final = 1e-5  # logits divided by less would leave the range of float32


def _effective(temperature: float) -> float:
    return temperature if temperature >= _GREEDY_BELOW else 0.0


def sampling_bias(tokenizer: Tokenizer, device: "device") -> "Tensor":
    """Numbers added to logits: [2, vocabulary], 0 for what may be sampled, -inf for the rest.

    The second row is for requests that ignore the end of a sequence.
    """
    import torch  # here, since the simulated runner needs `mix` without torch

    ends = sorted(tokenizer.eos_token_ids)
    bias = torch.full((2, tokenizer.vocab_size), float("-inf"))
    bias[:, tokenizer.sampled_ids.start : tokenizer.sampled_ids.stop] = 0.0
    bias[0, ends], bias[1, ends] = 0.0, float("-inf")
    return bias.to(device)


def add_bias(logits: "Tensor", requests: list[Request], bias: "Tensor") -> "Tensor":
    """The logits [S, vocabulary] with the `sampling_bias`, in place."""
    rows = [int(request.sampling.ignore_eos) for request in requests]
    logits += bias[rows[0]] if len(set(rows)) == 1 else bias[rows]
    return logits


def sample(logits: "Tensor", requests: list[Request]) -> list[int]:
    """One token for each row of logits [S, vocabulary]; they have their bias."""
    import torch

    temperatures = [_effective(request.sampling.temperature) for request in requests]
    if not any(temperatures):
        return likeliest(logits)
    draws = [uniform(request.sampling.seed, request.num_tokens) for request in requests]
    # Pinned, since a copy of other memory to a device would wait until the model is done.
    numbers = torch.tensor([temperatures, draws], pin_memory=logits.is_cuda)
    temperature, draw = numbers.to(logits.device, non_blocking=True).unsqueeze(-1)
    is_greedy = temperature == 0
    cumulative = (logits / temperature.where(~is_greedy, 1.0)).softmax(dim=-1).cumsum(dim=-1)
    # Scaled to the last sum, which rounding may leave a little off 1.
    targets = draw * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, targets, right=True)[:, 0]
    drawn = drawn.clamp(max=logits.shape[1] - 1)
    return torch.where(is_greedy[:, 0], logits.argmax(dim=-1), drawn).tolist()


def likeliest(logits: "Tensor") -> list[int]:
    """numpy's argmax takes a tenth of the time of torch's on a CPU."""
    chosen = logits if logits.is_cuda else logits.numpy()
    return chosen.argmax(-1).tolist()


def probabilities(logits: "Tensor", tokens: list[int], requests: list[Request]) -> dict[str, float]:
    """The model's probability of the token of each request that wants it.

    It is that at temperature 1, among the tokens that `sample` left possible in `logits`.
    """
    wanted = [row for row, request in enumerate(requests) if request.wants_probabilities]
    if not wanted:
        return {}
    import torch

    shares = logits[wanted].softmax(dim=-1)
    chosen = torch.tensor([[tokens[row]] for row in wanted], device=logits.device)
    found = shares.gather(1, chosen)[:, 0].tolist()  # together: each answer waits for the device
    return {requests[row].request_id: one for row, one in zip(wanted, found, strict=True)}


def mix(seed: int, position: int) -> int:
    """64 well-mixed bits: the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    z = (seed + (position + 1) * _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def uniform(seed: int, position: int) -> float:
    return (mix(seed, position) >> 11) * 2.0**-53
