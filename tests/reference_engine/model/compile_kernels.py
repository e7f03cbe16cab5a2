"""Compiles the Triton kernels for an H100 or H200, to machine code: that takes no device."""

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from reference_engine.model.paged_decode import _attend_to_part, _merge_parts

H200 = GPUTarget("cuda", 90, 32)
_INT, _IDS, _SUMS = "i32", "*i64", "*fp32"


def compile_for_h200(kernel: Any, types: dict[str, str], constants: dict[str, int]) -> None:
    signature = types | dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    assert triton.compile(source, target=H200).asm["cubin"]


def main() -> None:
    parts = {"sums": _SUMS, "maxima": _SUMS, "weights": _SUMS}
    for dtype, group, group_2, dim, size in (("bf16", 4, 4, 128, 16), ("fp32", 3, 4, 48, 12)):
        dims = {"dim": dim, "dim_2": triton.next_power_of_2(dim)}
        inputs = {"queries": f"*{dtype}", "blocks": f"*{dtype}", "tables": _IDS, "positions": _IDS}
        numbers = {"table_stride": _INT, "num_kv_heads": _INT, "num_parts": _INT}
        compile_for_h200(
            _attend_to_part,
            inputs | parts | {"scale": "fp32"} | numbers,
            {"group_size": group, "group_2": group_2, "size": size, "size_2": 16, "part_blocks": 16}
            | dims,
        )
        compile_for_h200(
            _merge_parts,
            {"positions": _IDS}
            | parts
            | {"mixed": f"*{dtype}", "num_heads": _INT, "num_parts": _INT},
            {"part_tokens": 16 * size, "at_once": 16} | dims,
        )


if __name__ == "__main__":
    main()
