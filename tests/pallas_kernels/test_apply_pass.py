"""The second half of a step against NumPy in float64, in every form that runs here; a skipped step bit for bit."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import apply_pass as op
from pallas_kernels._rows import Rows
from tests.helpers import assert_bit_equal, assert_close
from tests.pallas_kernels.reference_numpy import numpy_pack, numpy_scatter, numpy_unpack
from tests.pallas_kernels.test_rows import CUTS, B, cut_of, every_form, jitted, leaves, masks, wide
from tests.pallas_kernels.triton_on_cpu import both_kernels

NUMBERS = {
    "scale": 0.25,
    "clip": 0.5,
    "eta": 0.1,
    "decay": 0.01,
    "step": 3.0,
    "b1": 0.9,
    "b2": 0.95,
    "eps": 1e-8,
}
# What is static in a step; together every branch of the rule and every kind of buffer.
SETTINGS = {
    "parameters": {},
    "literal": {"bias_correction": "none", "clip_all": False},
    "momentum": {"bias_correction": "momentum", "staleness_power": 1.0},
    "update": {"update_dtype": "float32"},
    "bare update": {"update_dtype": "bfloat16", "theta": None, "bias_correction": "none"},
    "bfloat16": {"theta": jnp.bfloat16, "g": jnp.bfloat16, "staleness_power": 0.5},
}


def arrays_of(rows, seed, theta=jnp.float32, g=jnp.float32, staleness_power=0.0, **_):
    """theta, h, g, total and ages of one leaf; total starts at 5."""
    rng = np.random.default_rng(seed)
    draw = lambda n, dtype=np.float32: rng.standard_normal(n).astype(np.float32).astype(dtype)  # noqa: E731
    ages = np.array([0, 1, 7, 254, 255], np.uint8)[rng.integers(0, 5, rows.size)]
    return {
        "theta": None if theta is None else draw(rows.size, theta),
        "h": draw(rows.size),
        "g": draw(rows.size, g),
        "total": draw(5 + rows.kept + 3),
        "age": ages if staleness_power else None,
    }


def call(theta, h, g, last, words, total, age, ok, numbers, *, rows, static, **options):
    cut = cut_of(rows)
    rule = op.coefficients(numbers["step"], **{name: numbers[name] for name in ("b1", "b2", "eps")})
    first_four = {name: numbers[name] for name in ("scale", "clip", "eta", "decay")}
    scalars = op.Scalars(ok=ok, rule=rule, **first_four)
    settings = {name: x for name, x in static if name not in ("theta", "g")}
    k = cut.pop("k")
    return op.apply_pass(
        theta, h, g, last, words, total, k, scalars, first=5, age=age, **cut, **settings, **options
    )


def run(form, rows, static, arrays, last, words, ok):
    function = jitted(call, form, rows=rows, static=tuple(static.items()))
    numbers = {name: np.float32(x) for name, x in NUMBERS.items()}
    a = arrays
    return function(a["theta"], a["h"], a["g"], last, words, a["total"], a["age"], np.float32(ok), numbers)


def numpy_step(
    arrays, had_m, mask, rows, bias_correction="both", clip_all=True, staleness_power=0.0, **static
):
    """(parameters or update, h, age) in float64, from the paper's lines."""
    a, n = {k: None if x is None else x.astype(np.float64) for k, x in arrays.items()}, NUMBERS
    cut = (rows.block, rows.k, rows.keeps_last)
    there = a["total"][5 : 5 + rows.kept]
    kept = numpy_scatter(np.zeros(rows.size, bool), np.ones(rows.kept, bool), mask, *cut)
    ghat = numpy_scatter(np.zeros(rows.size), there, mask, *cut) * n["scale"]
    m_prev, e = np.where(had_m, a["h"], 0), np.where(had_m, 0, a["h"])
    clipped = n["clip"] * ghat
    in_v = clipped / (a["age"] + 1) ** staleness_power if staleness_power else clipped
    m = n["b1"] * m_prev + (1 - n["b1"]) * (clipped if clip_all else ghat)
    first, second = 1 - n["b1"] ** n["step"], 1 - n["b2"] ** n["step"]
    m_hat = m if bias_correction == "none" else m / first
    in_root = m_prev / first if bias_correction == "momentum" else m_prev
    v = n["b2"] * in_root**2 + (1 - n["b2"]) * in_v**2
    u = m_hat / (np.sqrt(v / second if bias_correction == "both" else v) + n["eps"])
    h = np.where(kept, m, n["b1"] * m_prev + (1 - n["b1"]) * a["g"] + e)
    age = None if a["age"] is None else np.where(kept, 0, np.minimum(a["age"] + 1, 255)).astype(np.uint8)
    theta = 0 if a["theta"] is None else a["theta"]
    if "update_dtype" in static:
        return -n["eta"] * (np.where(kept, u, 0) + n["decay"] * theta), h, age
    return theta - n["decay"] * theta - n["eta"] * np.where(kept, u, 0), h, age


