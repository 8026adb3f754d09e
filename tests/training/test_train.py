"""The trainer in this process: what it applies, logs, writes and restores (cases 13, 15, 17).

Compiling is what takes time here, so one SCAPE run of ten steps serves most tests, and a few leaves are
enough for it.
"""

import dataclasses
import io
import json
import math
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import models
import scape_jax
from scripts.chaos import checkpoints
from tests import helpers
from tests.training.runs_for_tests import pretrain, tiny, write_corpus
from training import config as settings
from training import metrics, runs
from training.checkpoint import Checkpoints
from training.evaluate import place
from training.mesh import AXIS_NAME, make_mesh
from training.optimizers import decay_mask, make_optimizer
from training.schedules import make_schedule
from training.train import abstract_state, build, restore, start, train


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def run(setup, folder):
    """Trains in a new folder; returns (outcome, records, printed text)."""
    runs.new_folder(settings.update(setup.config, {"run.folder": str(folder)}))
    return go_on(setup, folder, resume=False)


def go_on(setup, folder, *, resume=True):
    out = io.StringIO()
    outcome = train(setup, folder, resume=resume, out=out)
    return outcome, metrics.read(folder), out.getvalue()


def saved_state(setup, folder, step):
    with Checkpoints(folder) as checkpoints:
        return checkpoints.restore(*abstract_state(setup), setup.config, step)


def leaves(folder, step):
    """All arrays of a checkpoint as saved, without a run to fit them to."""
    restore = ocp.args.StandardRestore
    with ocp.CheckpointManager(folder / "checkpoints") as manager:
        found = manager.restore(step, args=ocp.args.Composite(params=restore(), opt_state=restore()))
    return {
        f"{item}/{path}": np.asarray(x) for item in ("params", "opt_state") for path, x in found[item].items()
    }


class Noted:
    """A step that also notes what is compiled ahead: (steps left, whether there was something to compile)."""

    def __init__(self, step):
        self.step, self.ahead = step, []

    def __call__(self, *arguments):
        return self.step(*arguments)

    def __getattr__(self, name):
        return getattr(self.step, name)

    def compile_ahead(self, *arguments, **options):
        self.ahead.append((options["steps"], self.step.compile_ahead(*arguments, **options)))
        return self.ahead[-1][1]


