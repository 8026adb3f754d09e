"""What a SCAPE step does after its exchange, by one Pallas kernel that reads and writes each buffer of a leaf once.

Source: arXiv 2607.01678, Algorithm 1, from ghat on; the equations stand in reference.py and rule.py.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import _pallas
from pallas_kernels._rows import Rows
from pallas_kernels.apply_pass.reference import NUM_SCALARS, Settings, new_entries, older, scalars_of

ENTRIES_A_THREAD = 8
# Entries of a program. Whole rows would leave room for one program on a multiprocessor, which then loads, computes and
# stores in turn.
PART = 1024


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
    """The step of one leaf once the sum over workers is known. In place: h, the last mask, theta, age.

    Args:
      packed: float32 (12,), see `Scalars`.
      theta: float32 or bfloat16 (size,), or (0,) where an update without decay is asked for.
      h: float32 (size,).
      g: float32 or bfloat16 (size,).
      last: uint32 (words,), where h holds m.
      words: uint32 (words,), this step's mask.
      total: float32 or bfloat16 (>= first + rows.kept,), sum over workers of the payload.
      *aging: uint8 (size,), ages, and float32 (256,), tau^p for each age; or nothing. Then `after` arrays that are not
        read: the kernel runs after they are computed.
      rows: how the leaf is cut and what is kept.
      first: place in `total` of the leaf's first entry.
      settings: what else is static.
      dtype: of the update; of theta where that is written.
      after: see `aging`.
      interpret: as in `_pallas.call`.

    Returns:
      parameters or update, dtype (size,); h; the mask of this step (the last one's where it is skipped); age, if given.
    """
    ages, table, waits = aging[:1], aging[1:2], aging[2:]
    if after == len(aging):
        ages, table, waits = (), (), aging
    reads = [packed, g, words, total, *table, *waits]
    in_place = [h, last, *ages]
    outputs = [(rows.size, jnp.float32), (rows.words, jnp.uint32), *[(rows.size, jnp.uint8)] * len(ages)]
    if settings.update:
        reads, outputs = [*reads, *([theta] if theta.size else [])], [*outputs, (rows.size, dtype)]
    else:
        in_place, outputs = [*in_place, theta], [*outputs, (rows.size, dtype)]

    part_words = min(rows.block, PART) // 32
    parts = rows.row_words // part_words

    def kernel(packed_ref, g_ref, words_ref, total_ref, *refs):
        refs = list(refs)
        table_refs, refs = refs[: len(table)], refs[len(table) + after :]
        theta_ref = refs.pop(0) if settings.update and theta.size else None
        h_ref, last_ref, *age_ref, out_ref = refs
        if not settings.update:
            theta_ref = out_ref
        row = lax.div(pl.program_id(0), jnp.int32(parts))
        start = (pl.program_id(0) - row * parts) * part_words
        s = scalars_of([packed_ref[i] for i in range(NUM_SCALARS)])
        at = _pallas.tile(row, rows, start, part_words)
        inside = at < rows.size

        def load(ref):
            return plt.load(ref.at[at], mask=inside, other=jnp.zeros((), ref.dtype))

        words, last = (_pallas.load_words(ref, row, rows, start, part_words) for ref in (words_ref, last_ref))
        count = _pallas.popcount(_pallas.load_words(words_ref, row, rows))
        before = jnp.sum(jnp.where(lax.iota(jnp.int32, rows.row_words) < start, count, 0))
        old_h, g = load(h_ref), load(g_ref).astype(jnp.float32)
        x = None if theta_ref is None else load(theta_ref)
        place, kept = _pallas.ranks(words, row, rows, before)
        there = plt.load(total_ref.at[first + place], mask=kept, other=jnp.zeros((), total_ref.dtype))
        tau_power = None
        for ref, power_ref in zip(age_ref, table_refs, strict=True):
            age = load(ref).astype(jnp.int32)
            tau_power = plt.load(power_ref.at[age])
            plt.store(ref.at[at], older(age, kept, s.ok).astype(jnp.uint8), mask=inside)
        had_m = _pallas.unpack_bits(last)
        out, new_h = new_entries(
            x, old_h, g, had_m, kept, there.astype(jnp.float32), tau_power, s, settings, out_ref.dtype
        )
        plt.store(out_ref.at[at], out, mask=inside)
        plt.store(h_ref.at[at], new_h, mask=inside)
        word = row * rows.row_words + start + lax.iota(jnp.int32, part_words)
        plt.store(last_ref.at[word], jnp.where(s.ok, words, last), mask=word < rows.words)

    new_h, new_last, *new_age_and_out = _pallas.call(
        kernel,
        "apply_pass",
        rows.count * parts,
        reads,
        outputs,
        into=dict(enumerate(in_place)),
        num_warps=_pallas.warps(part_words * 32, ENTRIES_A_THREAD),
        interpret=interpret,
    )
    *new_age, out = new_age_and_out
    return out, new_h, new_last, *new_age