def some_masks(rows, seed=0):
    """The last mask with any number of bits, this one with exactly k in each row."""
    rng = np.random.default_rng(seed)
    last, mask = rng.random(rows.size) < 0.4, np.zeros(rows.size, bool)
    for row in range(rows.count):
        part = mask[row * rows.block : (row + 1) * rows.block]
        keep = rows.keeps_last if row == rows.count - 1 else rows.k
        part[rng.permutation(part.size)[:keep]] = True
    return last, mask


def check(form, rows, static, had_m, mask, seed=0, words=None):
    arrays = arrays_of(rows, seed, **static)
    words = numpy_pack(mask) if words is None else words
    got = run(form, rows, static, arrays, numpy_pack(had_m), words, 1)
    out, h, age = numpy_step(arrays, had_m, mask, rows, **static)
    kind = "bf16" if got.out.dtype == jnp.bfloat16 else "f32"
    # Sums of a few float32 terms that may cancel.
    assert_close(got.out, out, kind, terms=16, dtype=got.out.dtype)
    assert_close(got.h, h, terms=16, dtype=jnp.float32)
    assert_bit_equal(np.asarray(got.last), numpy_pack(mask))
    if age is not None:
        assert_bit_equal(np.asarray(got.age), age)


@every_form
@pytest.mark.parametrize("name", SETTINGS)
def test_a_step(form, name):
    """Several rows with a short last one."""
    check(form, CUTS[4], SETTINGS[name], *some_masks(CUTS[4]))


@every_form
@pytest.mark.parametrize("rows", CUTS, ids=str)
def test_a_step_of_any_length(form, rows):
    check(form, rows, {}, *some_masks(rows))


@every_form
@settings(max_examples=12)
@given(data=st.data(), rows=st.sampled_from(CUTS[3:5]))
def test_any_masks(form, data, rows):
    """Rows with too many or too few bits, garbage in the pad bits: the first k take part, what is missing does not."""
    had_m, _ = data.draw(masks(rows))
    mask, words = data.draw(masks(rows))
    check(form, rows, {}, had_m, mask, words=words)


@every_form
@pytest.mark.parametrize("name", SETTINGS)
@given(data=st.data())
@settings(max_examples=3)
def test_a_skipped_step_changes_no_bit(form, name, data):
    """Whatever came from the other workers: NaN, infinities, denormals in every array."""
    rows, static = CUTS[4], SETTINGS[name]
    arrays = arrays_of(rows, 0, **static)
    for key in ("theta", "h", "g", "total"):
        if arrays[key] is not None:
            x = data.draw(leaves(arrays[key].size, arrays[key].dtype))
            # XLA on CPU computes with bfloat16 in float32, where a signalling NaN becomes a quiet one.
            if x.dtype == jnp.bfloat16:
                x = np.where((x.view(np.uint16) & 0x7FFF) > 0x7F80, np.ones_like(x), x)
            arrays[key] = x
    had_m, mask = some_masks(rows)
    got = run(form, rows, static, arrays, numpy_pack(had_m), numpy_pack(mask), 0)
    if "update_dtype" in static:
        assert_bit_equal(np.asarray(got.out), np.full(rows.size, -0.0, got.out.dtype))
    else:
        assert_bit_equal(np.asarray(got.out), arrays["theta"])
    assert_bit_equal(np.asarray(got.h), arrays["h"])
    assert_bit_equal(np.asarray(got.last), numpy_pack(had_m))
    if arrays["age"] is not None:
        assert_bit_equal(np.asarray(got.age), arrays["age"])


