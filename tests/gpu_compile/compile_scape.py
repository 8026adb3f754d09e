"""Compiles SCAPE's update alone, and a decoder's whole train step, for 8 GPUs; one line of JSON for each program.

    python -m tests.gpu_compile.compile_scape

prints the table of what the update's kernels read and write.
"""

import json
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import models
import scape_jax
from scape_jax._layout import LeafLayout, leaf_layouts
from scripts import bench_round
from tests.gpu_compile import deviceless
from tests.gpu_compile.hlo import Operation, entry_operations, shape_bytes

WORKERS = 8
# A decoder's leaves, 7.2 M entries: an embedding whose size no block divides, stacked matrices, norms that travel whole.
SHAPES = {"embedding": (4001, 512), "mlp": (4, 512, 1536), "attention": (4, 512, 1024), "norm": (9, 512)}
UPDATES: dict[str, dict[str, Any]] = {
    "d=.1": {"density": 0.1},
    "d=.1, kept checked": {"density": 0.1, "finite_check": "kept"},
    "d=.1, bfloat16 payload": {"density": 0.1, "payload_dtype": jnp.bfloat16},
    "d=.1, ages": {"density": 0.1, "staleness_power": 1.0},
    "d=.01": {"density": 0.01},
    "d=.01, kept checked": {"density": 0.01, "finite_check": "kept"},
    "d=.01, Triton": {"density": 0.01, "implementation": "triton"},
    "d=.01, plain XLA": {"density": 0.01, "implementation": "xla"},
    "d=.1, plain XLA": {"density": 0.1, "implementation": "xla"},
}
SECTOR = 8  # float32 entries that the memory moves together


def kernel_bytes(op: Operation, layouts: dict[int, LeafLayout], density: float, sectors: bool) -> int:
    """What a kernel reads and writes: whole operands, but of what it takes by a mask the kept entries alone.

    `sectors` counts what the memory moves for them: every 32 bytes in which an entry is kept.
    """
    sizes = [int(shape_entries(x)) for x in op.operands]
    widths = [shape_bytes(x) // max(n, 1) for x, n in zip(op.operands, sizes, strict=True)]
    if op.name == "select_moment":
        size, window = sizes[0], shape_entries(op.result) * 32
        part = min(window / size, 1.0)
        return round(part * size * (widths[0] + widths[1] + 1 / 8)) + shape_bytes(op.result)
    if op.name not in ("moment_pass", "apply_pass"):
        return op.bytes
    layout = layouts[sizes[0] if op.name == "moment_pass" else sizes[1]]
    size, kept = layout.size, layout.kept(density)[2]
    taken = round(size * (1 - (1 - kept / size) ** SECTOR)) if sectors else kept
    masks = 2 * layout.mask_words * 4
    if op.name == "moment_pass":
        squares = op.result.startswith("(")
        result = re_types(op.result)[0]
        width = shape_bytes(result) // shape_entries(result)
        return (size if squares else taken) * widths[1] + taken * widths[0] + masks + kept * width
    # g is read; h, theta and ages too, and written with the last mask, all in place: the results' bytes.
    written = shape_bytes(op.result)
    return size * widths[1] + kept * widths[3] + masks + (written - layout.mask_words * 4) + written


def re_types(types: str) -> list[str]:
    """The arrays of a tuple's type."""
    return [part for part in types.strip("()").replace("}, ", "}|").split("|") if "[" in part]


def shape_entries(types: str) -> int:
    dims = types[types.index("[") + 1 : types.index("]")]
    return math.prod(int(n) for n in dims.split(",") if n)


def _abstract(tree: Any, specs: Any, mesh: Mesh) -> Any:
    return jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)),
        tree,
        specs,
    )


def update_program(mesh: Mesh, settings: dict[str, Any]) -> tuple[Any, Any]:
    """(compiled update at the final density, in place; its transformation)."""
    tx = scape_jax.scape(1e-3, weight_decay=0.1, axis_name="data", **settings)
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
    everywhere, own = PartitionSpec(), PartitionSpec("data")

    def mapped(f: Any, in_specs: Any, out_specs: Any) -> Any:
        return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    specs = scape_jax.state_specs(jax.eval_shape(mapped(tx.init, everywhere, everywhere), params), "data")
    state = jax.eval_shape(mapped(tx.init, everywhere, specs), params)

    def update(params: Any, state: Any, grads: Any) -> Any:
        return tx.apply(jax.tree.map(lambda g: g[0], grads), state, params, level=tx.final_level)

    grads = {name: jax.ShapeDtypeStruct((WORKERS, *x.shape), x.dtype) for name, x in params.items()}
    arrays = [
        _abstract(params, {name: everywhere for name in params}, mesh),
        _abstract(state, specs, mesh),
        _abstract(grads, {name: own for name in params}, mesh),
    ]
    jitted = jax.jit(mapped(update, (everywhere, specs, own), (everywhere, specs)), donate_argnums=(0, 1))
    return deviceless.compile_on(mesh, jitted, *arrays), tx


