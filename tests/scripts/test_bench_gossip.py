"""scripts/bench_gossip.py with the tiniest sizes: its data parallelism, what it leaves, and how it goes on."""

import json

import jax
import optax
import pytest

import models
from scripts import bench_gossip as bench
from tests.helpers import assert_close
from tests.training.runs_for_tests import write_corpus
from training.data import make_loader
from training.evaluate import evaluate
from training.mesh import make_mesh

TINY = dict(
    steps=4, length=16, global_batch=4, width=32, n_layers=1, evaluations=2, eval_batches=1, final_batches=1
)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return str(write_corpus(tmp_path_factory.mktemp("corpus"), tokens=5000))


def settings(source, out, *points, **changes):
    return bench.Settings(**(TINY | {"source": source, "out": out, "points": points, "workers": 2} | changes))


def held(out):
    return json.loads((out / "gossip.json").read_text())["points"]


def test_ddp_is_adamw_on_the_whole_batch(source, tmp_path):
    """Gradients that stay on their worker, or rows that no worker reads, would show here."""
    task = settings(source, tmp_path)
    found = bench.train_point(task, bench.METHODS["ddp_adamw"](0), 1, 2, average_gradients=True)

    config, tx = task.model(), task.inner()
    params = models.init_params(config, task.seed)
    opt_state = tx.init(params)

    @jax.jit
    def step(params, opt_state, batch):
        updates, opt_state = tx.update(jax.grad(models.loss_fn(config))(params, batch), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    with make_loader(task.tokens("train"), global_batch=4, length=16, seed=task.seed) as loader:
        for _ in range(task.steps):
            params, opt_state = step(params, opt_state, next(loader))
    batches = bench.eval_batches(task.tokens("validation"), bench.EVAL_ROWS, 16, 1)
    assert_close(found["loss"], evaluate(config, params, batches, make_mesh(1), "data").loss, "model")
    assert found["bytes_per_step"] == found["parameters"] * 4  # 2 (W-1)/W of the gradient


def test_table_picture_and_going_on(source, tmp_path, capsys):
    """A point that was finished is kept as it is, a later one joins it, another task is refused."""
    bench.main(settings(source, tmp_path, "diloco:2"))
    before = held(tmp_path)
    bench.main(settings(source, tmp_path, "diloco:2", "gasloc_1peer:2", repeats=2))
    assert "diloco:2, seed 0: done before" in capsys.readouterr().out
    points = held(tmp_path)
    assert (
        list(points) == ["diloco:2", "gasloc_1peer:2"] and points["diloco:2"]["0"] == before["diloco:2"]["0"]
    )
    assert [row[0] for row in points["diloco:2"]["0"]["curve"]] == [0, 2, 4]
    for seed in ("0", "1"):
        # Two workers in one pair average in every round, which is what DiLoCo does.
        assert_close(points["gasloc_1peer:2"][seed]["loss"], points["diloco:2"][seed]["loss"], "model")
    assert points["diloco:2"]["0"]["loss"] != points["diloco:2"]["1"]["loss"]
    assert (tmp_path / "gossip.png").stat().st_size > 10_000
    text = (tmp_path / "gossip.md").read_text()
    assert "| gasloc_1peer | 2 | 2 |" in text and "gasloc_1peer:2, " in text

    with pytest.raises(SystemExit, match=r"another task: seed was 0, is 1\. Use another --out"):
        bench.main(settings(source, tmp_path, "diloco:2", seed=1))


def test_every_method_builds_on_eight_workers():
    """A factory with a wrong argument would otherwise be met in the middle of a bench."""
    assert [bench.parse(point) for point in bench.POINTS]
    params = models.abstract_params(bench.Task().model())
    size = 4 * models.num_params(bench.Task().model())
    sent = {name: make(3).bytes_per_round(params, 8) / size for name, make in bench.METHODS.items()}
    assert sent["gasloc_1peer"] == sent["local_dadam"] == sent["dadam"] == 1
    assert sent["gasloc_2peer"] == sent["noloco"] == 2
    assert sent["diloco"] == pytest.approx(14 / 8, rel=1e-3)


@pytest.mark.parametrize("point", ["diloco", "diloco:0", "dadam:10", "dilico:10", "diloco:x"])
def test_a_point_that_is_none_is_refused(point):
    with pytest.raises(SystemExit, match=r"must be METHOD:H"):
        bench.parse(point)


def test_sizes_that_do_not_fit_are_refused_before_training(source, tmp_path):
    with pytest.raises(SystemExit, match=r"4 steps with H = 3"):
        bench.main(settings(source, tmp_path, "diloco:2", "diloco:3"))
    assert not list(tmp_path.iterdir())
