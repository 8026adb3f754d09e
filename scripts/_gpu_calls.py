"""What scripts/gpu_check.py calls: each kernel's operation, its named shapes, inputs for it and the bytes that it must move.

Inputs are multiples of a power of two and rates are powers of two, so that sums and products of a few of them are exact in
any order and with fused multiply-adds: everything but a square root, a quotient or a long sum must agree to the bit.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._arg_specs import Call
from pallas_kernels._rows import BLOCK, Rows
from pallas_kernels.apply_pass import Coefficients, Scalars, apply_pass
from pallas_kernels.apply_pass import arg_specs as apply_specs
from pallas_kernels.bits import arg_specs as bits_specs
from pallas_kernels.bits import pack_rows, unpack_rows
from pallas_kernels.compact import arg_specs as compact_specs
from pallas_kernels.compact import compact_rows, index_rows, mask_rows, scatter_rows
from pallas_kernels.moment_pass import arg_specs as moment_specs
from pallas_kernels.moment_pass import moment_pass, select_moment
from pallas_kernels.select import arg_specs as select_specs
from pallas_kernels.select import select_rows

# Memory is read and written in pieces of this size, whatever is asked of them.
SECTOR = 32
# ok, 1 / W, clip, eta, decay, then b1, 1 - b1, b2, 1 - b2, eps, 1 - b1^t, 1 / (1 - b2^t).
NUMBERS = (1.0, 0.5, 0.5, 2.0**-10, 2.0**-14, 0.5, 0.5, 0.5, 0.5, 2.0**-20, 0.5, 2.0)


@dataclasses.dataclass(frozen=True)
class Op:
    """One operation of pallas_kernels.

    Attributes:
      function: called with a call's arrays, its static settings, `implementation` and `interpret`.
      calls: name -> shapes and settings, from the operation's arg_specs.
      inputs: (call, key) -> arrays.
      moved: (call) -> bytes that a kernel must read and write.
      follows: (call) -> number of an array that is written in place -> number of the output that it becomes.
      inexact: numbers of the outputs that hold a square root, a quotient or a long sum.
      is_pass: one of the passes of a SCAPE step, which have a goal.
    """

    function: Callable[..., Any]
    calls: Mapping[str, Call]
    inputs: Callable[[Call, jax.Array], tuple[Any, ...]]
    moved: Callable[[Call], float]
    follows: Callable[[Call], dict[int, int]] = lambda call: {}
    inexact: tuple[int, ...] = ()
    is_pass: bool = False


def select_window(x: jax.Array, k: jax.Array, first_row: jax.Array, **options: Any) -> jax.Array:
    return select_rows(x, k, first_row=first_row, **options)


def apply_with(
    theta: Any,
    h: Any,
    g: Any,
    last: Any,
    words: Any,
    total: Any,
    numbers: Any,
    age: Any = None,
    **options: Any,
) -> tuple[Any, ...]:
    ok, scale, clip, eta, decay, *rule = numbers
    scalars = Scalars(ok, scale, clip, eta, decay, Coefficients(*rule))
    return apply_pass(theta, h, g, last, words, total, scalars=scalars, age=age, **options)


# b1 of the specs is that of training; see above.
def moment_with(*arrays: Any, b1: float, **options: Any) -> tuple[Any, ...]:
    return moment_pass(*arrays, b1=0.5, **options)


def select_moment_with(*arrays: Any, b1: float, **options: Any) -> jax.Array:
    return select_moment(*arrays, b1=0.5, **options)


def _follows_apply(call: Call) -> dict[int, int]:
    theta = {} if "update_dtype" in call.static else {0: 0}
    return theta | {1: 1, 3: 2} | ({7: 3} if len(call.arrays) > 7 else {})


# Inputs ------------------------------------------------------------------------------------------------------------


def rows_of(call: Call, size: int) -> Rows:
    block, k = call.static.get("block", BLOCK), call.static.get("k", 0)
    return Rows(size, block, k, call.static.get("k_last"))


def values(key: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    """Multiples of 2^-6 in +-2, so of 8 bits: exact in bfloat16, and many of equal size."""
    x = jax.random.randint(key, like.shape, -127, 128, jnp.int32)
    return (x.astype(jnp.float32) / 64).astype(like.dtype)


def some_special(key: jax.Array, x: jax.Array) -> jax.Array:
    """About one entry in 300 becomes an infinity, a NaN, a zero of either sign or a denormal."""
    pool = jnp.asarray([jnp.inf, -jnp.inf, jnp.nan, 0.0, -0.0, 1e-40, -1e-40], x.dtype)
    at = jax.random.randint(key, x.shape, 0, 300 * len(pool), jnp.int32)
    return jnp.where(at < len(pool), pool[jnp.minimum(at, len(pool) - 1)], x)


def mask_of(key: jax.Array, rows: Rows) -> jax.Array:
    """A packed mask with exactly k set bits in each row, and set pad bits behind the last."""
    x = jax.random.uniform(key, (rows.size,))
    words = select_rows(x, rows.k, k_last=rows.k_last, block=rows.block, implementation="xla")
    pad = jnp.uint32(0xFFFFFFFF << rows.size % 32 & 0xFFFFFFFF if rows.size % 32 else 0)
    return words.at[-1].set(words[-1] | pad)


def _keys(key: jax.Array) -> Any:
    return (jax.random.fold_in(key, i) for i in itertools.count())


def _bits_of(call: Call, key: jax.Array) -> tuple[Any, ...]:
    (like,) = call.arrays
    return (jax.random.bernoulli(key, 0.1, like.shape).astype(like.dtype),)


def _words(call: Call, key: jax.Array) -> tuple[Any, ...]:
    return (jax.random.bits(key, call.arrays[0].shape, jnp.uint32),)


def _of_select(call: Call, key: jax.Array) -> tuple[Any, ...]:
    one, two = jax.random.split(key)
    x = some_special(two, values(one, call.arrays[0]))
    return x, *(_window_number(call, a) for a in call.arrays[1:])


def _window_number(call: Call, like: jax.ShapeDtypeStruct) -> jax.Array:
    """A tenth of each row, or the first row."""
    return jnp.full(like.shape, max(1, call.static["block"] // 10) if like.shape else 0, like.dtype)


def _with_mask(call: Call, key: jax.Array) -> tuple[Any, ...]:
    """x (and a payload) of any numbers, and a mask of x."""
    x, *others, _ = call.arrays
    keys = _keys(key)
    filled = [some_special(next(keys), values(next(keys), a)) for a in (x, *others)]
    return *filled, mask_of(next(keys), rows_of(call, x.size))


def _mask_alone(call: Call, key: jax.Array) -> tuple[Any, ...]:
    return (mask_of(key, rows_of(call, call.static["size"])),)


def _columns(call: Call, key: jax.Array) -> tuple[Any, ...]:
    _, k = call.arrays[0].shape
    size, block = call.static["size"], call.static["block"]
    rows = Rows(size, block, k, min(k, Rows(size, block).last))
    return (index_rows(mask_of(key, rows), size, k, block=block, implementation="xla"),)


def _of_moment(call: Call, key: jax.Array) -> tuple[Any, ...]:
    h, g, _, end = call.arrays
    keys, rows = _keys(key), rows_of(call, h.size)
    some = Rows(h.size, rows.block, max(1, rows.block // 10))
    masks = [mask_of(next(keys), rows if rows.k else some)]
    masks += [mask_of(next(keys), rows) if rows.k else _window_number(call, end)]
    return values(next(keys), h), values(next(keys), g), *masks


def _of_apply(call: Call, key: jax.Array) -> tuple[Any, ...]:
    theta, h, g, _, _, total, _, *age = call.arrays
    keys, rows = _keys(key), rows_of(call, h.size)
    ages = [jax.random.randint(next(keys), a.shape, 0, 256, jnp.int32).astype(jnp.uint8) for a in age]
    buffers = [values(next(keys), a) for a in (theta, h, g)]
    masks = [mask_of(next(keys), rows) for _ in range(2)]
    return *buffers, *masks, values(next(keys), total), jnp.asarray(NUMBERS, jnp.float32), *ages


# Bytes -------------------------------------------------------------------------------------------------------------


def _size(*arrays: Any) -> int:
    return sum(a.size * a.dtype.itemsize for a in arrays)


def mask_bytes(rows: Rows) -> int:
    return 4 * rows.words


def kept_bytes(rows: Rows, itemsize: int) -> float:
    """Of the sectors that hold a kept entry, for masks without a pattern: their expected number."""
    return sector_bytes(rows.size, itemsize, rows.kept / rows.size if rows.size else 0.0)


def sector_bytes(size: int, itemsize: int, density: float) -> float:
    """Of the sectors that hold an entry, of those that are taken at random."""
    return (1 - (1 - density) ** (SECTOR // itemsize)) * size * itemsize


def _moved_pack(call: Call) -> float:
    (mask,) = call.arrays
    return _size(mask) + mask.size / 8


def _moved_unpack(call: Call) -> float:
    (words,) = call.arrays
    return _size(words) + words.size // words.shape[-1] * call.static["size"]


def _moved_select(call: Call) -> float:
    x, *window = call.arrays
    rows = rows_of(call, x.size)
    if not window:
        return _size(x) + mask_bytes(rows)
    entries = min(call.static["num_rows"] * rows.block, x.size)
    return entries * x.dtype.itemsize + entries / 8


def _moved_compact(call: Call) -> float:
    x = call.arrays[0]
    rows = rows_of(call, x.size)
    return mask_bytes(rows) + kept_bytes(rows, x.dtype.itemsize) + rows.kept * x.dtype.itemsize


def _moved_index(call: Call) -> float:
    rows = rows_of(call, call.static["size"])
    return mask_bytes(rows) + 2 * rows.count * rows.k


def _moved_mask(call: Call) -> float:
    return _size(call.arrays[0]) + mask_bytes(Rows(call.static["size"], call.static["block"]))


def _moved_moment(call: Call) -> float:
    """All of g for its squares, of h what is kept and was not last time; the payload and the rows' sums are written.

    `_of_moment` draws the two masks independently of each other.
    """
    h, g, *_ = call.arrays
    rows, squares = rows_of(call, h.size), call.static.get("squares", True)
    payload = rows.kept * jnp.dtype(call.static.get("dtype", "float32")).itemsize
    read = _size(g) if squares else kept_bytes(rows, g.dtype.itemsize)
    density = rows.kept / rows.size if rows.size else 0.0
    residual = sector_bytes(h.size, 4, density * (1 - density))
    return read + residual + 2 * mask_bytes(rows) + payload + 4 * rows.count * squares


def _moved_select_moment(call: Call) -> float:
    h, g, *_ = call.arrays
    entries = min(call.static["num_rows"] * call.static["block"], h.size)
    return entries * (4 + g.dtype.itemsize) + 2 * entries / 8


def _moved_apply(call: Call) -> float:
    """g, h, theta, the ages and two masks are read with the payload; h, theta (or the update), the ages, a mask written."""
    theta, h, g, last, words, total, _, *age = call.arrays
    out = call.static.get("update_dtype")
    written = _size(theta) if out is None else theta.size * jnp.dtype(out).itemsize
    return _size(theta, h, g, last, words, total, *age) + written + _size(h, last, *age)


OPS = {
    "pack_rows": Op(pack_rows, bits_specs.PACK_ROWS, _bits_of, _moved_pack),
    "unpack_rows": Op(unpack_rows, bits_specs.UNPACK_ROWS, _words, _moved_unpack),
    "select_rows": Op(select_rows, select_specs.SELECT_ROWS, _of_select, _moved_select, is_pass=True),
    "select_window": Op(select_window, select_specs.SELECT_WINDOW, _of_select, _moved_select),
    "compact_rows": Op(compact_rows, compact_specs.COMPACT_ROWS, _with_mask, _moved_compact),
    "scatter_rows": Op(
        scatter_rows, compact_specs.SCATTER_ROWS, _with_mask, _moved_compact, lambda call: {0: 0}
    ),
    "index_rows": Op(index_rows, compact_specs.INDEX_ROWS, _mask_alone, _moved_index),
    "mask_rows": Op(mask_rows, compact_specs.MASK_ROWS, _columns, _moved_mask),
    "moment_pass": Op(
        moment_with, moment_specs.MOMENT_PASS, _of_moment, _moved_moment, inexact=(1,), is_pass=True
    ),
    "select_moment": Op(
        select_moment_with, moment_specs.SELECT_MOMENT, _of_moment, _moved_select_moment, is_pass=True
    ),
    "apply_pass": Op(
        apply_with, apply_specs.APPLY_PASS, _of_apply, _moved_apply, _follows_apply, (0,), is_pass=True
    ),
}
