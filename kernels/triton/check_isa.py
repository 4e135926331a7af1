"""What the ahead-of-time check reads in machine code: PTX, or AMD's assembly."""

from __future__ import annotations

import re
from collections import Counter

_MATRIX = re.compile(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma|v_s?mfmac?_\w+?|v_wmma_\w+?)(?:_e64)?(?![\w])")
# A product of 8-bit operands in triton's own code, and the matrix instructions that compute it natively.
_NARROW_PRODUCT = re.compile(r"tt\.dot(?:_scaled)? [^\n]*?: tensor<[0-9x]+x(f8|i8)")
_NATIVE = {
    "f8": re.compile(r"mma\S*\.e[45]m[32]|kind::\w*f8|v_s?mfmac?_\w*(?:fp8|bf8|f8f6f4)|v_wmma_\w*(?:fp8|bf8)"),
    "i8": re.compile(r"mma\S*\.s8|kind::i8|v_s?mfmac?_\w*i8|v_wmma_\w*iu8"),
}
_NAMES = {"f8": "fp8", "i8": "int8"}
_PTX_LOAD = re.compile(r"\bld\.global(?:\.(?!v[248])[\w:]+)*?(?:\.v([248]))?\.[bufs](8|16|32|64|128)\b")
_PTX_COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\S* [^\n]*?, 0x([0-9a-f]+)")
_GCN_LOAD = re.compile(r"\b(?:global|buffer|flat)_load_(\w+)")
_GCN_BYTES = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "b128": 16, "b96": 12, "b64": 8, "b32": 4}


def matrix_instructions(text: str) -> list[str]:
    """Names of the matrix instructions, sorted."""
    return sorted(set(_MATRIX.findall(text)))


def emulated_products(ttir: str, text: str) -> list[str]:
    """``fp8``, ``int8``: products that the kernel asks for and the machine code has no matrix instruction for."""
    wanted = sorted(set(_NARROW_PRODUCT.findall(ttir)))
    return [_NAMES[kind] for kind in wanted if not _NATIVE[kind].search(text)]


def global_loads(text: str) -> str:
    """``8x16 2x4``: so many load instructions of so many bytes per lane, widest first."""
    sizes = [int(vector or 1) * int(bits) // 8 for vector, bits in _PTX_LOAD.findall(text)]
    sizes += [int(size, 16) for size in _PTX_COPY.findall(text)]
    sizes += [_gcn_bytes(name) for name in _GCN_LOAD.findall(text)]
    return " ".join(f"{count}x{size}" for size, count in sorted(Counter(sizes).items(), reverse=True))


def _gcn_bytes(name: str) -> int:
    """Of ``dwordx4``, ``lds_dword``, ``d16_b16``, ``ushort`` or ``u8``: what is no dword is 2 bytes or 1."""
    name = name.removeprefix("lds_")
    if name in _GCN_BYTES:
        return _GCN_BYTES[name]
    return 1 if "byte" in name or name.endswith(("u8", "i8")) else 2
