"""Compiles the Triton kernels for an H100 or H200, to machine code: that takes no device.

Prints for each kernel its registers a thread, and the bytes that it spills; exit status 1 if one
spills.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from reference_engine.model import fused, paged_attention

H200: Final = GPUTarget("cuda", 90, 32)
_INT, _IDS, _SUMS = "i32", "*i64", "*fp32"


def kernels(
    dtype: str, group: int, dim: int, block_size: int
) -> Iterator[tuple[Any, Mapping[str, str], Mapping[str, int], int]]:
    """Each kernel with the types of its arguments, its constants, and its warps, as launched."""
    some = f"*{dtype}"
    dims = {"dim": dim, "dim_2": triton.next_power_of_2(dim)}
    num_warps = paged_attention.warps({"bf16": torch.bfloat16, "fp32": torch.float32}[dtype])
    group_2 = triton.next_power_of_2(group)
    reads = {"queries": some, "blocks": some, "tables": _IDS, "width": _IDS}
    parts = {"sums": _SUMS, "maxima": _SUMS, "weights": _SUMS}
    numbers = {"scale": "fp32", "query_stride": _INT, "num_kv_heads": _INT}
    yield (
        paged_attention._attend_to_parts,
        reads | {"decodes": _IDS} | parts | numbers | {"num_parts": _INT, "at_once": _INT},
        {"group_size": group, "group_2": 16, "block_size": block_size, "part": 64, "tile": 32}
        | dims,
        num_warps,
    )
    yield (
        paged_attention._merge_parts,
        {"decodes": _IDS, **parts, "queries": some}
        | {"query_stride": _INT, "num_heads": _INT, "num_parts": _INT},
        {"part": 64, "at_once": 16, **dims},
        4,
    )
    yield (
        paged_attention._attend_to_context,
        reads | {"tiles": _IDS} | numbers,
        {"group_size": group, "group_2": group_2, "rows": 64, "block_size": block_size, "tile": 32}
        | dims,
        num_warps,
    )
    size = 32 * dim
    yield (
        fused._add_norm,
        {"x": some, "delta": some, "weight": some, "eps": _SUMS, "normed": some},
        {"size": size, "size_2": triton.next_power_of_2(size), "adds": True},
        8,
    )
    yield fused._gated, {"gate_up": some, "out": some, "size": _INT}, {"columns": 1024}, 4
    yield (
        fused._rotate_and_store,
        {"heads": some, "cos": some, "sin": some, "slots": _IDS, "pool": some}
        | {"num_projected": _INT, "num_kv_heads": _INT},
        {"half": dim // 2, "half_2": triton.next_power_of_2(dim // 2)},
        1,
    )


def machine_code(
    kernel: Any, types: Mapping[str, str], constants: Mapping[str, int], num_warps: int
) -> bytes:
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    is_pointer = [types.get(name, "").startswith("*") for name in kernel.arg_names]
    aligned = {(at,): [["tt.divisibility", 16]] for at, is_one in enumerate(is_pointer) if is_one}
    source = ASTSource(fn=kernel, signature=signature, constexprs=dict(constants), attrs=aligned)
    code: bytes = triton.compile(source, target=H200, options={"num_warps": num_warps}).asm["cubin"]
    return code


def resources(code: bytes) -> tuple[int, int]:
    """Registers a thread, and bytes of its stack, which holds what is spilled."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        said = subprocess.run(
            [tool, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found is not None, said
    return int(found[1]), int(found[2])


def main() -> int:
    spilled = 0
    for dtype, group, dim, block_size in (
        ("bf16", 4, 128, 16),
        ("bf16", 4, 64, 16),
        ("fp32", 4, 128, 16),
        ("fp32", 3, 48, 12),
    ):
        for kernel, types, constants, num_warps in kernels(dtype, group, dim, block_size):
            registers, stack = resources(machine_code(kernel, types, constants, num_warps))
            spilled += stack
            name = kernel.fn.__name__.lstrip("_")
            print(f"{dtype} {dim} {name}: {registers} registers, {stack} bytes spilled")  # noqa: T201
    return 1 if spilled else 0


if __name__ == "__main__":
    sys.exit(main())
