"""What the Pallas kernels share: the call, and the entries, bits and ranks of one row.

One program holds one row in registers. Buffers come in whole and flat, and every load and store says in its mask which
lanes are inside, because Pallas on Triton checks no bounds. A lane that stores nothing points at no lane's entry that
does: the interpreter writes the old value back there.
"""

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels._rows import Rows


def call(
    kernel: Callable[..., None],
    name: str,
    programs: int,
    operands: Sequence[jax.Array],
    outputs: Sequence[tuple[int, jnp.dtype]],
    *,
    into: Mapping[int, jax.Array] | None = None,
    num_warps: int,
    interpret: bool = False,
) -> list[jax.Array]:
    """Runs kernel(*operand refs, *output refs) in `programs` programs, by Pallas' Triton lowering.

    Args:
      kernel: reads and writes whole, flat buffers; `pl.program_id(0)` is its number.
      name: of the kernel, as it stands in the compiled program.
      programs: how many, at least one.
      operands: arrays of any shape, given to the kernel flat.
      outputs: (entries, dtype) of each output. What no program writes is undefined.
      into: output number -> an array that it replaces, of at least as many entries: in place where XLA need not keep
        the old one, and what no program writes stays. The kernel gets no reference to the old one.
      num_warps: of each program.
      interpret: run by Pallas' interpreter, on any device.

    Returns:
      The outputs, flat; one of `into` with that array's entries.
    """
    into = into or {}
    arrays = _equally_varying([jnp.ravel(x) for x in (*operands, *into.values())])
    shapes = [into[i].size if i in into else size for i, (size, _) in enumerate(outputs)]
    kind = jax.typeof(arrays[0]).manual_axis_type
    out_shape = [
        jax.ShapeDtypeStruct((size,), dtype, manual_axis_type=kind)
        for size, (_, dtype) in zip(shapes, outputs, strict=True)
    ]

    def body(*refs):
        kernel(*refs[: len(operands)], *refs[len(arrays) :])

    return pl.pallas_call(
        body,
        grid=(programs,),
        out_shape=out_shape,
        input_output_aliases={len(operands) + i: out for i, out in enumerate(into)},
        name=name,
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
    )(*arrays)


def warps(block: int, entries_a_thread: int) -> int:
    """Warps of a program that holds a block, so many entries in each thread's registers."""
    return max(block // (32 * entries_a_thread), 1)


def _equally_varying(arrays: list[jax.Array]) -> list[jax.Array]:
    """Under shard_map's check_vma: all as varying as the outputs, which depend on all of them."""
    axes = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in arrays))

    def cast(x: jax.Array) -> jax.Array:
        missing = tuple(axes - jax.typeof(x).manual_axis_type.varying)
        return lax.pcast(x, missing, to="varying") if missing else x

    return [cast(x) for x in arrays]


def entries(row: jax.Array, rows: Rows) -> tuple[jax.Array, jax.Array]:
    """int32 (B,) flat positions of a row's entries, bool (B,) which of them are inside the leaf."""
    at = row * rows.block + lax.iota(jnp.int32, rows.block)
    return at, at < rows.size


def tile(row: jax.Array, rows: Rows, start: jax.Array | int = 0, words: int | None = None) -> jax.Array:
    """int32 (B / 32, 32) flat positions of a row's entries, a word's in a line; or of `words` words from `start` on."""
    shape = (rows.row_words if words is None else words, 32)
    inside = lax.broadcasted_iota(jnp.int32, shape, 0) * 32 + lax.broadcasted_iota(jnp.int32, shape, 1)
    return row * rows.block + start * 32 + inside


