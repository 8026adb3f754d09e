"""Training in rounds: the demonstration shrunk, what is measured and saved, resume, ends in mid-round, islands of SCAPE.

Compiling is what takes time, so one run of three rounds serves most tests.
"""

import dataclasses
import io
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import gasloc_jax
import models
import scape_jax
from tests import helpers
from tests.training.runs_for_tests import pretrain, tiny, write_corpus
from training import config as settings
from training import metrics, rounds, runs
from training._validation import validate
from training.checkpoint import Checkpoints
from training.data import make_loader
from training.outer import local_step, make_outer
from training.summary import startup_text
from training.train import State, abstract_state, build, restore, start, train


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


ROUNDS = {
    "optimizer.name": "adamw", "outer.name": "gasloc", "mesh.worker": 4, "mesh.data": 1, "outer.local_steps": 4,
    "schedule.learning_rate": 1e-2,
}  # fmt: skip


def in_rounds(corpus, **changes):
    """Four islands of one device and rounds of four steps: 10 steps end with a round of two."""
    return settings.update(tiny(corpus, **ROUNDS), {k.replace("__", "."): v for k, v in changes.items()})


def run(config, folder, *, resume=False):
    setup, out = build(config), io.StringIO()
    if not resume:
        runs.new_folder(settings.update(config, {"run.folder": str(folder)}))
    outcome = train(setup, folder, resume=resume, out=out)
    return setup, outcome, metrics.read(folder), out.getvalue()


