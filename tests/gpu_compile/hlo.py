"""What an optimized HLO text says about its entry computation: the operations, and the bytes that each reads and writes.

Of an operand that a fusion only slices the slices count, of a buffer that it updates in place the update, as XLA's own
cost analysis has it. A kernel's operands count whole: what it really touches is known only to who wrote it.
"""

import math
import re
from typing import NamedTuple

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
_SHAPE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_LINE = re.compile(r"\s*(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\(([^)]*)\)(.*)")
_HEAD = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_NAMES_ONLY = ("parameter", "constant", "bitcast", "get-tuple-element", "tuple")
_KERNEL = re.compile(r'op_name="[^"]*?/(\w+)/(?:pallas_call|triton_kernel_call)"')
# Of Pallas, then of jax-triton.
KERNEL_CALLS = ("__gpu$xla.gpu.triton", "triton_kernel_call", "triton_kernel_call_ffi")


class _Line(NamedTuple):
    root: bool
    name: str
    result: str
    opcode: str
    operands: list[str]
    rest: str


class Operation(NamedTuple):
    """One instruction that does something.

    Attributes:
      name: its opcode; for a kernel of ours the kernel's name, for another custom call its target.
      bytes: read and written.
      operands: types of the operands, "f32[4,320]{1,0}".
      result: type of the result.
      source: op_name, the path of JAX functions that it comes from.
      label: its own name in the text.
      uses: names of the operands.
    """

    name: str
    bytes: int
    operands: list[str]
    result: str
    source: str
    label: str
    uses: list[str]


def shape_bytes(types: str) -> int:
    """Bytes of all arrays named in a type, "(f32[4,320]{1,0}, s32[])" -> 5124."""
    return sum(
        _BYTES[kind] * math.prod(int(n) for n in dims.split(",") if n)
        for kind, dims in _SHAPE.findall(types)
        if kind in _BYTES
    )


def _computations(text: str) -> dict[str, list[_Line]]:
    found: dict[str, list[_Line]] = {}
    lines: list[_Line] = []
    for line in text.splitlines():
        if head := _HEAD.match(line):
            lines = found.setdefault("ENTRY" if line.startswith("ENTRY") else head[1], [])
        elif match := _LINE.match(line):
            root, name, result, opcode, operands, rest = match.groups()
            names = [part.split(" ")[-1].lstrip("%") for part in operands.split(", ") if part]
            names = [re.sub(r"/\*.*?\*/", "", part).lstrip("%") for part in names]
            lines.append(_Line(bool(root), name, result, opcode, names, rest))
    return found


def _fusion_bytes(lines: list[_Line]) -> int:
    """Read and written by a fused computation."""
    by_name = {line.name: line for line in lines}

    def origin(name: str) -> str:
        line = by_name.get(name)
        return origin(line.operands[0]) if line is not None and line.opcode == "bitcast" else name

    users: dict[str, list[tuple[_Line, int]]] = {}
    for line in lines:
        if line.opcode != "bitcast":
            for place, operand in enumerate(line.operands):
                users.setdefault(origin(operand), []).append((line, place))
    total = 0
    for line in lines:
        if line.opcode == "parameter":
            parts = [_read_part(user, place, line) for user, place in users.get(line.name, [])]
            total += min(sum(parts), shape_bytes(line.result))
    (root,) = [line for line in lines if line.root]
    results = (
        [by_name[origin(x)] for x in root.operands]
        if root.opcode == "tuple"
        else [by_name[origin(root.name)]]
    )
    for line in results:
        written = by_name[origin(line.operands[1])] if line.opcode == "dynamic-update-slice" else line
        total += shape_bytes(written.result)
    return total


def _read_part(user: _Line, place: int, parameter: _Line) -> int:
    if user.opcode in ("slice", "dynamic-slice", "gather") and place == 0:
        return shape_bytes(user.result)
    if user.opcode == "dynamic-update-slice" and place == 0:
        return 0
    return shape_bytes(parameter.result)


def entry_operations(text: str) -> list[Operation]:
    """The instructions of the entry computation that do something, in the order they are scheduled."""
    computations = _computations(text)
    types, found = {}, []
    for line in computations["ENTRY"]:
        types[line.name] = line.result
        if line.opcode in _NAMES_ONLY:
            continue
        target = re.search(r'custom_call_target="([^"]+)"', line.rest)
        ours = target is not None and target[1] in KERNEL_CALLS
        kernel = _KERNEL.search(line.rest) if ours else None
        name = kernel[1] if kernel else target[1] if target and not ours else line.opcode
        operands = [types.get(x, "") for x in line.operands]
        moved = shape_bytes(line.result) + sum(map(shape_bytes, operands))
        if line.opcode == "fusion" and (called := re.search(r"calls=%?([\w.\-]+)", line.rest)):
            moved = _fusion_bytes(computations[called[1]])
        source = re.search(r'op_name="([^"]*)"', line.rest)
        found.append(
            Operation(
                name, moved, operands, line.result, source[1] if source else "", line.name, line.operands
            )
        )
    return found
