"""Settings: values of any spelling, ranges, unknown keys, presets, files, command line (cases 26 and 29)."""

import dataclasses
import json
import math
import re

import pytest

import models
from scripts import pretrain
from training import config as settings
from training.presets import PRESETS


def updated(**values):
    return settings.update(settings.preset("demo"), {k.replace("__", "."): v for k, v in values.items()})


@pytest.mark.parametrize("name", PRESETS)
def test_preset_is_whole_and_survives_json(name, tmp_path):
    config = settings.preset(name)
    config.save(tmp_path / "config.json")
    assert settings.Config.load(tmp_path / "config.json") == config
    assert len((tmp_path / "config.json").read_text().splitlines()) <= 110  # one screen
    assert config.model.build().max_length >= config.data.length


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama500m", (100_000, 1024, 4096, 3e-4, 3e-5, 2000, 0.9, 0.95, 0.1, 1.0)),
        ("llama1p8b", (100_000, 1024, 4096, 3e-4, 3e-5, 2000, 0.9, 0.95, 0.1, 1.0)),
        ("gpt345m", (100_000, 512, 1024, 1.5e-4, 1e-5, 5000, 0.9, 0.999, 0.01, 1.0)),
    ],
)
def test_presets_are_the_papers_runs(name, expected):
    c = settings.preset(name)
    warmup = c.schedule.warmup_fraction * c.run.steps
    assert expected == (
        c.run.steps, c.data.global_batch, c.data.length, c.schedule.learning_rate,
        c.schedule.end_learning_rate, warmup, c.optimizer.b1, c.optimizer.b2, c.optimizer.weight_decay,
        c.optimizer.clip_norm,
    )  # fmt: skip
    assert c.model.build() == models.preset(name)


def test_overrides_change_only_what_they_name():
    base, changed = settings.preset("demo"), updated(optimizer__density=0.01)
    differing = {k for k, v in settings.dotted(changed).items() if settings.dotted(base)[k] != v}
    assert differing == {"optimizer.density"}


@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        (
            ".yaml",
            "schedule:\n  learning_rate: 3e-4\noptimizer.eps: 1e-8\nmodel:\n  tie_embeddings: 'False'\n",
        ),
        (
            ".json",
            '{"schedule": {"learning_rate": "3e-4"}, "optimizer.eps": "1e-8",'
            ' "model": {"tie_embeddings": false}}',
        ),
    ],
)
def test_numbers_and_flags_in_files(suffix, text, tmp_path):
    file = tmp_path / f"settings{suffix}"
    file.write_text(text)
    config = settings.update(settings.preset("demo"), settings.read_values(file))
    assert config.schedule.learning_rate == 0.0003 and isinstance(config.schedule.learning_rate, float)
    assert config.optimizer.eps == 1e-8
    assert config.model.tie_embeddings is False and config.model.build().tied_head is False