def saved_state(setup, folder, step):
    with Checkpoints(folder) as checkpoints:
        return checkpoints.restore(*abstract_state(setup), setup.config, step)


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    """Rounds of 4, 4 and 2 steps, one worker slower, saved at the ends of the rounds at or after steps 3, 6 and 9."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    config = in_rounds(
        corpus, outer__local_steps=[4, 4, 4, 3], checkpoint__every=3, eval__every=4, log__every=1
    )
    return folder, *run(settings.update(config, {"checkpoint.keep": 9}), folder)


def test_run_ends_in_mid_round_and_says_so(whole):
    _, _, outcome, records, told = whole
    logged = [r for r in records if "loss" in r]
    assert [r["step"] for r in logged] == [4, 8, 10]
    assert [r["local_steps"] for r in logged] == [[4, 4, 4, 3]] * 2 + [[2, 2, 2, 2]]
    assert outcome.step == 10 and "last round takes the 2 steps that are left" in told
    assert "last round 2 steps" in told


def test_start_names_the_graph_and_its_bytes(whole):
    _, setup, _, _, told = whole
    params = models.abstract_params(setup.model)
    assert make_outer(setup.config).describe(params, 4) in told
    for words in (
        "4 islands of 1 x cpu",
        "spectral gap",
        "bytes sent by a worker in a round",
        "(4, 4, 4, 3) steps a round",
        "no exchange inside an island",
    ):
        assert words in told, words


def test_start_warns_of_workers_that_drift_apart_by_themselves(corpus):
    config = in_rounds(corpus, outer__name="noloco", outer__momentum=0.9)
    told = startup_text(build(config), Path("run"), State(0, None, None, None, {}))
    assert "WARNING    the squared disagreement of the workers grows by a factor of 1.035 a round" in told


def test_what_is_measured(whole):
    _, setup, outcome, records, told = whole
    logged = [r for r in records if "loss" in r]
    for r in logged:
        assert r["loss_worker_min"] < r["loss"] < r["loss_worker_max"]
    # One worker left out one of its sequences of two rows in each of the two whole rounds.
    assert [r["sequences_left_out"] for r in logged] == [2, 4, 4]
    sent = 4 * setup.parameters  # one partner, float32
    assert [r["bytes_sent_total"] for r in logged] == [sent, 2 * sent, 3 * sent]
    assert logged[-1]["dense_bytes_total"] == 10 * 2 * 3 / 4 * 4 * setup.parameters
    np.testing.assert_allclose(
        [r["lr"] for r in logged], [float(setup.schedule(c)) for c in (3, 7, 9)], rtol=1e-6
    )
    checked = [r for r in records if "validation_loss" in r]
    assert [r["step"] for r in checked] == [4, 8, 10]
    for r in checked:
        assert r["consensus_distance"] > 0
        assert r["validation_loss_worker_min"] < r["validation_loss_worker_max"]
    summary = outcome.summary
    assert summary["consensus_distance"] == checked[-1]["consensus_distance"] and summary["workers"] == 4
    assert summary["validation_loss"] < logged[0]["loss"] - 0.02  # it learns
    assert "of the mean model, single workers" in told and "consensus distance" in told


def test_figures_of_a_round_wait_for_nobody(whole):
    """They stay with their workers until a line is due; an all-reduce in each round would make all wait for the slowest."""
    method, sharding = whole[1].method, NamedSharding(whole[1].mesh, PartitionSpec("worker"))
    x, n = (jax.device_put(np.zeros(4, dtype), sharding) for dtype in (np.float32, np.int32))
    program = method._figures.lower({"loss": x}, n, n, n).compile()
    assert not re.search("all-|collective|permute", program.as_text())


def test_last_round_s_bytes_are_over_its_own_steps(whole):
    """Two steps shared them, not four."""
    _, setup, outcome, records, _ = whole
    assert outcome.summary["bytes_per_step"] == 4 * setup.parameters / 2
    assert outcome.summary["local_steps"] != outcome.summary["local_steps_set"] == [4, 4, 4, 3]
    assert [r["skipped"] for r in records if "loss" in r] == [0, 0, 0]


def test_worker_that_is_not_finite(corpus, tmp_path):
    """Its round is dropped and named, once; the loss is that of the others. It was NaN for all."""
    setup = build(in_rounds(corpus, run__steps=8))
    loader = start(setup).loader
    marked = [next(loader)["tokens"].reshape(4, 2, 33)[2] for _ in range(3)][-1]
    loader.close()
    plain = local_step(models.loss_fn(setup.model), setup.tx, 1)

    def poisoned(params, state, batch):
        params, state, measured = plain.step(params, state, batch)
        bad = jnp.where(jnp.all(batch["tokens"] == marked), jnp.nan, 0.0)
        return jax.tree.map(lambda x: x + bad, params), state, measured | {"loss": measured["loss"] + bad}

    step = gasloc_jax.LocalStep(plain.init, poisoned)
    setup = dataclasses.replace(
        setup, step=gasloc_jax.make_round(step, make_outer(setup.config), setup.mesh, "worker")
    )
    folder = tmp_path / "run"
    runs.new_folder(settings.update(setup.config, {"run.folder": str(folder)}))
    out = io.StringIO()
    outcome = train(setup, folder, out=out)
    logged = [r for r in metrics.read(folder) if "loss" in r]
    assert [(r["skipped"], r["dropped_workers"]) for r in logged] == [(1, [2]), (1, [])]
    for r in logged:
        assert r["loss_worker_min"] < r["loss"] < r["loss_worker_max"] and r["loss"] == r["loss_mean"]
    assert out.getvalue().count("worker 2: parameters not finite, its round was dropped") == 1
    assert "1 rounds x workers dropped" in out.getvalue() and outcome.summary["skipped"] == 1


def test_figures_are_those_of_the_workers_that_count():
    found = {
        "loss": [1.0, np.nan, 3.0, 2.0], "grad_norm": [1.0, 1.0, np.inf, 3.0], "clip_factor": [1.0, 0.5, 0.5, 0.5],
        "dropped": [0, 0, 0, 0], "skipped": [0, 0, 0, 0], "skipped_steps": [0, 2, 1, 0], "updates": [4, 2, 3, 4],
    }  # fmt: skip
    found = {name: np.array(x) for name, x in found.items()}
    line = rounds._over_workers(found, rounds._sound(found))
    assert [line[name] for name in ("loss", "grad_norm", "clip_factor")] == [1.5, 2.0, 0.75]
    assert [line[name] for name in ("loss_worker_min", "loss_worker_max", "skipped_steps")] == [1.0, 2.0, 3]
    assert rounds._sound(found | {"dropped": np.array([1, 0, 0, 0])}).tolist() == [False, False, False, True]
    assert np.isnan(rounds._over_workers(found, np.zeros(4, bool))["loss_worker_max"])


def test_run_that_trained_nobody_is_a_failure(whole):
    _, setup, _, _, _ = whole
    state = saved_state(setup, whole[0], 10).opt_state
    assert setup.method.failure(10, state) is None
    lost = state._replace(skipped=state.round)
    assert "every round of every worker was dropped" in setup.method.failure(10, lost)
    one = jax.device_put(np.array([3, 3, 2, 3], np.int32), state.round.sharding)
    assert setup.method.failure(10, state._replace(skipped=one)) is None


def test_scape_with_nothing_to_send_is_told_of(corpus):
    told = [
        startup_text(build(in_rounds(corpus, **change)), Path("run"), State(0, None, None, None, {}))
        for change in ({}, {"optimizer__name": "scape"}, {"optimizer__name": "scape", "mesh__data": 2})
    ]
    assert ["saves no bytes. Use --optimizer.name adamw" in text for text in told] == [False, True, False]


def test_report_shows_the_workers(whole):
    text = (whole[0] / "report.html").read_text()
    for words in ("loss of single workers", "consensus distance", "validation loss of single workers"):
        assert words in text, words


def test_the_mean_is_evaluated_and_taken_over(whole, corpus):
    """By hand from the saved parameters of all workers, and by a new run that starts from them."""
    folder, setup, outcome, records, _ = whole
    found = saved_state(setup, folder, 10)
    mean = jax.tree.map(lambda x: np.mean(np.asarray(x), axis=0, dtype=np.float32), found.params)
    other = build(tiny(corpus, optimizer__name="adamw", checkpoint__parameters_from=str(folder)))
    taken = start(other).params
    helpers.assert_close(taken, mean, terms=4)
    assert f"parameters of the mean of 4 workers, step 10 of {folder}" in startup_text(
        other, folder, start(other)
    )
    state = State(10, taken, None, None, {})
    assert validate(other, state, 1).loss == pytest.approx(outcome.summary["validation_loss"], rel=1e-5)
    losses = []
    for n in range(4):
        state.params = jax.tree.map(lambda x, n=n: jnp.asarray(np.asarray(x)[n]), found.params)
        state.params = jax.device_put(state.params, jax.tree.leaves(taken)[0].sharding)
        losses.append(validate(other, state, 1).loss)
    last = records[-1]
    assert last["validation_loss_worker_min"] == pytest.approx(min(losses), rel=1e-5)
    assert last["validation_loss_worker_max"] == pytest.approx(max(losses), rel=1e-5)


@pytest.mark.parametrize("worker", [0, 2])
def test_one_workers_parameters_are_taken_over(whole, corpus, worker):
    """Bit for bit, by a run that is none in rounds; a mean, or another worker's, differs."""
    source, changes = str(whole[0]), {"optimizer.name": "adamw", "checkpoint.parameters_worker": worker}
    state = start(build(tiny(corpus, **changes, checkpoint__parameters_from=source)))
    saved = jax.tree.map(np.asarray, saved_state(whole[1], whole[0], 10).params)
    helpers.assert_bit_equal(state.params, jax.tree.map(lambda x: x[worker], saved))
    assert state.source == f"worker {worker} of 4, step 10 of {whole[0]}"