@every_form
def test_the_default_block(form):
    """k odd, whole rows of 4096 and a short one."""
    rows = Rows(2 * 4096 + 100, 4096, 705, 17)
    had_m, mask = some_masks(rows)
    assert numpy_unpack(numpy_pack(mask), rows.size).sum() == 2 * 705 + 17
    check(form, rows, {}, had_m, mask)


@both_kernels("apply_pass", "update")
def test_the_kernel_stays_inside_its_buffers(kernel):
    """Behind every buffer stands what must not change, or must have no influence."""
    rows = CUTS[4]
    had_m, mask = some_masks(rows)
    arrays = arrays_of(rows, 0, staleness_power=1.0)
    rule = op.coefficients(np.float32(3), b1=0.9, b2=0.95, eps=1e-8)
    packed = op.reference.pack_scalars(op.Scalars(1, 0.25, 0.5, 0.1, 0.01, rule))
    kernel = functools.partial(
        kernel,
        rows=rows,
        first=5,
        settings=op.reference.Settings(),
        dtype=jnp.dtype(jnp.float32),
        after=0,
        interpret=True,
    )
    table = np.arange(1, 257, dtype=np.float32)
    masks = [numpy_pack(m) for m in (had_m, mask)]
    names = ("theta", "h", "g")
    want = kernel(packed, *(arrays[n] for n in names), *masks, arrays["total"], arrays["age"], table)
    behind = [wide(arrays[n], x) for n, x in zip(names, (7, 8, np.nan), strict=True)]
    ones = 0xFFFFFFFF
    got = kernel(
        packed, *behind, *(wide(m, ones) for m in masks), arrays["total"], wide(arrays["age"], 9), table
    )
    for one, other, rest in zip(got, want, (7, 8, ones, 9), strict=True):
        assert_bit_equal(np.asarray(one), wide(np.asarray(other), rest))


def test_nothing_kept():
    """No kernel for it, and no error: only the residual and the decay go on."""
    rows = Rows(70, B, 0)
    check("xla", rows, {}, np.arange(70) % 3 == 0, np.zeros(70, bool))


def test_no_entries():
    leaf, mask, rule = (
        np.zeros((0, 10), np.float32),
        np.zeros(0, np.uint32),
        op.coefficients(1, b1=0, b2=0, eps=0),
    )
    got = op.apply_pass(leaf, leaf, leaf, mask, mask, np.zeros(0), 3, op.Scalars(1, 1, 1, 1, 0, rule))
    assert (got.out.shape, got.h.shape, got.last.shape, got.age) == ((0, 10), (0, 10), (0,), None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"theta": np.zeros(69, np.float32)}, "theta must be floating-point with 70 entries"),
        ({"theta": None}, "give update_dtype"),
        ({"total": np.zeros(9, np.float32)}, r"total must have at least first \+ 10 entries"),
        ({"staleness_power": 1.0}, "needs the ages"),
        ({"age": np.zeros(70, np.int32)}, "age must be uint8 with 70 entries"),
        ({"bias_correction": "all"}, "bias_correction must be one of"),
    ],
)
def test_arguments_are_checked(change, message):
    leaf, mask = np.zeros(70, np.float32), np.zeros(3, np.uint32)
    rule = op.coefficients(1, b1=0.9, b2=0.95, eps=1e-8)
    arguments = {
        "theta": leaf,
        "h": leaf,
        "g": leaf,
        "last": mask,
        "words": mask,
        "total": np.zeros(10, np.float32),
        "k": 5,
        "scalars": op.Scalars(1, 1, 1, 1, 0, rule),
        "block": B,
    } | change
    with pytest.raises(ValueError, match=message):
        op.apply_pass(**arguments)
