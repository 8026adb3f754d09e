"""What a SCAPE step does after its exchange, by one Triton kernel that reads and writes each buffer of a leaf once.

Source: arXiv 2607.01678, Algorithm 1, from ghat on; AdamS, arXiv 2505.16363. The twin of `pallas.py`; the equations are
those of reference.py and rule.py.
"""

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import _pallas, _triton
from pallas_kernels._rows import Rows
from pallas_kernels._triton_rows import keeps, load_words, popcount, ranks, tile, unpack_bits
from pallas_kernels.apply_pass.pallas import ENTRIES_A_THREAD, PART
from pallas_kernels.apply_pass.reference import MAX_AGE, Settings
from pallas_kernels.moment_pass.triton import semi_updated


@triton.jit
def adams(g, m_prev, g_in_v, rule_ptr, bias_correction: tl.constexpr):
    """(m_t, u_t), as `rule.adams`; rule_ptr points to its coefficients."""
    m = tl.load(rule_ptr) * m_prev + tl.load(rule_ptr + 1) * g
    m_hat, m_prev_hat = m, m_prev
    if bias_correction != "none":
        m_hat = m / tl.load(rule_ptr + 5)
    if bias_correction == "momentum":
        m_prev_hat = m_prev / tl.load(rule_ptr + 5)
    v = tl.load(rule_ptr + 2) * (m_prev_hat * m_prev_hat) + tl.load(rule_ptr + 3) * (g_in_v * g_in_v)
    if bias_correction == "both":
        v = v * tl.load(rule_ptr + 6)
    return m, m_hat / (tl.sqrt(v) + tl.load(rule_ptr + 4))


@triton.jit
def apply_pass(
    packed_ptr,
    g_ptr,
    words_ptr,
    total_ptr,
    theta_ptr,
    table_ptr,
    h_ptr,
    last_ptr,
    out_ptr,
    age_ptr,
    bias_correction: tl.constexpr,
    clip_all: tl.constexpr,
    finite: tl.constexpr,
    update: tl.constexpr,
    has_theta: tl.constexpr,
    has_age: tl.constexpr,
    max_age: tl.constexpr,
    first: tl.constexpr,
    size: tl.constexpr,
    count: tl.constexpr,
    k: tl.constexpr,
    k_last: tl.constexpr,
    block: tl.constexpr,
    part: tl.constexpr,
):
    row = tl.program_id(0) // (block // part)
    start = tl.program_id(0) % (block // part) * (part // 32)
    row_words: tl.constexpr = block // 32
    at = tile(row * block + start * 32, part // 32)
    inside = at < size

    word = row * row_words + start
    words = load_words(words_ptr, word, part // 32, size)
    last = load_words(last_ptr, word, part // 32, size)
    kept, had_m = unpack_bits(words), unpack_bits(last)
    h = tl.load(h_ptr + at, mask=inside, other=0.0)
    g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if has_theta:
        theta = tl.load((theta_ptr if update else out_ptr) + at, mask=inside, other=0.0)
        x = theta.to(tl.float32)

    rank = ranks(words)
    if part < block:
        whole = popcount(load_words(words_ptr, row * row_words, row_words, size))
        rank += tl.sum(tl.where(tl.arange(0, row_words) < start, whole, 0))
    kept &= rank < keeps(row, count, k, k_last)
    total = tl.load(total_ptr + first + row * k + rank, mask=kept, other=0.0).to(tl.float32)

    ok = tl.load(packed_ptr) > 0
    ghat = total * tl.load(packed_ptr + 1)
    clipped = tl.load(packed_ptr + 2) * ghat
    in_v = clipped
    if has_age:
        age = tl.load(age_ptr + at, mask=inside, other=0).to(tl.int32)
        in_v = clipped / tl.load(table_ptr + age)
        older = tl.where(kept, 0, tl.minimum(age + 1, max_age))
        tl.store(age_ptr + at, tl.where(ok, older, age).to(tl.uint8), mask=inside)
    m_prev = tl.where(had_m, h, 0.0)
    m, u = adams(clipped if clip_all else ghat, m_prev, in_v, packed_ptr + 5, bias_correction)
    off_mask = semi_updated(h, g, had_m, tl.load(packed_ptr + 5), tl.load(packed_ptr + 6), finite)
    new_h = tl.where(ok, tl.where(kept, m, off_mask), h)

    eta, decay = tl.load(packed_ptr + 3), tl.load(packed_ptr + 4)
    if update:
        change = tl.where(kept, u, 0.0)
        if has_theta:
            change = decay * x + change
        # -0.0 is the one number that leaves every parameter bit-equal when added.
        out = tl.where(ok, -eta * change, -0.0).to(out_ptr.dtype.element_ty)
    else:
        decayed = x - decay * x
        new = tl.where(kept, decayed + -eta * u, decayed)
        out = tl.where(ok, new.to(theta.dtype), theta)
    tl.store(out_ptr + at, out, mask=inside)
    tl.store(h_ptr + at, new_h, mask=inside)
    at = word + tl.arange(0, part // 32)
    tl.store(last_ptr + at, tl.where(ok, words, last), mask=at < (size + 31) // 32)


def update(
    packed: jax.Array,
    theta: jax.Array,
    h: jax.Array,
    g: jax.Array,
    last: jax.Array,
    words: jax.Array,
    total: jax.Array,
    *aging: jax.Array,
    rows: Rows,
    first: int,
    settings: Settings,
    dtype: jnp.dtype,
    after: int,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """As `pallas.update`."""
    ages, waits = aging[: len(aging) - after], aging[len(aging) - after :]
    part = min(rows.block, PART)
    constants: dict[str, Any] = {
        "bias_correction": settings.bias_correction,
        "clip_all": settings.clip_all,
        "finite": settings.finite,
        "update": settings.update,
        "has_theta": bool(theta.size),
        "has_age": bool(ages),
        "max_age": MAX_AGE,
        "first": first,
        "size": rows.size,
        "count": rows.count,
        "k": rows.k,
        "k_last": rows.keeps_last,
        "block": rows.block,
        "part": part,
    }
    outputs = [(rows.size, jnp.float32), (rows.words, jnp.uint32), (rows.size, dtype)]
    into = {0: h, 1: last} if settings.update else {0: h, 1: last, 2: theta}
    if ages:
        outputs, into = [*outputs, (rows.size, jnp.uint8)], into | {3: ages[0]}
    new_h, new_last, out, *new_age = _triton.call(
        apply_pass,
        "apply_pass",
        rows.count * (rows.block // part),
        [
            packed,
            g,
            words,
            total,
            theta if settings.update and theta.size else None,
            ages[1] if ages else None,
        ],
        outputs,
        constants=constants if ages else constants | {"age_ptr": None},
        into=into,
        after=waits,
        num_warps=_pallas.warps(part, ENTRIES_A_THREAD),
        registers=96,
        interpret=interpret,
    )
    return out, new_h, new_last, *new_age