def test_a_worker_that_is_not_there(whole, corpus):
    one = {"checkpoint.parameters_from": str(whole[0]), "checkpoint.parameters_worker": 4}
    with pytest.raises(
        ValueError, match=r"parameters_worker must be in 0\.\.3, got 4: .* Leave it out for their mean"
    ):
        start(build(tiny(corpus, optimizer__name="adamw", **one)))
    with pytest.raises(ValueError, match=r"parameters_worker must not be negative, got -1"):
        tiny(corpus, **one | {"checkpoint.parameters_worker": -1})
    with pytest.raises(
        ValueError, match=r"parameters_worker must come with checkpoint.parameters_from, got 0 alone"
    ):
        tiny(corpus, checkpoint__parameters_worker=0)


def test_rounds_are_those_of_the_library_on_each_workers_own_rows(whole, corpus):
    """The trainer adds nothing, and deals the rows as the data say: block n of every global batch is worker n's."""
    folder, setup, _, _, _ = whole
    config = setup.config
    state = setup.step.init(models.init_params(setup.model, config.run.seed))
    loader = make_loader(setup.data.train, global_batch=8, length=32, seed=config.run.seed, num_workers=4)
    for counts in ([4, 4, 4, 3], [4, 4, 4, 3], [2, 2, 2, 2]):
        read = [next(loader)["tokens"].reshape(4, 2, 33) for _ in range(max(counts))]
        read += [np.full_like(read[0], 7)] * (4 - len(read))  # never looked at
        state, _ = setup.step(state, {"tokens": np.stack(read, axis=1)}, counts)
    helpers.assert_bit_equal(state.params, saved_state(setup, folder, 10).params)


