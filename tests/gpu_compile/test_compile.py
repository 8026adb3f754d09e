"""The real GPU compiler on every kernel, for sm_90, on a machine without a GPU.

`make gpu-compile` fetches the compiler; without it these tests are skipped and say so.
"""

import pytest

from tests.gpu_compile import compile_kernels, deviceless


@pytest.fixture(scope="module")
def reports(compiler):
    lines = deviceless.run("tests.gpu_compile.compile_kernels")
    return {(line["op"], line["spec"]): line for line in lines}


@pytest.mark.parametrize(
    ("op", "kernel", "spec"),
    [
        (op, kernel, spec)
        for function, kernel, specs in compile_kernels.CALLS
        for op in compile_kernels.forms(function)
        for spec in specs
    ],
)
def test_one_kernel_and_nothing_else(reports, op, kernel, spec):
    """Compiled at all, without spills, by that name, in place where it should; no copy, no temporary buffer beside it."""
    report = reports[op, spec]
    assert "error" not in report
    assert report["operations"] == [kernel]
    # The addresses of several results.
    assert report["temp_bytes"] <= 32
    assert report["alias_bytes"] == report["donated_bytes"]
    assert list(report["kernels"]) == [kernel]
    numbers = report["kernels"][kernel]
    assert numbers["spill_stores"] == numbers["spill_loads"] == numbers["stack"] == 0
    # Of 65536: room for at least 16 warps on a multiprocessor, to wait for memory while others work.
    assert 0 < numbers["registers"] <= 128


@pytest.mark.parametrize("op", compile_kernels.SHARDED)
def test_kernels_between_collectives(reports, op):
    """Under shard_map, with and without check_vma, where masks that all share meet a worker's own entries."""
    report = reports[op, "8 workers"]
    assert "error" not in report
    operations = {name.removesuffix("-start") for name in report["operations"]}
    assert {"select_rows", "index_rows", "mask_rows", "compact_rows", "scatter_rows"} <= operations
    assert {"all-gather", "all-reduce"} <= operations


def test_the_exchange_reads_and_writes_each_state_buffer_once(compiler):
    """Read: anchor, own and received parameters, momentum. Written: momentum, parameters. 6 times their bytes.

    A buffer that is read for a norm or a difference on the side would add 1 each, as would a copy.
    """
    (report,) = deviceless.run("tests.gpu_compile.compile_exchange")
    assert report["fusion_bytes"] == pytest.approx(6 * report["params_bytes"], rel=2e-3)
    assert report["temp_bytes"] == pytest.approx(report["params_bytes"], rel=2e-3)
