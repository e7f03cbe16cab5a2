"""Attention of the step that is compiled for a CPU, against the textbook's."""

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="needs the extra `engine` (torch)")

from reference_engine.model.decode_step import attend_by_block  # noqa: E402
from tests.reference_engine.model.textbook import SHAPES, Shape, attention  # noqa: E402

LENGTHS = [1, 15, 16, 17, 3, 256, 257, 300]  # one token, full blocks, one more


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_reads_each_row_up_to_its_token(dtype: Any, shape: Shape) -> None:
    generator = torch.Generator().manual_seed(1)
    positions = torch.tensor(LENGTHS) - 1
    width = -(-max(LENGTHS) // shape.block_size)
    # Blocks have been used before, by any row, and a table's rest is block 0.
    shuffled = torch.randperm(len(LENGTHS) * width, generator=generator).view(len(LENGTHS), width)
    is_used = torch.arange(width) * shape.block_size <= positions[:, None]
    tables = torch.where(is_used, shuffled, 0)
    blocks = shape.random_blocks(len(LENGTHS) * width, generator).to(dtype)
    queries = torch.randn(len(LENGTHS), shape.num_heads, shape.head_dim, generator=generator)
    queries = queries.to(dtype)
    rows = zip(queries, tables, positions.tolist(), strict=True)
    expected = torch.stack([attention(query, blocks[table], at) for query, table, at in rows])
    attended = attend_by_block(queries, blocks, tables, positions)
    torch.testing.assert_close(attended, expected.to(dtype))