def load_words(
    words_ref: jax.Ref, row: jax.Array, rows: Rows, start: jax.Array | int = 0, words: int | None = None
) -> jax.Array:
    """uint32 (B / 32,), a row's part of a packed mask, zero behind the last entry whatever the pad bits hold.

    Or `words` words from the row's word `start` on.
    """
    count = rows.row_words if words is None else words
    word = row * rows.row_words + start + lax.iota(jnp.int32, count)
    loaded = plt.load(words_ref.at[word], mask=word < rows.words, other=jnp.uint32(0))
    if rows.size % 32:
        last = jnp.uint32((1 << rows.size % 32) - 1)
        loaded = loaded & jnp.where(word == rows.words - 1, last, jnp.uint32(0xFFFFFFFF))
    return loaded


def _lanes(num_words: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.uint32, (num_words, 32), 1)


def unpack_bits(words: jax.Array) -> jax.Array:
    """uint32 (n,) -> bool (n, 32), lowest bit first."""
    return (lax.shift_right_logical(words[:, None], _lanes(words.size)) & 1) > 0


def pack_bits(bits: jax.Array) -> jax.Array:
    """bool (n, 32) -> uint32 (n,), lowest bit first."""
    # The bits are disjoint: their sum is their "or", which this backend cannot reduce by.
    return jnp.sum(lax.shift_left(bits.astype(jnp.uint32), _lanes(bits.shape[0])), axis=1, dtype=jnp.uint32)


def popcount(words: jax.Array) -> jax.Array:
    """int32, set bits of each word, by sums of ever wider fields: Triton does not compile lax.population_count."""
    halves = lambda x, by, mask: (x & mask) + (lax.shift_right_logical(x, jnp.uint32(by)) & mask)  # noqa: E731
    fields = halves(words, 1, jnp.uint32(0x55555555))
    fields = halves(fields, 2, jnp.uint32(0x33333333))
    fields = halves(fields, 4, jnp.uint32(0x0F0F0F0F))
    return lax.shift_right_logical(fields * jnp.uint32(0x01010101), jnp.uint32(24)).astype(jnp.int32)


def ranks(
    words: jax.Array, row: jax.Array, rows: Rows, before: jax.Array | int = 0
) -> tuple[jax.Array, jax.Array]:
    """The place of each kept entry of a row in the payload.

    A prefix sum over the row's words and popcounts inside a word: a sum over the entries themselves costs 30 times the
    shuffles, and Triton computes it anew for each layout that uses it.

    Args:
      words: uint32 (B / 32,), from `load_words`; or fewer.
      row: number of the row.
      rows: how the leaf is cut.
      before: set bits of the row before `words`.

    Returns:
      int32 (B / 32, 32) row * k + number of set bits before; `rows.kept`, behind the payload, where nothing is kept.
      bool (B / 32, 32), the first k set bits of the row (k_last in the last row).
    """
    count = popcount(words)
    below = lax.shift_left(jnp.uint32(1), _lanes(words.size)) - jnp.uint32(1)
    rank = (jnp.cumsum(count) - count + before)[:, None] + popcount(words[:, None] & below)
    kept = unpack_bits(words) & (rank < keeps(row, rows))
    return jnp.where(kept, row * rows.k + rank, rows.kept), kept


def fill_rest(
    out_ref: jax.Ref, words: jax.Array, row: jax.Array, rows: Rows, value: int, first: int = 0
) -> None:
    """Writes `value` behind the last kept entry of a row that has fewer set bits than it keeps; `first`: of the list."""
    count = jnp.sum(popcount(words))
    slot = lax.iota(jnp.int32, pl.next_power_of_2(rows.k))
    rest = (slot >= count) & (slot < keeps(row, rows))
    at = jnp.where(rest, row * rows.k + slot, rows.kept)
    plt.store(out_ref.at[first + at], jnp.full(slot.shape, value, out_ref.dtype), mask=rest)


def keeps(row: jax.Array, rows: Rows) -> jax.Array:
    """int32 (): entries that this row keeps, none behind the last row."""
    # Typed constants: with Python's own, the condition of select's loop fails to lower, an i1 against an i32.
    last = jnp.where(row == rows.count - 1, jnp.int32(rows.keeps_last), jnp.int32(0))
    return jnp.where(row < rows.count - 1, jnp.int32(rows.k), last)
