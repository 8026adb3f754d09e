"""Which form runs: decided where the program is lowered, so a machine without a GPU can see what a GPU would get."""

import functools
import logging
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels import _dispatch, _triton, bits, compact, select
from pallas_kernels.apply_pass.arg_specs import APPLY_PASS
from pallas_kernels.bits.arg_specs import PACK_ROWS, UNPACK_ROWS
from pallas_kernels.compact.arg_specs import COMPACT_ROWS, INDEX_ROWS, MASK_ROWS, SCATTER_ROWS
from pallas_kernels.moment_pass import moment_pass, select_moment
from pallas_kernels.moment_pass.arg_specs import MOMENT_PASS, SELECT_MOMENT
from pallas_kernels.select.arg_specs import SELECT_ROWS
from tests.gpu_compile import deviceless
from tests.gpu_compile.compile_kernels import apply_with
from tests.helpers import make_mesh
from tests.pallas_kernels.triton_on_cpu import needs_triton

OPERATIONS = {
    "pack_rows": (bits.pack_rows, PACK_ROWS),
    "unpack_rows": (bits.unpack_rows, UNPACK_ROWS),
    "select_rows": (select.select_rows, SELECT_ROWS),
    "compact_rows": (compact.compact_rows, COMPACT_ROWS),
    "scatter_rows": (compact.scatter_rows, SCATTER_ROWS),
    "index_rows": (compact.index_rows, INDEX_ROWS),
    "mask_rows": (compact.mask_rows, MASK_ROWS),
    "moment_pass": (moment_pass, MOMENT_PASS),
    "select_moment": (select_moment, SELECT_MOMENT),
    "apply_pass": (apply_with, APPLY_PASS),
}
WITH_TRITON = ("select_rows", "moment_pass", "select_moment", "apply_pass")
KERNEL = "__gpu$xla.gpu.triton"
H100 = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")

each_operation = pytest.mark.parametrize("op", OPERATIONS)
# JAX 0.12 says at every lowering that this backend will go; `triton` kernels are there for that day.
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")


def lowered(fn, *arrays, platform, mesh=None) -> str:
    explicit = (jax.sharding.AxisType.Explicit,)
    mesh = mesh or jax.sharding.AbstractMesh((1,), ("one",), axis_types=explicit, abstract_device=H100)
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(fn).trace(*arrays).lower(lowering_platforms=(platform,)).as_text()


def example(op):
    function, specs = OPERATIONS[op]
    call = specs["odd_tail"]
    return functools.partial(function, **call.static), call.arrays


@each_operation
@pytest.mark.parametrize("implementation", [None, "pallas"])
def test_the_kernel_is_lowered_for_cuda(op, implementation):
    fn, arrays = example(op)
    text = lowered(functools.partial(fn, implementation=implementation), *arrays, platform="cuda")
    assert text.count(KERNEL) == 1


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_no_kernel_where_xla_divides_the_arrays(kind, caplog):
    """It would gather them whole on every device, silently. Where that is seen the reference runs, and a line says so."""
    _dispatch._log_fallback.cache_clear()
    mesh = jax.sharding.AbstractMesh((8,), ("data",), axis_types=(kind,), abstract_device=H100)
    fn, arrays = example("select_rows")
    with caplog.at_level(logging.WARNING, logger="pallas_kernels"):
        text = lowered(fn, *arrays, platform="cuda", mesh=mesh)
    assert KERNEL not in text
    assert [r.message for r in caplog.records if "cannot divide a kernel over 8 devices" in r.message]


@pytest.mark.parametrize("implementation", [None, "pallas"])
def test_a_kernel_over_divided_arrays_is_an_error(implementation):
    """Only the lowering knows that they are, where they come from a device mesh that no context names."""
    fn, (x,) = example("select_rows")
    divided = jax.sharding.NamedSharding(make_mesh(8), P("data"))
    x = jax.ShapeDtypeStruct((8000, 37), x.dtype, sharding=divided)
    jitted = jax.jit(functools.partial(fn, implementation=implementation))
    with pytest.raises(
        NotImplementedError, match=r"select_rows: XLA cannot divide .* jax\.shard_map over all axes"
    ):
        jitted.trace(x).lower(lowering_platforms=("cuda",))


def test_vmap_goes_on_where_no_kernel_does():
    masks = np.arange(120).reshape(3, 40).astype(np.uint16) % 3
    got = jax.vmap(bits.pack_rows)(masks)
    assert got.tolist() == [bits.pack_rows(row).tolist() for row in masks]