def update_report(name: str, mesh: Mesh) -> dict[str, Any]:
    settings = UPDATES[name]
    compiled, tx = update_program(mesh, settings)
    operations = entry_operations(compiled.as_text())
    params = {key: jax.ShapeDtypeStruct(shape, jnp.float32) for key, shape in SHAPES.items()}
    found, _ = leaf_layouts(
        params, density=0.1, block_size=4096, selection="block", dense=None, num_workers=WORKERS
    )
    layouts = {lay.size: lay for lay in found if lay.sparse}
    size, density = sum(layouts), settings["density"]
    kept = sum(lay.kept(density)[2] for lay in layouts.values())
    local = [op for op in operations if not op.name.startswith(("all-gather", "all-reduce"))]
    counts = [sum(kernel_bytes(op, layouts, density, sectors) for op in local) for sectors in (False, True)]
    wire = tx.wire(params, num_workers=WORKERS)
    return {
        "program": name,
        "entries": size,
        "floor_bytes": 20 * size + 3 * size // 8 + 2 * kept * 4,
        "kernel_bytes": counts[0],
        "sector_bytes": counts[1],
        "operations": [op.name for op in operations],
        "small_operations": sum(op.bytes < 4096 for op in local),
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "alias_bytes": compiled.memory_analysis().alias_size_in_bytes,
        "state_bytes": 8 * size,
        "collectives": collectives(operations),
        "wire": {"all-gather": wire.all_gather_operand, "all-reduce": wire.all_reduce_operand},
        "kernels": deviceless.ptxas_reports(),
    }


def collectives(operations: list[Operation]) -> list[tuple[str, list[str], int]]:
    """(kind, dtypes, operand bytes) of each."""
    found = []
    for op in operations:
        kind = op.name.removesuffix("-start")
        if kind in ("all-gather", "all-reduce"):
            dtypes = sorted({x.partition("[")[0] for x in op.operands})
            found.append((kind, dtypes, sum(map(shape_bytes, op.operands))))
    return found


def train_step_report(mesh: Mesh) -> dict[str, Any]:
    """Where the masks' all-gather stands among the matrix products of forward and backward."""
    config = bench_round.model(4.0)
    tx = scape_jax.scape(1e-3, density=0.1, weight_decay=0.1, axis_name="data")
    step = scape_jax.make_train_step(models.loss_fn(config), tx, mesh)
    params = models.abstract_params(config)
    step._prepare(params)
    tokens = jax.ShapeDtypeStruct((8 * WORKERS, 33), np.int32)
    everywhere = jax.tree.map(lambda _: PartitionSpec(), params)
    arrays = [
        _abstract(params, everywhere, mesh),
        _abstract(step._state_like, step._specs, mesh),
        _abstract({"tokens": tokens}, {"tokens": PartitionSpec("data")}, mesh),
    ]
    # XLA's own kernels of a backward pass may spill; ours are looked at one by one.
    compiled = deviceless.compile_on(mesh, step._compile_later(tx.final_level), *arrays, spills=True)
    operations = entry_operations(compiled.as_text())
    return {
        "program": "train step",
        "order": [(op.name, op.source) for op in operations],
        "collectives": collectives(operations),
        "kernels": deviceless.ptxas_reports(),
    }


def main() -> None:
    deviceless.record_jax_triton()
    mesh = Mesh(np.array(deviceless.devices(WORKERS)), ("data",))
    for name in UPDATES:
        print(json.dumps(update_report(name, mesh)), flush=True)
    print(json.dumps(train_step_report(mesh)), flush=True)


def table(reports: list[dict[str, Any]]) -> Iterator[str]:
    yield f"{'bytes per entry':26} {'floor':>7} {'moved':>7} {'ratio':>6} {'in sectors':>11} {'kernels':>8} {'temp':>6}"
    for r in reports:
        if "floor_bytes" in r:
            floor, moved, sectors = (
                r[key] / r["entries"] for key in ("floor_bytes", "kernel_bytes", "sector_bytes")
            )
            temp = r["temp_bytes"] / r["entries"]
            yield (
                f"{r['program']:26} {floor:7.2f} {moved:7.2f} {moved / floor:6.2f} {sectors:11.2f} "
                f"{len(r['operations']):8} {temp:6.2f}"
            )


if __name__ == "__main__":
    reports = deviceless.run("tests.gpu_compile.compile_scape")
    print("\n".join(table(reports)))
    for r in reports:
        print(f"{r['program']:26} on the wire: {r['collectives']}")
