"""Loss for wall-clock time where one worker of four has a slow link: DiLoCo, and GASLoC with fixed and with adapted steps.

    python scripts/bench_straggler.py --out docs/results/straggler
    python scripts/bench_straggler.py --rounds 10 --shares 0.1 --methods diloco gasloc_1peer_int8_adapt --out runs/straggler

Starts 4 processes on this machine behind links of a known speed (training/launch.py: needs Linux with iproute2), one of them
with a share of the bandwidth of the others. Each method trains a byte-level Llama of 0.1 M parameters on the standard
library's sources with the same data, inner AdamW and Nesterov outside; the loss is that of the mean of the workers on
held-out text, computed afterwards. A local step takes at least --step-ms: four processes share this machine's cores, and
uneven turns of theirs are not the question. Writes straggler.md, straggler.json and straggler.png (loss; who computes and
who waits).
Goals at a tenth of the bandwidth: GASLoC with adapted steps reaches DiLoCo's last loss in at most half of its time, and fast
workers are idle for less than 15 % of it.
"""

import dataclasses
import pathlib
import statistics
import tempfile
from typing import Any

import tyro
from rich.console import Console

from scripts import _link_bench as bench
from scripts import _straggler_report as report
from scripts._straggler_worker import METHODS, Task, model
from training.corpus import prepare_stdlib
from training.workers import Workers, stopped_by_hand

WORKERS = 4
SLOW = WORKERS - 1  # the worker with the slow link


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Task):
    """Methods with a slow link."""

    out: pathlib.Path
    """Folder of straggler.md, straggler.json and straggler.png."""
    methods: tuple[str, ...] = tuple(METHODS)
    """What to run, diloco first; the folder's other results are kept."""
    shares: tuple[float, ...] = (0.1, 0.2)
    """Bandwidth of the slow worker, of that of the others."""
    mbit: float = 30.0
    """Mbit/s of the others."""
    rounds: int = 50
    """Rounds of DiLoCo; the others take twice as many."""


def losses(folder: pathlib.Path) -> dict[int, float]:
    """Rounds -> loss of the mean of the workers' parameters that are in the folder."""
    import jax
    import numpy as np

    import models
    from training.data import eval_batches
    from training.evaluate import evaluate
    from training.mesh import make_mesh

    config, found, validation = model(), {}, prepare_stdlib().validation
    treedef = jax.tree.structure(models.abstract_params(config))
    for number in sorted({int(path.name.split("-")[0]) for path in folder.glob("*.npz")}):
        loaded = [list(np.load(path).values()) for path in folder.glob(f"{number}-*.npz")]
        mean = treedef.unflatten([sum(x) / len(loaded) for x in zip(*loaded, strict=True)])
        held_out = eval_batches(validation, 32, config.max_length, 6)
        result = evaluate(config, jax.device_put(mean), held_out, make_mesh(1), "data")
        assert result is not None
        found[number] = result.loss
    return found


def run(workers: Workers, settings: Settings, method: str, share: float) -> dict[str, Any]:
    """One method with one slow link."""
    workers.cluster.set_bandwidth(None)
    made = workers.ask(prepare=method)[0]
    workers.cluster.set_bandwidth(settings.mbit * 1e6)
    workers.cluster.set_bandwidth(settings.mbit * share * 1e6, SLOW)
    rounds = settings.rounds * (1 if method.startswith("diloco") else 2)
    with tempfile.TemporaryDirectory() as folder:
        noted = [one["rounds"] for one in workers.ask(rounds=rounds, folder=folder)]
        found = losses(pathlib.Path(folder))
    start = min(rows[0][0] for rows in noted)
    noted = [[[*(t - start for t in row[:3]), row[3]] for row in rows] for rows in noted]
    # A round counts as done when the last worker has done it.
    curve = [[max(rows[number - 1][2] for rows in noted), loss] for number, loss in found.items()]
    return {
        "method": method,
        "share": share,
        "bytes_per_round": made["bytes"],
        "secs": max(rows[-1][2] for rows in noted),
        "curve": curve,
        "idle": [1 - sum(b - a for a, b, _, _ in rows) / rows[-1][2] for rows in noted],
        "mean_steps": [statistics.fmean(row[3] for row in rows) for rows in noted],
        "rounds": [[[round(t, 4) for t in row] for row in rows] for rows in noted],
    }


def main(settings: Settings) -> dict[str, Any]:
    unknown = [name for name in settings.methods if name not in METHODS]
    if unknown or settings.rounds < settings.every or not all(0 < share <= 1 for share in settings.shares):
        raise SystemExit(
            f"methods must be among {', '.join(METHODS)}, rounds at least every = {settings.every}, shares in (0, 1]; got "
            f"{unknown or 'known methods'}, {settings.rounds} and {settings.shares}."
        )
    settings.out.mkdir(parents=True, exist_ok=True)
    path, console = settings.out / "straggler.json", Console()
    given = {field.name: getattr(settings, field.name) for field in dataclasses.fields(Task)}
    result = bench.kept(path, given | {"mbit": settings.mbit, "rounds": settings.rounds}, "runs")
    done = {(r["method"], r["share"]) for r in result["runs"]}
    wanted = [(m, s) for m in settings.methods for s in settings.shares if (m, s) not in done]
    prepare_stdlib()
    with bench.start(WORKERS, "_straggler_worker", settings, Task, console, timeout_secs=1800) as workers:
        made_by = bench.provenance("bench_straggler")
        result |= workers.ready[0] | made_by
        for method, share in wanted:
            found = run(workers, settings, method, share)
            found |= {name: made_by[name] for name in ("date", "command")}
            result["runs"].append(found)
            bench.save(path, result)
            console.print(report.line(found))
    result["runs"].sort(key=lambda r: (r["share"], list(METHODS).index(r["method"])))
    bench.save(path, result)
    text = report.markdown(result)
    (settings.out / "straggler.md").write_text(text)
    report.picture(result).savefig(settings.out / "straggler.png", dpi=110)
    console.print(text, soft_wrap=True)
    return result


if __name__ == "__main__":
    with stopped_by_hand():
        main(tyro.cli(Settings, description=__doc__))
