"""Exact top-k of |x| in each row in plain JAX, by bisection on bit patterns.

The bits of a non-negative float order like its value, so the k-th largest |x| of a row is found by 31 halvings of an
integer interval, each one compare-and-count pass, and no sort. Entries that tie at the threshold are taken from the
lowest index up, by a second bisection on the index that runs only where there is a tie.
"""

import jax
import jax.numpy as jnp
from jax import lax


def _varying_like(x: jax.Array, like: jax.Array) -> jax.Array:
    # Under shard_map's check_vma a loop carry must start with the type it ends with.
    missing = tuple(jax.typeof(like).manual_axis_type.varying - jax.typeof(x).manual_axis_type.varying)
    return lax.pcast(x, missing, to="varying") if missing else x


def select(x: jax.Array, k: jax.Array | int, valid: jax.Array | None = None) -> jax.Array:
    """Mask of the k largest |x| of each row; ties go to the lower index, NaN and invalid entries are never taken.

    Args:
      x: float32 (R, B).
      k: int32 () or (R,), entries kept in each row, 0 <= k <= B; may be traced.
      valid: bool (R, B) or None, entries that may be taken.

    Returns:
      bool (R, B) with exactly min(k, number of candidates) set in each row.
    """
    num_rows, width = x.shape
    key = lax.bitcast_convert_type(jnp.abs(x.astype(jnp.float32)), jnp.int32)
    key = jnp.where(key > 0x7F800000, -1, key)
    if valid is not None:
        key = jnp.where(valid, key, -1)
    k = jnp.broadcast_to(jnp.asarray(k, jnp.int32), (num_rows,))
    # Counting in float32 is exact up to 2^24 and, on CPU, the only form that vectorises.
    count_dtype = jnp.float32 if width <= 1 << 24 else jnp.int32
    need = k.astype(count_dtype)

    def count(chosen):
        return jnp.sum(chosen.astype(count_dtype), axis=1)

    def unfinished(state):
        bit, _, _, reached = state
        return (bit >= 0) & jnp.any(reached != need)

    def halve_value(state):
        bit, threshold, reached, _ = state
        trial = threshold | (jnp.int32(1) << bit)
        n = count(key >= trial[:, None])
        enough = n >= need
        reached = jnp.where(enough, n, reached)
        return bit - 1, jnp.where(enough, trial, threshold), reached, reached

    def start(value, dtype):
        return _varying_like(jnp.full((num_rows,), value, dtype), key)

    # The invariant: count(key >= threshold) = reached >= k, unless a row has fewer than k candidates.
    candidates = count(key >= 0)
    need = jnp.minimum(need, candidates)
    state = (_varying_like(jnp.int32(30), key), start(0, jnp.int32), candidates, candidates)
    _, threshold, reached, _ = lax.while_loop(unfinished, halve_value, state)
    threshold = jnp.where(need == 0, jnp.iinfo(jnp.int32).max, threshold)
    reached = jnp.where(need == 0, need, reached)

    # Rows with reached > k have a tie at the threshold: keep those of index <= last.
    above, tied = key > threshold[:, None], key == threshold[:, None]
    column = jnp.arange(width, dtype=jnp.int32)[None, :]
    bits = max(width - 1, 1).bit_length()

    def halve_index(state):
        bit, last = state
        # `last` grows as long as the ties below it are still fewer than what is needed.
        trial = last | (jnp.int32(1) << bit)
        n = count(above | (tied & (column < trial[:, None])))
        return bit - 1, jnp.where(n < need, trial, last)

    exact = jnp.all(reached == need)
    steps = jnp.where(exact, -1, bits - 1)
    _, last = lax.while_loop(lambda s: s[0] >= 0, halve_index, (steps, start(0, jnp.int32)))
    return above | (tied & ((column <= last[:, None]) | exact))