@each_operation
def test_the_reference_is_lowered_for_cpu(op):
    fn, arrays = example(op)
    assert KERNEL not in lowered(fn, *arrays, platform="cpu")
    assert KERNEL not in lowered(functools.partial(fn, implementation="xla"), *arrays, platform="cuda")


@each_operation
def test_a_named_kernel_runs_or_raises(op):
    fn, arrays = example(op)
    with pytest.raises(NotImplementedError, match=rf"{op}.*CUDA devices only.*lowered for cpu"):
        lowered(functools.partial(fn, implementation="pallas"), *arrays, platform="cpu")
    if op not in WITH_TRITON:
        with pytest.raises(NotImplementedError, match=rf"{op} has no 'triton' kernel, only pallas"):
            jax.eval_shape(functools.partial(fn, implementation="triton"), *arrays)


@pytest.mark.parametrize("module", ["triton", "jax_triton"])
@pytest.mark.parametrize("op", WITH_TRITON)
def test_what_is_not_installed_is_named(op, module, monkeypatch):
    fn, arrays = example(op)
    monkeypatch.setitem(sys.modules, module, None)
    if module == "jax_triton":
        pytest.importorskip("triton", reason="make gpu-compile")
        _triton._jax_triton.cache_clear()
        monkeypatch.setattr(_triton, "_check_process", lambda *_: None)
    with pytest.raises(NotImplementedError, match=rf"needs {module.replace('_', '-')}.*scape-gasloc\[cuda\]"):
        jax.eval_shape(functools.partial(fn, implementation="triton"), *arrays)


def test_triton_is_imported_by_nobody_who_does_not_ask_for_it():
    code = "import sys, pallas_kernels.select, scape_jax; print({'triton', 'jax_triton'} & {*sys.modules})"
    paths = os.pathsep.join([str(deviceless.ROOT), str(deviceless.triton_folder())])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("implementation", ["pallas", pytest.param("triton", marks=needs_triton)])
def test_interpreted_is_for_what_is_traced_inside(implementation):
    x = np.array([0.0, -3.0, 1.0, 3.0], np.float32)
    fn = functools.partial(select.select_rows, k=2, block=32)
    with _dispatch.interpreted():
        assert fn(x, implementation=implementation).tolist() == [0b1010]
        assert KERNEL not in lowered(fn, x, platform="cpu")
    with pytest.raises(NotImplementedError, match="CUDA devices only"):
        fn(x, implementation="pallas")


@needs_triton
def test_triton_says_what_decides_how_it_runs():
    fn = functools.partial(select.select_rows, k=2, implementation="triton")
    with pytest.raises(
        RuntimeError, match="interpret=False, but Triton was imported with TRITON_INTERPRET=1"
    ):
        jax.eval_shape(fn, jax.ShapeDtypeStruct((40,), jnp.float32))


def test_a_named_kernel_raises_outside_of_jit_too():
    with pytest.raises(NotImplementedError, match="CUDA devices only"):
        bits.pack_rows(np.ones(5, bool), implementation="pallas")


@each_operation
def test_a_bad_block_names_the_allowed_ones(op):
    """Case 8."""
    fn, arrays = example(op)
    for block in (1000, 16, 65536, 0, -4096):
        with pytest.raises(ValueError, match=f"one of 32, 64, .*4096, .*32768, got {block}"):
            jax.eval_shape(functools.partial(fn, block=block), *arrays)


@pytest.mark.parametrize(
    ("fn", "arrays", "reason"),
    [
        (
            functools.partial(select.select_rows, k=3, block=16384),
            [jax.ShapeDtypeStruct((37000,), jnp.float32)],
            "select_rows.*rows of 16384 entries",
        ),
        (
            functools.partial(compact.compact_rows, k=3),
            [jax.ShapeDtypeStruct((40,), jnp.int16), jax.ShapeDtypeStruct((2,), jnp.uint32)],
            "compact_rows.*dtype int16",
        ),
        (bits.pack_rows, [jax.ShapeDtypeStruct((0,), bool)], "pack_rows.*no entries"),
        (
            functools.partial(compact.index_rows, size=40, k=0),
            [jax.ShapeDtypeStruct((2,), jnp.uint32)],
            "index_rows.*no entries are kept",
        ),
    ],
    ids=["block", "dtype", "empty", "nothing kept"],
)
def test_what_no_kernel_supports_falls_back_with_one_line(fn, arrays, reason, caplog):
    """Not on CPU, where no kernel was to be expected; and a named kernel is an error there too."""
    _dispatch._log_fallback.cache_clear()
    with caplog.at_level(logging.WARNING, logger="pallas_kernels"):
        assert KERNEL not in lowered(fn, *arrays, platform="cpu")
        assert not caplog.records
        for _ in range(2):
            assert KERNEL not in lowered(lambda *a: fn(*a), *arrays, platform="cuda")
    (record,) = caplog.records
    assert re.search(reason, record.getMessage())
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(functools.partial(fn, implementation="pallas"), *arrays)