def test_resume_in_a_new_process_is_bit_exact(whole, tmp_path):
    folder, setup, _, records, _ = whole
    half = tmp_path / "half"
    shutil.copytree(folder, half)
    for step in (8, 10):
        shutil.rmtree(half / "checkpoints" / str(step))
    ended = pretrain("--resume", str(half), cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "going on from step 4" in ended.stdout
    for item in ("params", "opt_state", "data_state"):
        one, two = (getattr(saved_state(setup, where, 10), item) for where in (half, folder))
        if item == "data_state":
            assert one == two and one["step"] == 10 and one["method"]["sequences_left_out"] == 4
        else:
            helpers.assert_bit_equal(one, two)
    times = ("tokens_per_sec", "local_secs", "exchange_secs")
    timeless = [
        [{k: v for k, v in r.items() if k not in times} for r in kept]
        for kept in (metrics.read(half), records)
    ]
    assert timeless[0] == timeless[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"outer.learning_rate": 0.5}, "outer.learning_rate: 0.7 -> 0.5"),
        ({"outer.topology": "ring"}, "outer.topology: None -> 'ring'"),
        ({"outer.name": "noloco"}, "outer.name: 'gasloc' -> 'noloco'"),
        ({"outer.local_steps": 4}, "outer.local_steps: [4, 4, 4, 3] -> 4"),
        (
            {"outer.name": "none", "outer.local_steps": 10, "mesh.worker": 1, "mesh.data": 4},
            "mesh.worker: 4 -> 1",
        ),
    ],
)
def test_resume_with_another_outer_optimizer_is_refused(whole, changes, message):
    other = build(settings.update(whole[1].config, changes))
    with (
        Checkpoints(whole[0]) as checkpoints,
        pytest.raises(ValueError, match="nothing was loaded") as refused,
    ):
        restore(other, checkpoints)
    assert message in str(refused.value)


def test_scape_inside_islands(corpus, tmp_path):
    """Two islands of two devices: SCAPE over `data`, GASLoC over `worker`, by the settings alone."""
    config = in_rounds(
        corpus, optimizer__name="scape", mesh__worker=2, mesh__data=2, run__steps=4, data__accumulate=2,
        optimizer__dense=["norm", "attention", "up", "gate"],
    )  # fmt: skip
    setup, outcome, records, told = run(config, tmp_path / "run")
    found = saved_state(setup, tmp_path / "run", 4)
    kernels = [
        x
        for path, x in jax.tree.leaves_with_path(found.opt_state.inner)
        if ".h[" in jax.tree_util.keystr(path)
    ]
    assert any(x.shape[:2] == (2, 2) for x in kernels)  # a residual for each device of each island
    assert "2 islands of 2 x cpu" in told and "scape, density 0.1" in told and "per device and step" in told
    logged = [r for r in records if "loss" in r]
    inner = [setup.tx.wire(models.abstract_params(setup.model), num_workers=2, step=s) for s in range(1, 5)]
    assert logged[-1]["island_bytes_total"] == sum(w.total_bytes for w in inner)
    assert outcome.summary["validation_loss"] < np.log(61)
    expected = mask_figures(found.opt_state.inner)
    assert expected["mask_overlap"] > 0.1
    for name, value in expected.items():
        assert logged[-1][name] == pytest.approx(value, rel=1e-5), name
    assert "overlap of adjacent masks" in (tmp_path / "run" / "report.html").read_text()


