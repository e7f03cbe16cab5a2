"""Answers that do not depend, bit by bit, on what else was in the batch.

Floating-point sums depend on their order, and a matrix product picks its order by its shape: a row
comes out slightly different among 3 rows than among 4, or beside a longer context. Where two logits
nearly tie, another token is chosen, and from there on another answer is given.

So every token gets a forward pass of its own: one row, and a context padded to whole blocks of its
own request. All shapes are then a function of the token's position, and what is computed is a
function of the tokens before it. Batch-mates, chunk sizes, recomputation after a preemption and
keys and values that another request has left in the prefix cache change nothing, on any device: no
kernel has to promise anything but to give the same for the same.

The price is batching itself. `make bench BENCH=batch_invariance` says how much: a step of many
streams, or a prompt, takes as long as all its tokens one after another.
"""

from collections.abc import Iterator

from reference_engine.model.batch import Span


def token_by_token(spans: list[Span]) -> Iterator[list[Span]]:
    """One list of a single token for each forward pass, in order."""
    for request, first, last in spans:
        for position in range(first, last):
            yield [Span(request, position, position + 1)]
