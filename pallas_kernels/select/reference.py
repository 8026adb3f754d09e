"""Exact top-k of |x| in each row in plain JAX, by a search for the threshold.

The bits of a non-negative float order like its value, so the k-th largest |x| of a row is found by narrowing an integer
interval of bit patterns; each step is one compare-and-count pass over the row, and nothing is sorted. The next trial is
where the logarithm of the count, taken as linear in |x|, would reach log k (regula falsi with Illinois weights): about
half the passes of plain halving, to which the search falls back. Entries that tie at the threshold are taken from the
lowest index up, by a second search over the index that runs only where there is a tie.
"""

import jax
import jax.numpy as jnp
from jax import lax

_LARGEST_FINITE = 0x7F7FFFFF
# Guided steps before the search halves the interval, which ends within 31 more.
_GUESSES = 24


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

    def start(fill, dtype):
        return _varying_like(jnp.full((num_rows,), fill, dtype), key)

    def as_float(bits):
        return lax.bitcast_convert_type(jnp.minimum(bits, _LARGEST_FINITE), jnp.float32)

    # In each row count(key >= low) = reached >= k > count(key >= high); reached == k or high == low + 1 ends it.
    def narrow(state):
        step, low, high, reached, excess, lack, was_enough = state
        guess = as_float(low) + (as_float(high) - as_float(low)) * (excess / (excess - lack))
        guess = lax.bitcast_convert_type(guess, jnp.int32)
        trial = jnp.where(step < _GUESSES, guess, low + (high - low) // 2)
        trial = jnp.clip(trial, low + 1, jnp.maximum(high - 1, low + 1))
        n = count(key >= trial[:, None])
        enough, open_ = n >= need, (reached != need) & (high - low > 1)
        log_ratio = jnp.log(jnp.maximum(n, 0.5).astype(jnp.float32) / jnp.maximum(need, 0.5))
        lack = jnp.where(enough, jnp.where(was_enough, lack / 2, lack), log_ratio)
        excess = jnp.where(enough, log_ratio, jnp.where(was_enough, excess, excess / 2))
        return (
            step + 1,
            jnp.where(open_ & enough, trial, low),
            jnp.where(open_ & ~enough, trial, high),
            jnp.where(open_ & enough, n, reached),
            excess,
            lack,
            enough,
        )

    candidates = count(key >= 0)
    need = jnp.minimum(need, candidates)
    high = jnp.max(key, axis=1, initial=-1) + 1
    ratio = jnp.log(jnp.maximum(candidates, 1).astype(jnp.float32) / jnp.maximum(need, 0.5))
    state = (
        _varying_like(jnp.int32(0), key),
        start(0, jnp.int32),
        high,
        # Nothing to search where nothing is wanted; such rows are settled below.
        jnp.where(need == 0, need, candidates),
        ratio.astype(jnp.float32),
        jnp.log(0.5 / jnp.maximum(need, 0.6)).astype(jnp.float32),
        start(False, bool),
    )
    _, low, _, reached, *_ = lax.while_loop(
        lambda s: jnp.any((s[3] != need) & (s[2] - s[1] > 1)), narrow, state
    )
    threshold = jnp.where(need == 0, jnp.iinfo(jnp.int32).max, low)

    # Rows with reached > k have a tie at the threshold: keep those of index <= last.
    above, tied = key > threshold[:, None], key == threshold[:, None]
    column = jnp.arange(width, dtype=jnp.int32)[None, :]
    index_bits = max(width - 1, 1).bit_length()

    def halve_index(state):
        bit, last = state
        # `last` grows as long as the ties below it are still fewer than what is needed.
        trial = last | (jnp.int32(1) << bit)
        n = count(above | (tied & (column < trial[:, None])))
        return bit - 1, jnp.where(n < need, trial, last)

    exact = jnp.all(reached == need)
    steps = jnp.where(exact, -1, index_bits - 1)
    _, last = lax.while_loop(lambda s: s[0] >= 0, halve_index, (steps, start(0, jnp.int32)))
    return above | (tied & ((column <= last[:, None]) | exact))
