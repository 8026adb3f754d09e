"""Config errors at construction (case 26), dict round trip, and presets with their published sizes."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

import models

LLAMA = dict(vocab_size=32, max_length=8, n_layers=1, width=28, n_heads=7, ff_width=16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_kv_heads": 2}, r"n_heads 7 and n_kv_heads 2.*\[1, 7\]"),
        ({"n_kv_heads": 0}, "n_kv_heads must be an integer of at least 1, got 0"),
        ({"n_kv_heads": 14}, "n_heads 7 and n_kv_heads 14"),
        ({"n_kv_heads": -1}, "n_kv_heads .* got -1"),
        ({"head_dim": 3}, "head_dim must be even, got 3.*use 4"),
        (
            {"width": 21},
            "width must be a multiple of 2 x n_heads, got width 21 and n_heads 7. Rotary.*Use 28",
        ),
        ({"width": 30}, "width must be a multiple of 2 x n_heads, got width 30 and n_heads 7.*Use 28"),
        ({"n_layers": 0}, "n_layers must be an integer of at least 1, got 0"),
        ({"vocab_size": 2.5}, "vocab_size must be an integer of at least 1, got 2.5"),
        ({"vocab_size": True}, "vocab_size must be an integer"),
        ({"n_heads": 0}, "n_heads must be an integer of at least 1, got 0"),
        ({"norm_eps": 0.0}, "norm_eps must be a finite number above 0, got 0.0"),
        ({"init_std": math.nan}, "init_std must be a finite number above 0, got nan"),
        ({"rope_theta": -1.0}, "rope_theta must be a finite number above 0"),
        ({"rope_scaling": {"factor": 8.0}}, "rope_scaling must be a models.RopeScaling or None"),
        ({"tied_head": "false"}, "tied_head must be True or False, got 'false'"),
        ({"remat": 1}, "remat must be True or False, got 1"),
        ({"dtype": "float16"}, "dtype must be one of .* got 'float16'"),
        ({"attention": "flash"}, "attention must be one of .* got 'flash'"),
        ({"loss_chunk": 0}, "loss_chunk must be an integer of at least 1, got 0"),
        ({"scan_unroll": 0}, "scan_unroll must be an integer of at least 1, got 0"),
    ],
)
def test_llama_config_errors(change, message):
    with pytest.raises(ValueError, match=message):
        models.LlamaConfig(**{**LLAMA, **change})


def test_gpt_accepts_odd_heads_and_rejects_uneven_ones():
    """No rotary, so an odd head size is fine; a width that does not divide is not."""
    assert models.GPTConfig(**{**LLAMA, "width": 21}).head_dim == 3
    with pytest.raises(ValueError, match=r"a multiple of n_heads, got width 30 and n_heads 7. Use 28"):
        models.GPTConfig(**{**LLAMA, "width": 30})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "yarn"}, "kind must be 'llama3', got 'yarn'"),
        ({"factor": 0.5}, "factor must be at least 1, got 0.5"),
        ({"high_freq_factor": 1.0}, "high 1.0 and low 1.0"),
        ({"original_length": 0}, "original_length must be an integer"),
    ],
)
def test_rope_scaling_errors(change, message):
    with pytest.raises(ValueError, match=message):
        models.RopeScaling(**change)


@pytest.mark.parametrize("name", models.PRESETS)
def test_dict_round_trip(name):
    config = models.preset(name)
    assert models.config_from_dict(config.to_dict()) == config
    assert hash(models.config_from_dict(config.to_dict())) == hash(config)


def test_dict_round_trip_with_rope_scaling():
    config = models.LlamaConfig(**LLAMA, rope_scaling=models.RopeScaling(factor=2.0))
    assert models.config_from_dict(config.to_dict()) == config
    assert config != models.LlamaConfig(**LLAMA)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_layer": 3}, "unknown key 'n_layer'. Did you mean 'n_layers'"),
        ({"family": "mamba"}, r"'family' must be one of \['gpt', 'llama'\], got 'mamba'"),
        ({"rope_scaling": {"kind": "linear", "factor": 2.0}}, "kind must be 'llama3', got 'linear'"),
        ({"rope_scaling": {"facter": 2.0}}, "unknown key 'facter'. Did you mean 'factor'"),
    ],
)
def test_config_from_dict_errors(change, message):
    with pytest.raises(ValueError, match=message):
        models.config_from_dict({**models.LlamaConfig(**LLAMA).to_dict(), **change})


def test_config_from_dict_names_missing_fields():
    with pytest.raises(ValueError, match=r"got none for \['n_layers'\]"):
        models.config_from_dict({"family": "gpt", **{k: v for k, v in LLAMA.items() if k != "n_layers"}})


# Published: GPT-2 medium 354.8 M; H2O-Danube3-500M 514 M; H2O-Danube-1.8B 1.83 B. The exact figures follow
# from the shapes: the sum is written out in test_count_formula.
SIZES = {
    "gpt345m": 354_823_168,
    "llama500m": 513_590_784,
    "llama1p8b": 1_831_201_280,
    "llama134m": 134_105_856,
    "llama551m": 551_345_664,
    "demo": 1_017_088,
    "tiny": 22_496,
    "tiny_gpt": 28_448,
}


def test_every_preset_has_a_size_here():
    assert set(SIZES) == set(models.PRESETS)


@pytest.mark.parametrize("name", models.PRESETS)
def test_preset_size(name):
    """By eval_shape: nothing is allocated, so the 1.8 B preset is as quick as the tiny one."""
    assert models.num_params(models.preset(name)) == SIZES[name]


@pytest.mark.parametrize("name", models.PRESETS)
def test_count_formula(name):
    c = models.preset(name)
    d, f, v, qk = c.width, c.ff_width, c.vocab_size, c.n_heads * c.head_dim
    if isinstance(c, models.GPTConfig):
        layer = 4 * d + (3 * (d * qk + qk) + qk * d + d) + (d * f + f + f * d + d)
        total = v * d + c.max_length * d + c.n_layers * layer + 2 * d
    else:
        layer = 2 * d + 2 * d * qk + 2 * d * c.n_kv_heads * c.head_dim + 3 * d * f
        total = v * d * (1 if c.tied_head else 2) + c.n_layers * layer + d
    assert models.num_params(c) == total


def test_published_shapes():
    c = models.preset("llama500m")
    assert (c.n_layers, c.width, c.n_heads, c.n_kv_heads, c.head_dim, c.ff_width) == (
        16,
        1536,
        16,
        8,
        96,
        4096,
    )
    assert (c.vocab_size, c.tied_head, c.rope_theta) == (32000, False, 100000.0)
    c = models.preset("llama1p8b")
    assert (c.n_layers, c.width, c.n_heads, c.n_kv_heads, c.head_dim, c.ff_width) == (
        24,
        2560,
        32,
        8,
        80,
        6912,
    )
    assert (c.vocab_size, c.tied_head, c.rope_theta) == (32000, False, 10000.0)
    c = models.preset("gpt345m")
    assert (c.n_layers, c.width, c.n_heads, c.ff_width, c.vocab_size, c.max_length) == (
        24, 1024, 16, 4096, 50257, 1024,
    )  # fmt: skip


def test_presets_compute_in_bfloat16_except_on_cpu():
    for name in models.PRESETS:
        small = name in ("demo", "tiny", "tiny_gpt")
        assert models.preset(name).dtype == ("float32" if small else "bfloat16")


def test_unknown_preset_names_the_nearest():
    with pytest.raises(ValueError, match=r"got 'llama500'\. Did you mean 'llama500m'"):
        models.preset("llama500")


def test_abstract_params_are_float32_with_readable_paths():
    abstract = models.abstract_params(models.preset("llama1p8b"))
    paths = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(abstract)[0]
    }
    assert paths["layers/attention/query/kernel"].shape == (24, 2560, 2560)
    assert paths["layers/attention/key/kernel"].shape == (24, 2560, 640)
    assert paths["head/kernel"].shape == (2560, 32000)
    assert all(leaf.dtype == jnp.float32 for leaf in paths.values())


def test_abstract_params_cannot_be_corrupted_by_a_caller():
    config = models.preset("tiny")
    models.abstract_params(config).pop("head")
    assert "head" in models.abstract_params(config)


def test_configs_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        models.preset("tiny").width = 3