def mask_figures(inner):
    """Means over islands by hand, bit by bit, from the saved state of two islands of two devices."""
    bits = lambda words: np.unpackbits(np.asarray(words).view(np.uint8), bitorder="little")  # noqa: E731
    h, mask, chosen = (optax.tree.get(inner, name) for name in ("h", "mask", "next_mask"))
    leaves, treedef = jax.tree.flatten(h)
    pairs = list(zip(leaves, treedef.flatten_up_to(mask), treedef.flatten_up_to(chosen), strict=True))
    found = []
    for island in range(2):
        size = sent = residual = overlap = selected = 0
        for x, last, coming in pairs:
            each = np.asarray(x)[island].reshape(2, -1)
            size += each.shape[1]
            if last is None:
                sent += each.shape[1]
                continue
            kept = bits(last[island])[: each.shape[1]].astype(bool)
            both = np.concatenate([bits(own) for own in np.asarray(coming)[island]])[: kept.size]
            sent += kept.sum()
            residual += np.sum(each[:, ~kept].astype(np.float64) ** 2) / 2
            overlap += np.sum(both[kept])
            selected += both.sum()
        found.append([sent / size, overlap / selected, np.sqrt(residual)])
    return dict(zip(("density", "mask_overlap", "residual_norm"), np.mean(found, axis=0), strict=True))


def test_micro_batches_have_the_gradient_of_the_whole_batch():
    """Sums instead of means, or a micro-batch left out, would change loss, gradient and step."""

    def loss_fn(params, batch):
        return jnp.mean((params["w"][batch["tokens"]] - 1.0) ** 2)

    params, tx = {"w": jnp.linspace(-1.0, 2.0, 9)}, scape_jax.adamw(optax.constant_schedule(1e-3))
    batch = {"tokens": np.random.default_rng(0).integers(0, 9, (8, 33), dtype=np.int32)}
    ends = []
    for accumulate in (1, 4):
        step = local_step(loss_fn, tx, accumulate)
        ends.append(jax.jit(step.step)(params, step.init(params), batch))
    helpers.assert_close((ends[1][0], ends[1][2]), (ends[0][0], ends[0][2]), terms=9)
    assert ends[0][2]["grad_norm"] > 0


def test_halves_that_are_timed_are_the_round(whole, corpus, tmp_path):
    """Times of both, a number for each worker, from the second round on; the first one's are the compiler's."""
    config = settings.update(
        whole[1].config, {"outer.measure": False, "checkpoint.every": 0, "eval.every": 0}
    )
    setup, _, untimed, _ = run(config, tmp_path / "run")
    helpers.assert_bit_equal(
        saved_state(setup, tmp_path / "run", 10).params, saved_state(setup, whole[0], 10).params
    )
    first, *later = [r for r in whole[3] if "loss" in r]
    for name in ("local_secs", "exchange_secs"):
        assert all(len(r[name]) == 4 and min(r[name]) > 0 for r in later) and name not in first
        assert not any(name in r for r in untimed)
    assert "  exchange " in whole[4] and len(whole[2].summary["exchange_secs"]) == 4