def test_wrong_arguments_are_named():
    x, words = np.zeros(40, np.float32), np.zeros(2, np.uint32)
    with pytest.raises(ValueError, match=r"implementation must be None or one of .*'cuda'"):
        bits.pack_rows(x > 0, implementation="cuda")
    with pytest.raises(ValueError, match="interpret=True needs a named kernel, got implementation=None"):
        bits.pack_rows(x > 0, interpret=True)
    with pytest.raises(TypeError, match="mask must be bool or an integer"):
        bits.pack_rows(x)
    with pytest.raises(ValueError, match=r"words must be uint32 \(\.\.\., 2\) for 40 entries"):
        bits.unpack_rows(words[:1], 40)
    with pytest.raises(TypeError, match="x must be a floating-point array, got int32"):
        select.select_rows(np.zeros(3, np.int32), 1)
    with pytest.raises(ValueError, match="k must be from 0 to the block's 32 entries, got 33"):
        select.select_rows(x, 33, block=32)
    with pytest.raises(ValueError, match="k_last must be from 0 to k = 2, got 3"):
        select.select_rows(x, 2, k_last=3)
    with pytest.raises(ValueError, match="k_last goes with an int k"):
        select.select_rows(x, np.array([2], np.int32), k_last=1)
    with pytest.raises(ValueError, match="first_row and num_rows go together"):
        select.select_rows(x, 2, first_row=0)
    with pytest.raises(ValueError, match=r"words must be uint32 \(2,\)"):
        compact.compact_rows(x, words[:1], 2)
    with pytest.raises(ValueError, match=r"values must be float32 \(2,\)"):
        compact.scatter_rows(x, x, words, 2)
    with pytest.raises(ValueError, match=r"columns must be integers \(2, k\)"):
        compact.mask_rows(np.zeros((1, 3), np.uint16), 40, block=32)


@pytest.mark.parametrize("check_vma", [False, True])
def test_under_shard_map(check_vma):
    """The two forms must have one type there, also where a worker's own array meets a mask that all share."""
    mesh = make_mesh(8)
    own, shared = P("data"), P()

    def body(x, words, k):
        first_row = jax.lax.axis_index("data") % 2
        selected = select.select_rows(x, k, block=32, first_row=first_row, num_rows=1)
        kept = compact.compact_rows(x, words, 3, block=32)
        back = compact.scatter_rows(x, kept + 1, words, 3, block=32)
        again = compact.mask_rows(compact.index_rows(words, 40, 3, block=32), 40, block=32)
        return selected, kept, back, again

    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(own, shared, shared),
        out_specs=(own, own, own, shared),
        check_vma=check_vma,
    )
    x = np.random.default_rng(0).standard_normal(8 * 40).astype(np.float32)
    words = np.array([0b111 << 7, 0b1011], np.uint32)
    k = np.array([2], np.int32)
    selected, kept, back, again = jax.jit(mapped)(x, words, k)
    assert [int(word).bit_count() for word in selected] == [2] * 8
    at = np.array([7, 8, 9, 32, 33, 35])
    np.testing.assert_array_equal(kept.reshape(8, -1), x.reshape(8, 40)[:, at])
    wanted = x.reshape(8, 40).copy()
    wanted[:, at] += 1
    np.testing.assert_array_equal(back.reshape(8, 40), wanted)
    np.testing.assert_array_equal(again, words)


@needs_triton
@pytest.mark.parametrize("check_vma", [False, True])
def test_triton_interpreted_under_shard_map(check_vma):
    """Eight devices call one interpreter, which is no more than one thread's at a time."""

    def body(x):
        first_row = jax.lax.axis_index("data") % 2
        return select.select_rows(
            x, 2, block=32, first_row=first_row, num_rows=1, implementation="triton", interpret=True
        )

    mapped = jax.shard_map(
        body, mesh=make_mesh(8), in_specs=P("data"), out_specs=P("data"), check_vma=check_vma
    )
    words = jax.jit(mapped)(np.tile(np.arange(64, dtype=np.float32), 8))
    assert words.tolist() == [0b11 << 30] * 8