@dataclasses.dataclass(frozen=True)
class Whole:
    setup: object
    folder: object
    outcome: object
    records: list
    told: str


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    """Ten uninterrupted steps of SCAPE on four workers, with checkpoints of steps 5 and 10."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    config = tiny(corpus, checkpoint__every=5, eval__every=5, schedule__learning_rate=1e-2)
    # Half of the entries are sparse, in three leaves: enough to see an error, and half of the time to
    # compile.
    config = settings.update(config, {"optimizer.dense": ["norm", "attention", "up", "gate"]})
    setup = build(config)
    setup = dataclasses.replace(setup, step=Noted(setup.step))
    return Whole(setup, folder, *run(setup, folder))


def test_run_leaves_everything_that_is_promised(whole):
    folder, summary = whole.folder, whole.outcome.summary
    assert whole.outcome.exit_code == 0 and whole.outcome.step == 10
    saved = settings.dotted(settings.Config.load(folder / "config.json"))
    assert saved == settings.dotted(whole.setup.config)
    logged = [r for r in whole.records if "loss" in r]
    assert [r["step"] for r in logged] == list(range(1, 11))
    assert set(logged[0]) == {
        "step", "loss", "loss_mean", "lr", "tokens_per_sec", "bytes_sent_total", "dense_bytes_total",
        "wire_bytes", "density", "mask_overlap", "residual_norm", "kept_norm", "grad_norm", "clip_factor",
        "skipped",
    }  # fmt: skip
    assert [r["step"] for r in whole.records if "validation_loss" in r] == [5, 10]
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert "<svg" in (folder / "report.html").read_text()
    for line in ("4 x cpu", "per worker and step", "tokens per step", "step 10/10", "memory", "parameters"):
        assert line in whole.told, line
    assert summary["validation_loss"] < logged[0]["loss"] - 0.02  # it learns
    assert summary["skipped"] == 0 and summary["workers"] == 4


def test_program_of_the_final_density_is_compiled_beside_the_first(whole):
    """Left out, or with another count of steps, the run would stand still in its middle."""
    assert whole.setup.step.ahead[0] == (10, True)
    assert "compiling two programs" in whole.told


def test_bytes_are_the_sum_over_the_steps(whole):
    sent = [whole.setup.step.wire_bytes(step) for step in range(1, 11)]
    assert [r["wire_bytes"] for r in whole.records if "loss" in r] == [s.total_bytes for s in sent]
    assert sent[0].total_bytes > sent[-1].total_bytes  # the first step is dense, so the sum is no product
    assert whole.outcome.summary["bytes_sent_total"] == sum(s.total_bytes for s in sent)
    assert whole.outcome.summary["dense_bytes_total"] == sum(s.dense_total_bytes for s in sent)


def test_losses_are_those_of_the_bare_step(whole):
    """The trainer adds nothing: the same batches through the step alone give the same bits."""
    state, losses = start(whole.setup), []
    for _ in range(10):
        batch = place(next(state.loader), whole.setup.mesh, AXIS_NAME)
        state.params, state.opt_state, measured = whole.setup.step(state.params, state.opt_state, batch)
        losses.append(float(measured["loss"]))
    assert [r["loss"] for r in whole.records if "loss" in r] == losses


def end_of(setup, found, opt_state, data_state):
    """The state five steps after `found`, from `opt_state` and `data_state`."""
    loader = start(setup).loader
    loader.set_state(data_state)
    params, opt_state = jax.tree.map(jnp.copy, (found.params, opt_state))
    for _ in range(10 - found.step):
        params, opt_state, _ = setup.step(params, opt_state, place(next(loader), setup.mesh, AXIS_NAME))
    return params, opt_state


def test_resume_is_bit_exact_and_needs_every_part(whole):
    """Case 15 within a process; test_pretrain.py has it with a new one."""
    setup = whole.setup
    found, end = (saved_state(setup, whole.folder, step) for step in (5, 10))
    helpers.assert_bit_equal(
        end_of(setup, found, found.opt_state, found.data_state), (end.params, end.opt_state)
    )

    def residuals(path, leaf):
        return jnp.zeros_like(leaf) if ".h" in jax.tree_util.keystr(path) else leaf

    dropped = jax.tree_util.tree_map_with_path(
        residuals, found.opt_state
    )  # and moments, which share the buffer
    with pytest.raises(AssertionError):
        helpers.assert_bit_equal(end_of(setup, found, dropped, found.data_state)[0], end.params)
    with pytest.raises(AssertionError):
        other = found.data_state | {"step": 0}
        helpers.assert_bit_equal(end_of(setup, found, found.opt_state, other)[0], end.params)


def test_resume_in_a_new_process_is_bit_exact(whole, tmp_path):
    """Case 15: five steps, a new process, five more: parameters every buffer, mask and count."""
    half = tmp_path / "half"
    shutil.copytree(whole.folder, half)
    shutil.rmtree(half / "checkpoints" / "10")
    ended = pretrain("--resume", str(half), cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "going on from step 5" in ended.stdout
    expected = leaves(whole.folder, 10)
    assert any("h/" in path for path in expected) and any("mask" in path for path in expected)
    helpers.assert_bit_equal(leaves(half, 10), expected)
    records = [[r | {"tokens_per_sec": 0} for r in run] for run in (metrics.read(half), whole.records)]
    assert records[0] == records[1]
    summary = json.loads((half / "summary.json").read_text())
    for key in ("train_loss", "validation_loss", "bytes_sent_total", "dense_bytes_total"):
        assert summary[key] == whole.outcome.summary[key]


def test_resume_of_a_finished_run_changes_nothing(whole):
    again, records, _ = go_on(whole.setup, whole.folder)
    assert again.summary["validation_loss"] == whole.outcome.summary["validation_loss"]
    assert [r["step"] for r in records if "loss" in r] == list(range(1, 11))
    assert [r["step"] for r in records if "validation_loss" in r] == [5, 10]


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        ({"model.n_layers": 3}, ["params, of another shape", "model.n_layers: None -> 3"]),
        ({"model.n_layers": 1}, ["params, of another shape", "model.n_layers: None -> 1"]),
        ({"model.width": 64}, ["params, of another shape", "model.width: None -> 64"]),
        (
            {"model.vocab_size": 99},
            ["params, of another shape", "[61, ", "[99, ", "model.vocab_size: 61 -> 99"],
        ),
        (
            {"optimizer.name": "adams"},
            ["opt_state, ", "in the checkpoint", "optimizer.name: 'scape' -> 'adams'"],
        ),
        (
            {"optimizer.name": "adamw"},
            ["opt_state, missing from the checkpoint", "optimizer.name: 'scape' -> 'adamw'"],
        ),
    ],
)
def test_checkpoint_of_another_run_is_refused(whole, changes, messages):
    other = build(settings.update(whole.setup.config, changes))
    with (
        Checkpoints(whole.folder) as checkpoints,
        pytest.raises(ValueError, match="nothing was loaded") as refused,
    ):
        restore(other, checkpoints)
    for message in messages:
        assert message in str(refused.value), message


def test_other_optimizer_may_start_from_the_parameters(whole):
    changes = {"optimizer.name": "adamw", "mesh.data": 2, "checkpoint.parameters_from": str(whole.folder)}
    state = start(build(settings.update(whole.setup.config, changes)))
    helpers.assert_bit_equal(state.params, saved_state(whole.setup, whole.folder, 10).params)
    assert state.step == 0 and state.source == f"step 10 of {whole.folder}"
    changes["checkpoint.parameters_worker"] = 0
    with pytest.raises(
        ValueError, match=r"parameters_worker must be left out, got 0: .* was no run in rounds"
    ):
        start(build(settings.update(whole.setup.config, changes)))


def test_parameters_of_another_model_are_refused_by_the_models_settings(whole):
    """Optimizer and workers may differ: naming them would send the user to the wrong settings."""
    changes = {"model.width": 64, "optimizer.name": "adamw", "mesh.data": 2}
    changes["checkpoint.parameters_from"] = str(whole.folder)
    with pytest.raises(ValueError, match="nothing was loaded") as refused:
        start(build(settings.update(whole.setup.config, changes)))
    told = str(refused.value)
    assert "model.width: None -> 64" in told and told.endswith("or start from other parameters.")
    assert "optimizer" not in told and "mesh.data" not in told


def test_abstract_state_is_that_of_a_real_one(whole):
    state = start(whole.setup)
    for got, want in zip(abstract_state(whole.setup), (state.params, state.opt_state), strict=True):
        jax.tree.map(lambda a, b: None, got, want)  # one structure
        for abstract, real in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert (abstract.shape, abstract.dtype) == (real.shape, real.dtype)
            assert abstract.sharding.is_equivalent_to(real.sharding, real.ndim)


@pytest.mark.parametrize("name", ["scape", "adams", "adamw", "topk_adamw", "topk_adams"])
def test_every_optimizer_name_makes_one_that_minimises(name):
    config = settings.update(settings.preset("tiny"), {"optimizer.name": name, "optimizer.block_size": 64})
    tx = make_optimizer(config, lambda count: 0.05, AXIS_NAME)
    step = scape_jax.make_train_step(
        lambda params, batch: jnp.mean((params["w"] - jnp.mean(batch, axis=0)) ** 2), tx, make_mesh(4)
    )
    params, target = {"w": jnp.zeros((32, 64))}, np.linspace(-1, 1, 2048, dtype=np.float32).reshape(32, 64)
    opt_state, losses = step.init(params), []
    for _ in range(60):
        params, opt_state, measured = step(params, opt_state, np.stack([target] * 4))
        losses.append(float(measured["loss"]))
    assert losses[-1] < 0.6 * losses[0]
    sent = step.wire_bytes(50)
    assert (sent.total_bytes < 0.9 * sent.dense_total_bytes) is config.optimizer.is_sparse


def test_decay_leaves_out_norms_and_biases():
    params = models.abstract_params(models.preset("tiny_gpt"))
    decays = decay_mask(settings.OptimizerConfig())(params)
    named = {
        jax.tree_util.keystr(p, simple=True, separator="/"): d for p, d in jax.tree.leaves_with_path(decays)
    }
    assert named["layers/mlp/down/kernel"] and named["embed/embedding"]
    excluded = [path for path, decay in named.items() if not decay]
    assert excluded and all(path.rsplit("/")[-1] in ("bias", "scale") for path in excluded)


def without_gradient(params, batch):
    """A loss whose gradient is zero: only the decay moves a parameter, by rate x decay of itself."""
    return 0.0 * (jnp.sum(params["embed"]["embedding"]) + jnp.mean(batch["tokens"]))


class Watched:
    """A step that also notes by what factor it changed one entry."""

    def __init__(self, step):
        self.step, self.factors = step, []

    def __call__(self, params, opt_state, batch):
        before = float(params["embed"]["embedding"][1, 1])
        params, opt_state, measured = self.step(params, opt_state, batch)
        self.factors.append(float(params["embed"]["embedding"][1, 1]) / before)
        return params, opt_state, measured

    def __getattr__(self, name):
        return getattr(self.step, name)


def with_loss(setup, loss_fn):
    """The same run on another loss."""
    config = setup.config
    step = scape_jax.make_train_step(
        loss_fn,
        make_optimizer(config, setup.schedule, AXIS_NAME),
        setup.mesh,
        axis_name=AXIS_NAME,
        accumulate=config.data.accumulate,
    )
    return dataclasses.replace(setup, step=Watched(step))


@pytest.mark.parametrize(("workers", "accumulate"), [(1, 1), (1, 2), (4, 1), (4, 2)])
def test_logged_learning_rate_is_the_one_applied(workers, accumulate, corpus, tmp_path):
    """Case 13."""
    config = tiny(
        corpus, mesh__data=workers, data__accumulate=accumulate, optimizer__name="adams",
        optimizer__weight_decay=10.0, schedule__learning_rate=1e-2, schedule__end_learning_rate=1e-3,
        schedule__warmup_fraction=0.3,
    )  # fmt: skip
    setup = with_loss(build(config), without_gradient)
    _, records, _ = run(setup, tmp_path / "run")
    logged = [r["lr"] for r in records if "lr" in r]
    np.testing.assert_allclose((1 - np.array(setup.step.factors)) / 10, logged, rtol=1e-4)
    np.testing.assert_array_equal(
        np.float32(logged), np.float32([make_schedule(config.schedule, 10)(c) for c in range(10)])
    )
    assert logged[2] == np.float32(1e-2) and logged[9] == np.float32(1e-3)


def test_skipped_step_is_counted_and_holds_the_schedule(corpus, tmp_path):
    config = tiny(corpus, run__steps=4, optimizer__name="adams", optimizer__weight_decay=10.0)
    setup = build(config)
    loader = start(setup).loader
    marked = [next(loader)["tokens"] for _ in range(2)][1][-1]  # a row of the last worker in the second step

    def poisoned(params, batch):
        bad = jnp.any(jnp.all(batch["tokens"] == marked[None], axis=1))
        return (
            without_gradient(params, batch)
            + jnp.where(bad, jnp.nan, 0.0) * params["embed"]["embedding"][0, 0]
        )

    setup = with_loss(setup, poisoned)
    outcome, records, told = run(setup, tmp_path / "run")
    logged = [r for r in records if "loss" in r]
    assert [r["skipped"] for r in logged] == [0, 1, 1, 1]
    rates = [float(setup.schedule(count)) for count in range(4)]
    assert [r["lr"] for r in logged] == [rates[0], rates[0], rates[1], rates[2]]
    assert setup.step.factors[1] == 1.0
    taken = np.delete(setup.step.factors, 1)
    np.testing.assert_allclose((1 - taken) / 10, rates[:3], rtol=1e-4)
    assert outcome.summary["skipped"] == 1 and "1 skipped" in told


def test_run_that_skipped_every_step_is_a_failure(corpus, tmp_path):
    """It ended with 0 and a summary."""
    config = tiny(corpus, mesh__data=1, run__steps=2, optimizer__name="adams")
    nowhere = lambda params, batch: jnp.nan * without_gradient(params, batch)  # noqa: E731
    outcome, records, _ = run(with_loss(build(config), nowhere), tmp_path / "run")
    assert (outcome.exit_code, outcome.summary) == (1, None)
    assert "all 2 steps were skipped" in outcome.failure
    assert [r["skipped"] for r in records] == [1, 2]


def test_one_worker_sends_nothing(corpus, tmp_path):
    setup = with_loss(
        build(tiny(corpus, mesh__data=1, run__steps=2, optimizer__name="adams")), without_gradient
    )
    outcome, _, told = run(setup, tmp_path / "run")
    assert (
        outcome.summary["bytes_sent_total"] == 0
        and "one worker" in told + (tmp_path / "run/report.html").read_text()
    )
    assert math.isfinite(outcome.summary["validation_loss"])


def test_vocabulary_too_small_for_the_data(corpus):
    with pytest.raises(ValueError, match=r"vocabulary must cover .* got 50 ids in the model and 61"):
        build(tiny(corpus, model__vocab_size=50))


def test_training_and_validation_of_two_tokenizers(tmp_path):
    write_corpus(tmp_path, tokenizer="one")
    (tmp_path / "train.tokens").rename(tmp_path / "kept")
    write_corpus(tmp_path, tokenizer="two")
    (tmp_path / "kept").rename(tmp_path / "train.tokens")
    with pytest.raises(ValueError, match=r"must come from one tokenizer, got 'one' .* and 'two'"):
        build(tiny(tmp_path))


def test_folder_of_another_run_is_not_overwritten(whole):
    with pytest.raises(ValueError, match=r"must not hold another run.* Use --resume"):
        runs.new_folder(settings.update(whole.setup.config, {"run.folder": str(whole.folder)}))


def test_folders_are_numbered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = settings.preset("tiny")
    assert [str(runs.new_folder(config)) for _ in range(3)] == ["runs/tiny-1", "runs/tiny-2", "runs/tiny-3"]
    assert runs.load_config("runs/tiny-2").run.folder == "runs/tiny-2"


def test_newest_run_is_the_one_saved_last(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(
        ["a/checkpoints/10", "b/checkpoints/5", "a/checkpoints/20", "c/checkpoints"]
    ):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        os.utime(folder, (number, number))
    assert str(runs.latest()) == "runs/a"


def test_nothing_to_resume(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="needs a run with a checkpoint, got none"):
        runs.latest()
    with pytest.raises(ValueError, match=r"must hold config.json"):
        runs.load_config(tmp_path)


def poisoned(rows, at_known, elsewhere):
    """A loss with a gradient of so much in one entry: at batches with one of the rows, and at others."""

    def loss(params, batch):
        known = jnp.all(batch["tokens"][:, None] == rows[None], axis=2).any()
        return (
            without_gradient(params, batch)
            + jnp.where(known, at_known, elsewhere) * params["embed"]["embedding"][0, 0]
        )

    return loss


def test_many_skipped_in_a_row_end_the_run_with_what_was_trained(corpus, tmp_path):
    config = tiny(corpus, run__steps=40, optimizer__name="adams", run__most_skipped=3, mesh__data=2)
    setup = build(config)
    loader = start(setup).loader
    sound = jnp.asarray(np.concatenate([next(loader)["tokens"] for _ in range(4)]))

    setup = with_loss(setup, poisoned(sound, at_known=0.0, elsewhere=jnp.nan))
    outcome, records, _ = run(setup, tmp_path / "run")
    assert (
        outcome.exit_code == 1
        and "in a row were skipped, for a gradient that is not finite" in outcome.failure
    )
    assert 7 <= outcome.step < 12 and [r["skipped"] for r in records][:7] == [0, 0, 0, 0, 1, 2, 3]
    assert saved_state(setup, tmp_path / "run", outcome.step).step == outcome.step


def test_a_run_goes_back_and_on_without_the_data_that_spoilt_it(corpus, tmp_path):
    """From batch 6 on three are bad: back to the checkpoint of step 6, and on with the first batch after the trouble."""
    config = tiny(
        corpus, run__steps=12, optimizer__name="adams", run__most_skipped=3, run__rollbacks=1, mesh__data=2,
        checkpoint__every=2, checkpoint__keep=5,
    )  # fmt: skip
    setup = build(config)
    loader = start(setup).loader
    batches = [next(loader)["tokens"] for _ in range(24)]
    bad = jnp.asarray(np.concatenate(batches[6:9]))

    setup = with_loss(setup, poisoned(bad, at_known=jnp.nan, elsewhere=0.0))
    outcome, records, told = run(setup, tmp_path / "run")
    assert outcome.exit_code == 0 and outcome.step == 12
    assert [r["step"] for r in records if "loss" in r] == list(range(1, 13))
    assert (
        "going back to step 6, and on without the 3 batches since" in told
    )  # found where a checkpoint is due
    assert [r["skipped"] for r in records if "loss" in r] == [0] * 12
    state = start(setup)
    for batch in (*batches[:6], *batches[9:15]):
        placed = place({"tokens": batch}, setup.mesh, AXIS_NAME)
        state.params, state.opt_state, _ = setup.step(state.params, state.opt_state, placed)
    saved = saved_state(setup, tmp_path / "run", 12)
    helpers.assert_bit_equal((saved.params, saved.opt_state), (state.params, state.opt_state))
    assert saved.totals["rollbacks"] == 1 and saved.data_state["step"] == 15


def test_a_run_goes_back_only_so_often(corpus, tmp_path):
    config = tiny(
        corpus, run__steps=30, optimizer__name="adams", run__most_skipped=2, run__rollbacks=2, mesh__data=1,
        checkpoint__every=2,
    )  # fmt: skip
    setup = build(config)
    loader = start(setup).loader
    sound = jnp.asarray(np.concatenate([next(loader)["tokens"] for _ in range(4)]))

    setup = with_loss(setup, poisoned(sound, at_known=0.0, elsewhere=jnp.nan))
    outcome, _, told = run(setup, tmp_path / "run")
    assert told.count("going back to step 4") == 2
    assert outcome.exit_code == 1 and "in a row were skipped" in outcome.failure
    assert checkpoints(tmp_path / "run")[:1] == [4]  # none of those from the trouble took its place


def test_a_device_that_differs_ends_the_run_and_is_not_saved(corpus, tmp_path, monkeypatch):
    config = tiny(
        corpus, run__steps=6, optimizer__name="adams", run__compare_every=2, checkpoint__every=2, mesh__data=2
    )
    monkeypatch.setattr("training._guard.Guard.difference", lambda self, tree: next(found))
    found = iter([None, "embed differs on data 1"])
    with pytest.raises(
        ValueError, match="must hold the same after step 4, but embed differs on data 1"
    ) as error:
        run(build(config), tmp_path / "run")
    assert "the checkpoint of step 2" in str(error.value)
    assert [int(p.name) for p in (tmp_path / "run" / "checkpoints").iterdir()] == [2]