def test_measuring_is_off_where_it_would_end_the_overlap():
    measures = lambda **given: settings.OuterConfig(name="gasloc", **given).measures  # noqa: E731
    assert [measures(), measures(delay=2), measures(measure=False), measures(measure=False, adapt=True)] == [
        True, False, False, True,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind"),
    [("diloco", gasloc_jax.GaslocState), ("local_sgd", gasloc_jax.GaslocState), ("dadam", gasloc_jax.GaslocState),
     ("local_dadam", gasloc_jax.GaslocState), ("noloco", gasloc_jax.NoLoCoState)],
)  # fmt: skip
def test_every_name_makes_its_outer_optimizer(corpus, name, kind):
    config = in_rounds(corpus, outer__name=name, outer__local_steps=1, outer__payload_dtype="int8")
    outer = make_outer(config)
    assert outer.axis_name == "worker" and outer.mixer.payload.dtype == jnp.int8
    graphs = outer.pool(4)
    assert graphs.all_reduce is (name in ("diloco", "local_sgd"))
    assert outer.local_steps == (1 if name == "dadam" else None)
    abstract = build(config).method.abstract()[1]
    assert isinstance(abstract.outer, kind)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"outer.local_steps": 0}, r"outer.local_steps must be at least 1 .* got 0"),
        ({"outer.local_steps": [4, 4]}, r"list of mesh.worker = 4 numbers, got 2"),
        ({"outer.local_steps": []}, r"outer.local_steps must be at least 1"),
        ({"outer.fragments": 9}, r"outer.fragments must be at most the model's 2 layers, got 9"),
        ({"outer.fragments": 0}, r"outer.fragments must be at least 1, got 0"),
        ({"outer.delay": 4}, r"outer.delay must be in \[0, 4\)"),
        ({"outer.delay": 2}, r"last round of more than outer.delay = 2 steps, got 2. Use 8 steps"),
        ({"outer.momentum": 1.0}, r"outer.momentum must be in \[0, 1\), got 1.0"),
        ({"outer.learning_rate": -1}, r"outer.learning_rate must be finite and not negative"),
        ({"outer.name": "gaslok"}, r"outer.name must be one of .* Did you mean 'gasloc'"),
        ({"outer.name": "none"}, r"mesh.worker must be 1 without an outer optimizer, got 4"),
        ({"outer.name": "none", "mesh.worker": 1, "outer.adapt": True},
         r"outer.local_steps, outer.adapt must be left out .* got 4, True. .* --outer.local_steps 10 --outer.adapt False"),
        ({"outer.name": "dadam"}, r"outer.local_steps must be 1 for dadam, got 4. Give --outer.local_steps 1, or"),
        ({"outer.name": "local_sgd", "outer.momentum": 0.5}, r"must be left out for local_sgd"),
        ({"outer.name": "diloco", "outer.topology": "ring"}, r"outer.topology must be complete for diloco, got ring"),
        ({"outer.drift_weight": "steps", "outer.fragments": 2}, r"outer.drift_weight must be uniform"),
        ({"outer.adapt": True, "outer.local_steps": [4, 4, 4, 4]}, r"must be one number with outer.adapt"),
        ({"outer.adapt": True, "outer.fewest_steps": 5}, r"must be in \[1, outer.local_steps = 4\], got 5"),
        ({"outer.measure": True, "outer.delay": 1}, r"outer.delay must be 0 with outer.adapt or outer.measure"),
        ({"data.global_batch": 6}, r"mesh.worker x mesh.data x data.accumulate = 4 x 1 x 1, got 6"),
        ({"mesh.worker": 0}, r"mesh.worker must be at least 1, got 0"),
    ],
)  # fmt: skip
def test_wrong_settings_are_refused(corpus, changes, message):
    with pytest.raises(ValueError, match=message):
        settings.update(in_rounds(corpus), changes)


def test_more_islands_than_devices(corpus):
    with pytest.raises(
        ValueError, match=r"mesh.worker x mesh.data = 8 x 2 needs 16 devices, this process has 8"
    ):
        build(in_rounds(corpus, mesh__worker=8, mesh__data=2, data__global_batch=16))


def test_demo_shrunk(corpus, tmp_path):
    """The published settings on a small model and little text, as the command line gives them."""
    flags = {
        "model.preset": "tiny", "model.vocab_size": 61, "data.source": corpus, "data.length": 32, "run.steps": 30,
        "eval.every": 20, "eval.batches": 1, "eval.final_batches": 1, "log.tensorboard": False,
    }  # fmt: skip
    ended = pretrain(
        "--config", "gasloc-demo", *(str(x) for k, v in flags.items() for x in (f"--{k}", v)), cwd=tmp_path
    )
    assert ended.returncode == 0, ended.stderr
    assert "8 islands of 1 x cpu" in ended.stdout and "step 30/30" in ended.stdout
    folder = tmp_path / "runs" / "gasloc-demo-1"
    losses = [r["validation_loss"] for r in metrics.read(folder) if "validation_loss" in r]
    assert len(losses) == 2 and losses[1] < losses[0] and (folder / "report.html").is_file()
    assert all(len(r["exchange_secs"]) == 8 for r in metrics.read(folder) if "loss" in r and r["step"] > 10)
