# SPDX-License-Identifier: Apache-2.0
"""What a kernel for Hopper's tensor cores is given besides its C++: their instruction, whose text
depends on its width, and maps of the matrices that it copies to shared memory."""

from __future__ import annotations

import ctypes
from functools import lru_cache

from ..errors import SPError


def instruction(name: str, width: int, fp16: bool, keep: str, halves: bool = False) -> str:
    """CUDA C++ of ``name``: D [64, width] += A [64, 16] B [width, 16]; not ``keep``: D was 0.

    Args:
        keep: what that parameter is called.
        halves: ``a`` and ``b`` are the low halves of descriptors of rows of 128 swizzled bytes,
            K-major, else whole descriptors.
    """
    count, kind = width // 2, "f16" if fp16 else "bf16"
    registers = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    start = f"setp.ne.b32 p, %{count + 2}, 0;\\n"
    of, letter, a, b = "unsigned long long", "l", f"%{count}", f"%{count + 1}"
    if halves:
        places = f"mov.b64 a, {{{a}, 0x40000040}};\\nmov.b64 b, {{{b}, 0x40000040}};\\n"
        start = f".reg .b64 a, b;\\n{start}{places}"
        of, letter, a, b = "unsigned", "r", "a", "b"
    return (
        f"__device__ inline void {name}(float (&d)[{count}], {of} a, {of} b, int {keep}) {{\n"
        f'asm volatile("{{\\n.reg .pred p;\\n{start}'
        f"wgmma.mma_async.sync.aligned.m64n{width}k16.f32.{kind}.{kind} {{{registers}}}, "
        f'{a}, {b}, p, 1, 1, 0, 0;\\n}}"\n'
        f' : {operands} : "{letter}"(a), "{letter}"(b), "r"({keep}));\n}}\n'
    )


@lru_cache(maxsize=16384)
def tensor_map(
    address: int, sizes: tuple[int, ...], steps: tuple[int, ...], box: tuple[int, ...], fp16: bool
) -> bytes:
    """A map of a 16-bit tensor, 128 bytes; copies come in swizzled rows of 128.

    Args:
        sizes, box: of the tensor and of what is copied at once, innermost dimension first.
        steps: elements from one to the next, from the second dimension on.

    Raises:
        SPError: the driver refuses it, such as for an address that is no multiple of 16.
    """
    from cuda.bindings import driver as d

    kinds = d.CUtensorMapDataType
    error, made = d.cuTensorMapEncodeTiled(
        getattr(kinds, "CU_TENSOR_MAP_DATA_TYPE_" + ("FLOAT16" if fp16 else "BFLOAT16")),
        len(sizes), address,
        [d.cuuint64_t(size) for size in sizes], [d.cuuint64_t(2 * step) for step in steps],
        [d.cuuint32_t(size) for size in box], [d.cuuint32_t(1)] * len(sizes),
        d.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        d.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        d.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        d.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )  # fmt: skip
    if int(error):
        raise SPError(f"a tensor map of {sizes}, {steps} apart, was refused: {error!r}")
    return ctypes.string_at(int(made.getPtr()), 128)
