"""What XLA's GPU compiler makes of SCAPE's update and of a whole train step, for 8 H100s, without a GPU.

`python -m tests.gpu_compile.compile_scape` prints the counts as a table.
"""

import pytest

from tests.gpu_compile import compile_scape, deviceless

LEAVES = 3  # sparse ones
KERNELS = ("select_moment", "moment_pass", "apply_pass")
CODEC = ("index_rows", "mask_rows")
BY_KERNELS = [name for name in compile_scape.UPDATES if "plain XLA" not in name]


@pytest.fixture(scope="module")
def reports(compiler):
    lines = deviceless.run("tests.gpu_compile.compile_scape")
    print("\n" + "\n".join(compile_scape.table(lines)))
    return {line["program"]: line for line in lines}


@pytest.mark.parametrize("name", BY_KERNELS)
def test_three_kernels_a_leaf_and_nothing_large_beside_them(reports, name):
    """And two more for a mask that travels as indices. The rest is small: masks, norms, scalars; no copy of a buffer."""
    report = reports[name]
    index = report["collectives"][0][1] == ["u16"]
    for kernel in (*KERNELS, *CODEC):
        expected = LEAVES if kernel in KERNELS or index else 0
        assert report["operations"].count(kernel) == expected, kernel
    # Per leaf: a slice of the masks, the sum of its squares, the new own mask, k of its rows.
    rest = [op for op in report["operations"] if op not in (*KERNELS, *CODEC)]
    assert len(rest) <= 8 * LEAVES + 12, rest
    assert report["alias_bytes"] >= report["state_bytes"], "h and the parameters must be written in place"
    kept = round(compile_scape.UPDATES[name]["density"] * report["entries"])
    masks = report["entries"] / 8
    assert report["temp_bytes"] <= 4.1 * kept + 3 * masks, (
        "the payload and the gathered masks are all that is kept"
    )


@pytest.mark.parametrize("name", [*BY_KERNELS, "train step"])
def test_no_spills(reports, name):
    kernels = {k: n for k, n in reports[name]["kernels"].items() if k.startswith((*KERNELS, *CODEC))}
    assert {k.partition("__")[0] for k in kernels} >= set(KERNELS)
    for kernel, numbers in kernels.items():
        assert numbers["spill_stores"] == numbers["spill_loads"] == numbers["stack"] == 0, kernel


@pytest.mark.parametrize("density", ["d=.1", "d=.01"])
def test_the_update_moves_little_more_than_it_must(reports, density):
    """20 bytes an entry, masks and payload, by what the kernels ask for. A check of all gradients asks for g once more."""
    entries = reports[density]["entries"]
    floor = reports[density]["floor_bytes"]
    assert reports[f"{density}, kept checked"]["kernel_bytes"] <= 1.15 * floor
    assert reports[density]["kernel_bytes"] <= 1.15 * (floor + 4 * entries)
    if density == "d=.01":
        assert reports["d=.01, Triton"]["kernel_bytes"] == reports[density]["kernel_bytes"]
    assert reports[f"{density}, plain XLA"]["kernel_bytes"] > 2 * floor, "else the kernels are not worth it"


@pytest.mark.parametrize("name", compile_scape.UPDATES)
def test_the_ledger_is_what_travels(reports, name):
    """Bytes and number of collectives: one all-gather, one all-reduce; a bfloat16 payload stays that."""
    found = reports[name]["collectives"]
    total = {kind: sum(n for k, _, n in found if k == kind) for kind in ("all-gather", "all-reduce")}
    assert total == reports[name]["wire"]
    dtypes = [(kind, types) for kind, types, _ in found]
    index = compile_scape.UPDATES[name]["density"] < 1 / 16
    gathered = ("all-gather", ["u16" if index else "u32"])
    if "bfloat16" in name:
        # The two control numbers beside it are float32.
        assert sorted(dtypes) == sorted([gathered, ("all-reduce", ["bf16"]), ("all-reduce", ["f32"])])
    else:
        assert dtypes == [gathered, ("all-reduce", ["f32"])]


def test_the_masks_travel_beside_the_backward_pass(reports):
    """Started before a matrix product of the backward pass, needed only after the last one."""
    order = reports["train step"]["order"]
    names = [name for name, _ in order]
    start, done = names.index("all-gather-start"), names.index("all-gather-done")
    products = [
        i
        for i, (name, source) in enumerate(order)
        # The layers' own products stand in a loop.
        if "transpose(" in source and ("matmul" in name or name == "while")
    ]
    assert len(products) >= 3
    assert start < min(products) and max(products) < done < names.index("moment_pass")
    # The payload travels while the next masks are selected.
    first, last = names.index("all-reduce-start"), names.index("all-reduce-done")
    assert "select_moment" in names[first:last]
    assert "apply_pass" not in names[:last]
