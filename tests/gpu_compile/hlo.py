"""What an optimized HLO text says about its entry computation: the operations, and the bytes that each reads and writes."""

import math
import re
from typing import NamedTuple

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
_SHAPE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_LINE = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\(([^)]*)\)(.*)")
_NAMES_ONLY = ("parameter", "constant", "bitcast", "get-tuple-element", "tuple")
_KERNEL = re.compile(r'op_name="[^"]*?/(\w+)/(?:pallas_call|triton_kernel_call)"')
# Of Pallas, then of jax-triton.
KERNEL_CALLS = ("__gpu$xla.gpu.triton", "triton_kernel_call", "triton_kernel_call_ffi")


class Operation(NamedTuple):
    """One instruction: its opcode, for a kernel of ours the kernel's name, and the bytes of its operands and results."""

    name: str
    bytes: int


def shape_bytes(types: str) -> int:
    """Bytes of all arrays named in a type, "(f32[4,320]{1,0}, s32[])" -> 5124."""
    return sum(
        _BYTES[kind] * math.prod(int(n) for n in dims.split(",") if n)
        for kind, dims in _SHAPE.findall(types)
        if kind in _BYTES
    )


def entry_operations(text: str) -> list[Operation]:
    """The instructions of the entry computation that do something, in the order they are scheduled."""
    entry = text[text.index("\nENTRY") :]
    types, found = {}, []
    for line in entry.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        name, result, opcode, operands, rest = match.groups()
        types[name] = result
        if opcode in _NAMES_ONLY:
            continue
        read = sum(
            shape_bytes(types.get(text.split(" ")[-1].lstrip("%"), "")) for text in operands.split(", ")
        )
        ours = any(f'custom_call_target="{target}"' in rest for target in KERNEL_CALLS)
        kernel = _KERNEL.search(rest) if ours else None
        found.append(Operation(kernel[1] if kernel else opcode, shape_bytes(result) + read))
    return found