def test_same_values_from_the_command_line(tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("optimizer.density: 0.5\nschedule.learning_rate: 1e-2\n")
    config, resumed = pretrain.parse(
        ["--config", "demo", "--config-file", str(file), "--optimizer.density", "0.01", "--mesh.data", "4"]
        + ["--run.steps", "100", "--model.tie_embeddings", "False", "--schedule.end_learning_rate", "1e-5"]
    )
    assert resumed is None
    assert (config.optimizer.density, config.mesh.data, config.run.steps) == (0.01, 4, 100)
    assert config.schedule.learning_rate == 1e-2  # the file's value, where the command line has none
    assert config.schedule.end_learning_rate == 1e-5
    assert config.model.tie_embeddings is False
    assert settings.preset("demo").model.build().tied_head is True  # so False above is not the default


@pytest.mark.parametrize(
    "arguments",
    [
        ["--optimizer.sparisty", "0.9"],
        ["--optimizer.density", "0"],
        ["--optimizer.density", "1.5"],
        ["--optimizer.density", "nan"],
        ["--optimizer.b1", "1.0"],
        ["--model.tie_embeddings", "maybe"],
        ["--model.n_heads", "7", "--model.n_kv_heads", "2"],
    ],
)
def test_command_line_refuses(arguments, capsys):
    try:
        code = pretrain.main(["--config", "demo", *arguments])
    except SystemExit as ended:  # of the option parser: the form of an option or of a value
        code = ended.code
    assert code == 2
    told = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert arguments[1] in told or "n_heads 7" in told
    if arguments[0] == "--optimizer.sparisty":
        assert "--optimizer.density" in told  # the nearest name: sparsity is 1 - density


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "optimizer.sparisty",
            0.9,
            r"unknown setting 'optimizer.sparisty'. Did you mean 'optimizer.density'",
        ),
        ("optimizer.staleness_powr", 1, r"Did you mean 'optimizer.staleness_power'"),
        ("optimzer.density", 0.1, r"unknown setting 'optimzer.density'. Did you mean 'optimizer.density'"),
        ("optimzer", {}, r"Did you mean 'optimizer'"),
        ("run.steps.more", 1, r"has no keys of its own"),
        ("optimizer", 3, r"optimizer is a section, got 3"),
        ("optimizer.density", 0, r"optimizer.density must be in \(0, 1\], got 0.0"),
        ("optimizer.density", 1.5, r"optimizer.density must be in \(0, 1\], got 1.5"),
        ("optimizer.density", math.nan, r"optimizer.density must be in \(0, 1\], got nan"),
        (
            "optimizer.density",
            "dense",
            r"optimizer.density must be a number such as 3e-4, got the text 'dense'",
        ),
        ("optimizer.density", True, r"optimizer.density must be a number, got True"),
        ("optimizer.b1", 1.0, r"optimizer.b1 must be in \[0, 1\), got 1.0"),
        ("optimizer.b2", -0.1, r"optimizer.b2 must be in \[0, 1\)"),
        ("optimizer.eps", 0, r"optimizer.eps must be positive"),
        ("optimizer.weight_decay", math.inf, r"optimizer.weight_decay must be finite"),
        ("optimizer.clip_norm", math.nan, r"optimizer.clip_norm must be finite"),
        ("optimizer.mask_every", 0, r"optimizer.mask_every must be at least 1"),
        ("optimizer.name", "adamsw", r"optimizer.name must be one of scape, .*Did you mean 'adamw'"),
        ("optimizer.dense", "norm", r"optimizer.dense must be a list of str"),
        ("schedule.learning_rate", 0, r"schedule.learning_rate must be positive"),
        ("schedule.end_learning_rate", 1, r"schedule.end_learning_rate must be in \[0, learning_rate"),
        ("schedule.warmup_fraction", 200, r"schedule.warmup_fraction must be a fraction"),
        ("run.steps", 1.5, r"run.steps must be a whole number, got 1.5"),
        ("run.steps", "many", r"run.steps must be a whole number, got the text 'many'"),
        ("run.name", "a/b", r"run.name must be a word"),
        ("mesh.data", 0, r"mesh.data must be at least 1"),
        ("mesh.data", 3, r"data.global_batch must be divisible by mesh.data x data.accumulate = 3 x 1"),
        ("data.accumulate", 3, r"data.global_batch must be divisible"),
        ("data.length", 4096, r"data.length must be at most the model's max_length 128, got 4096"),
        ("model.tie_embeddings", "maybe", r"model.tie_embeddings must be True or False, got 'maybe'"),
        ("model.preset", "llama500", r"^model.preset must be one of .*Did you mean 'llama500m'"),
        ("model.preset", "nope", r"^model.preset must be one of .*, got 'nope'. Use one of these"),
        ("model.n_layers", 0, r"^model.n_layers must be at least 1, got 0"),
        ("model.width", 132, r"^model.width must be a multiple of 2 x n_heads, got width 132 and n_heads 4"),
        (
            "optimizer.foo",
            1,
            r"unknown setting 'optimizer.foo'. Known ones: optimizer.name, optimizer.density, ",
        ),
        ("foo", 1, r"unknown setting 'foo'. Known ones: checkpoint, data, "),
        (
            "model.n_heads",
            7,
            r"^model.width must be a multiple of 2 x n_heads, got width 128 and n_heads 7.*Use 126",
        ),
        ("model.n_kv_heads", 3, r"^model.n_kv_heads must divide n_heads, got n_heads 4 and n_kv_heads 3"),
    ],
)
def test_bad_value_is_named_with_what_must_hold(key, value, message):
    with pytest.raises(ValueError, match=message):
        settings.update(settings.preset("demo"), {key: value})


