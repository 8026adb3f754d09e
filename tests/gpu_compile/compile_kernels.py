"""Compiles every kernel on its named shapes for sm_90, and all of them under shard_map; one line of JSON for each.

What has a Triton twin is compiled a second time, by its name, through jax-triton.
"""

import functools
import itertools
import json
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels._arg_specs import Call
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
from tests.gpu_compile import deviceless
from tests.gpu_compile.hlo import entry_operations


def select_window(x: Any, k: Any, first_row: Any, **options: Any) -> jax.Array:
    return select_rows(x, k, first_row=first_row, **options)


def apply_with(
    theta: Any, h: Any, g: Any, last: Any, words: Any, total: Any, numbers: Any, *age: Any, **options: Any
) -> Any:
    ok, scale, clip, eta, decay, *rule = numbers
    scalars = Scalars(ok, scale, clip, eta, decay, Coefficients(*rule))
    out = apply_pass(theta, h, g, last, words, total, scalars=scalars, age=age[0] if age else None, **options)
    # JAX gives the memory of a donated argument to the first result that it fits: h's not to an update.
    return out if "update_dtype" not in options else (out.h, out.last, out.age, out.out)


# What is called, the name of its kernel, and with what.
CALLS = [
    (pack_rows, "pack_rows", bits_specs.PACK_ROWS),
    (unpack_rows, "unpack_rows", bits_specs.UNPACK_ROWS),
    (select_rows, "select_rows", select_specs.SELECT_ROWS),
    (select_window, "select_rows", select_specs.SELECT_WINDOW),
    (compact_rows, "compact_rows", compact_specs.COMPACT_ROWS),
    (scatter_rows, "scatter_rows", compact_specs.SCATTER_ROWS),
    (index_rows, "index_rows", compact_specs.INDEX_ROWS),
    (mask_rows, "mask_rows", compact_specs.MASK_ROWS),
    (moment_pass, "moment_pass", moment_specs.MOMENT_PASS),
    (select_moment, "select_moment", moment_specs.SELECT_MOMENT),
    (apply_with, "apply_pass", apply_specs.APPLY_PASS),
]
# Those of them that have a Triton twin.
TWINS = (select_rows, select_window, moment_pass, select_moment, apply_with)
# Name -> check_vma, the implementation of what has a twin.
SHARDED = {
    "sharded": (False, "pallas"),
    "sharded_check_vma": (True, "pallas"),
    "sharded_triton": (False, "triton"),
    "sharded_triton_check_vma": (True, "triton"),
}


def forms(function: Any) -> dict[str, dict[str, Any]]:
    """Name in the report -> options of each form in which a function is compiled."""
    name = function.__name__
    return {name: {}} | ({f"{name}, triton": {"implementation": "triton"}} if function in TWINS else {})


def in_place(function: Any, call: Call) -> tuple[int, ...]:
    """The arguments that a kernel replaces, which are donated: of apply_pass theta, h, the last mask and the ages."""
    if function is scatter_rows:
        return (0,)
    if function is not apply_with:
        return ()
    theta = () if "update_dtype" in call.static else (0,)
    return (*theta, 1, 3, *range(7, len(call.arrays)))


def sharded(mesh: Mesh, check_vma: bool, twin: str) -> Any:
    """One worker's part of an exchange: select, gather the masks' columns, sum the kept entries, put them back."""

    def body(x, k):
        worker = jax.lax.axis_index("worker")
        words = select_rows(x, k, first_row=worker, num_rows=1, implementation=twin)
        columns = index_rows(words, 4096, 41, implementation="pallas")
        columns = jax.lax.all_gather(columns, "worker", tiled=True, to="invarying")
        shared = mask_rows(columns, x.size, implementation="pallas")
        kept = jax.lax.psum(compact_rows(x, shared, 41, implementation="pallas"), "worker")
        return scatter_rows(x, kept, shared, 41, implementation="pallas")

    own, shared = PartitionSpec("worker"), PartitionSpec()
    mapped = jax.shard_map(body, mesh=mesh, in_specs=(own, shared), out_specs=own, check_vma=check_vma)
    return jax.jit(mapped, donate_argnums=0)


def main() -> None:
    deviceless.record_jax_triton()
    one = Mesh(np.array(deviceless.devices(1)), ("one",))
    for function, _, specs in CALLS:
        for (op, options), (name, call) in itertools.product(forms(function).items(), specs.items()):
            donated = in_place(function, call)
            jitted = jax.jit(functools.partial(function, **call.static, **options), donate_argnums=donated)
            sharding = NamedSharding(one, PartitionSpec())
            arrays = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in call.arrays]
            report(op, name, one, jitted, *arrays, donated=donated)
    eight = Mesh(np.array(deviceless.devices(8)), ("worker",))
    x = jax.ShapeDtypeStruct(
        (8 * 8 * 4096,), np.float32, sharding=NamedSharding(eight, PartitionSpec("worker"))
    )
    k = jax.ShapeDtypeStruct((), np.int32, sharding=NamedSharding(eight, PartitionSpec()))
    for name, (check_vma, twin) in SHARDED.items():
        report(name, "8 workers", eight, sharded(eight, check_vma, twin), x, k)


def report(op: str, spec: str, mesh: Mesh, jitted: Any, *arrays: Any, donated: tuple[int, ...] = ()) -> None:
    line: dict[str, Any] = {"op": op, "spec": spec}
    line["donated_bytes"] = sum(arrays[i].size * arrays[i].dtype.itemsize for i in donated)
    try:
        compiled = deviceless.compile_on(mesh, jitted, *arrays)
    except Exception as error:  # one kernel that does not compile must not hide the others
        line["error"] = f"{type(error).__name__}: {error}"[:2000]
    else:
        memory = compiled.memory_analysis()
        line["operations"] = [operation.name for operation in entry_operations(compiled.as_text())]
        line["temp_bytes"], line["alias_bytes"] = memory.temp_size_in_bytes, memory.alias_size_in_bytes
    line["kernels"] = deviceless.ptxas_reports()
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    for line in deviceless.run("tests.gpu_compile.compile_kernels"):
        for kernel, numbers in {
            **line["kernels"],
            **({"error": line["error"]} if "error" in line else {}),
        }.items():
            print(f"{line['op']:24} {line['spec']:22} {kernel:24}", numbers)