def test_gpt_has_no_choice_of_kv_heads():
    with pytest.raises(
        ValueError, match=r"model.n_kv_heads must be left out for gpt345m, got 4. A GPT has no"
    ):
        settings.ModelConfig(preset="gpt345m", n_kv_heads=4)


def test_whole_numbers_in_float_clothes():
    assert updated(run__steps="1e3").run.steps == 1000
    assert updated(run__steps=20.0).run.steps == 20


def test_unreadable_files(tmp_path):
    with pytest.raises(ValueError, match="no settings file at"):
        settings.read_values(tmp_path / "absent.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ValueError, match=r"bad.json must be valid JSON"):
        settings.read_values(tmp_path / "bad.json")
    (tmp_path / "list.json").write_text(json.dumps([1]))
    with pytest.raises(ValueError, match=r"must hold keys and values"):
        settings.read_values(tmp_path / "list.json")
    (tmp_path / "settings.toml").write_text("")
    with pytest.raises(ValueError, match=r"must end in .json"):
        settings.read_values(tmp_path / "settings.toml")


def test_unknown_preset_names_the_nearest_if_one_is_near():
    with pytest.raises(
        ValueError, match=r"one of demo, gasloc-demo, tiny, .*got 'llama500'. Did you mean 'llama500m'"
    ):
        settings.preset("llama500")
    with pytest.raises(ValueError, match=r"one of demo, gasloc-demo, tiny, .*got 'nope'. Use one of these.$"):
        settings.preset("nope")


WRONG = {
    "run.steps": 0, "run.seed": -1, "data.global_batch": 9, "data.length": 129, "optimizer.density": 2,
    "optimizer.b1": 1, "optimizer.b2": -0.1, "optimizer.eps": 0, "optimizer.weight_decay": -1,
    "optimizer.block_size": 3, "optimizer.mask_every": 0, "optimizer.density_warmup_fraction": 2,
    "schedule.learning_rate": -1, "schedule.warmup_fraction": 2, "eval.every": -1, "checkpoint.every": -1,
    "checkpoint.keep": 0, "log.every": 0,
}  # fmt: skip


def test_all_that_is_wrong_is_told_at_once_with_what_to_do(capsys):
    """One line each, also for what holds between sections, from a caller as from the command line."""
    with pytest.raises(ValueError, match=rf"^{len(WRONG)} settings are wrong:\n") as refused:
        settings.update(settings.preset("demo"), WRONG)
    lines = str(refused.value).splitlines()[1:]
    assert {line.split()[0] for line in lines} == set(WRONG)
    for line in lines:
        assert re.search(r" must .+, got \S+\. \S", line), line
    options = [part for key, value in WRONG.items() for part in (f"--{key}", str(value))]
    assert pretrain.main(["--config", "demo", *options]) == 2
    assert capsys.readouterr().err.splitlines()[1:] == lines


def test_wrong_types_and_unknown_names_are_told_together():
    """A section with a value of another type is not compared; what holds elsewhere still is."""
    values = {
        "optimizer.b1": "high",
        "optimizer.b3": 1,
        "model.n_layers": 0,
        "model.width": -1,
        "mesh.data": 3,
    }
    with pytest.raises(ValueError, match=r"^5 settings are wrong") as refused:
        settings.update(settings.preset("demo"), values)
    told = str(refused.value)
    for part in (
        "optimizer.b1 must be a number",
        "'optimizer.b3'",
        "model.n_layers",
        "model.width",
        "= 3 x 1",
    ):
        assert part in told, part


def test_settings_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.preset("demo").run.steps = 3  # type: ignore[misc]
