"""Hugging Face folders: names and layouts, tied heads (case 28), rotary scaling (case 27), clear refusals."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy

import models
from tests.helpers import assert_bit_equal
from tests.models import reference_numpy as reference
from tests.models.random_models import random_params, random_tokens
from tests.quick_compile import quickest_compile  # noqa: F401

LLAMA = models.preset("tiny")
TIED = dataclasses.replace(LLAMA, tied_head=True)
GPT = models.preset("tiny_gpt")
SCALED = dataclasses.replace(
    LLAMA,
    head_dim=64,
    rope_theta=500000.0,
    rope_scaling=models.RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=8192
    ),
)


APPLY = jax.jit(models.apply, static_argnums=0)


@functools.cache
def trained(config, steps=2):
    """Parameters and optimizer state after two steps from random parameters."""
    params = random_params(config)
    tx = optax.adam(1e-2)
    batch = {"tokens": random_tokens(config, 4, 17)}

    @jax.jit
    def step(params, state):
        updates, state = tx.update(jax.grad(models.loss_fn(config))(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(steps):
        params, state = step(params, state)
    return params, state


def edit_config(folder, **changes):
    values = json.loads((folder / "config.json").read_text())
    values.update(changes)
    (folder / "config.json").write_text(json.dumps(values))


def tensors_of(folder):
    return safetensors.numpy.load_file(folder / "model.safetensors")


@pytest.mark.parametrize("config", [LLAMA, TIED, GPT, SCALED], ids=["llama", "tied", "gpt", "scaled"])
def test_round_trip_is_exact(config, tmp_path):
    params = trained(config)[0] if config in (LLAMA, TIED) else random_params(config)
    models.export_hf(config, params, tmp_path / "model")
    again, loaded = models.import_hf(tmp_path / "model")
    assert again == config
    assert_bit_equal(loaded, params)
    tokens = jnp.arange(20, dtype=jnp.int32).reshape(2, 10)
    assert_bit_equal(APPLY(again, loaded, tokens), APPLY(config, params, tokens))


def test_tied_head_is_one_tensor_and_one_optimizer_entry(tmp_path):
    params, state = trained(TIED)
    models.export_hf(TIED, params, tmp_path)
    names = tensors_of(tmp_path)
    of_vocab = [n for n, a in names.items() if TIED.vocab_size in a.shape]
    assert of_vocab == ["model.embed_tokens.weight"] and all(a.size for a in names.values())
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is True
    for moment in (state[0].mu, state[0].nu):
        assert sum(TIED.vocab_size in leaf.shape for leaf in jax.tree.leaves(moment)) == 1


def test_gradient_of_a_tied_head_is_the_sum_of_both_uses():
    params, _ = trained(TIED)
    batch = {"tokens": jnp.arange(24, dtype=jnp.int32).reshape(2, 12)}
    untied = {**params, "head": {"kernel": params["embed"]["embedding"].T}}
    tied_grad = jax.jit(jax.grad(models.loss_fn(TIED)))(params, batch)["embed"]["embedding"]
    grads = jax.jit(jax.grad(models.loss_fn(LLAMA)))(untied, batch)
    both = grads["embed"]["embedding"] + grads["head"]["kernel"].T
    np.testing.assert_allclose(tied_grad, both, rtol=1e-5, atol=1e-7)
    assert np.any(grads["embed"]["embedding"]) and np.any(grads["head"]["kernel"])


def test_untied_head_is_two_tensors(tmp_path):
    params, _ = trained(LLAMA)
    models.export_hf(LLAMA, params, tmp_path)
    tensors = tensors_of(tmp_path)
    assert tensors["lm_head.weight"].shape == tensors["model.embed_tokens.weight"].shape == (61, 32)
    assert not np.array_equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is False


def test_flag_and_file_in_conflict(tmp_path):
    models.export_hf(LLAMA, trained(LLAMA)[0], tmp_path / "untied")
    edit_config(tmp_path / "untied", tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"tie_word_embeddings true .* no lm_head.weight that differs"):
        models.import_hf(tmp_path / "untied")
    models.export_hf(TIED, trained(TIED)[0], tmp_path / "tied")
    edit_config(tmp_path / "tied", tie_word_embeddings=False)
    with pytest.raises(
        ValueError, match=r"tie_word_embeddings false the file must hold lm_head.weight, got none"
    ):
        models.import_hf(tmp_path / "tied")


def test_a_second_copy_of_a_tied_head_is_accepted_if_equal_and_refused_if_empty(tmp_path):
    params, _ = trained(TIED)
    models.export_hf(TIED, params, tmp_path)
    tensors = tensors_of(tmp_path)
    head = tensors["model.embed_tokens.weight"].copy()
    safetensors.numpy.save_file({**tensors, "lm_head.weight": head}, tmp_path / "model.safetensors")
    assert_bit_equal(models.import_hf(tmp_path)[1], params)
    empty = np.zeros((0, 32), np.float32)
    safetensors.numpy.save_file({**tensors, "lm_head.weight": empty}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"no lm_head.weight that differs .* shape \(0, 32\)"):
        models.import_hf(tmp_path)


def test_llama_layout_is_that_of_torch_linear(tmp_path):
    """(out, in) kernels under the family's names; every tensor of a two-layer model, nothing else."""
    params, _ = trained(LLAMA)
    models.export_hf(LLAMA, params, tmp_path)
    tensors = tensors_of(tmp_path)
    per_layer = [
        "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
        "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    ]  # fmt: skip
    want = {f"model.layers.{i}.{n}.weight" for i in range(2) for n in per_layer}
    assert set(tensors) == want | {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert tensors["model.layers.1.self_attn.k_proj.weight"].shape == (16, 32)
    layers = params["layers"]
    np.testing.assert_array_equal(
        tensors["model.layers.1.mlp.down_proj.weight"], np.asarray(layers["mlp"]["down"]["kernel"][1]).T
    )
    np.testing.assert_array_equal(
        tensors["model.layers.0.post_attention_layernorm.weight"], layers["mlp_norm"]["scale"][0]
    )


def test_gpt_layout_computes_the_same_from_the_file_alone(tmp_path):
    """GPT-2's own formula on the file's tensors: c_attn holds query, key, value side by side as (in, out)."""
    params = random_params(GPT)
    models.export_hf(GPT, params, tmp_path)
    f = {k: np.float64(v) for k, v in tensors_of(tmp_path).items()}
    assert f["transformer.h.0.attn.c_attn.weight"].shape == (32, 96)
    tokens = np.array([3, 1, 4, 1, 5])
    x = f["transformer.wte.weight"][tokens] + f["transformer.wpe.weight"][:5]

    def norm(x, name):
        y = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return y * f[f"transformer.{name}.weight"] + f[f"transformer.{name}.bias"]

    def conv1d(x, name):
        return x @ f[f"transformer.{name}.weight"] + f[f"transformer.{name}.bias"]

    for i in range(2):
        q, k, v = np.split(conv1d(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn"), 3, axis=-1)
        heads = []
        for h in range(4):
            c = slice(8 * h, 8 * h + 8)
            scores = np.where(np.tri(5), q[:, c] @ k[:, c].T / np.sqrt(8), -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(weights / weights.sum(-1, keepdims=True) @ v[:, c])
        x = x + conv1d(np.concatenate(heads, -1), f"h.{i}.attn.c_proj")
        hidden = reference.gelu_tanh(conv1d(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc"))
        x = x + conv1d(hidden, f"h.{i}.mlp.c_proj")
    logits = norm(x, "ln_f") @ f["transformer.wte.weight"].T
    got = APPLY(GPT, params, jnp.asarray(tokens[None], jnp.int32))[0]
    np.testing.assert_allclose(got, logits, rtol=1e-4, atol=1e-5)


def test_bare_gpt2_names_constants_and_several_files_are_read(tmp_path):
    params = random_params(GPT)
    models.export_hf(GPT, params, tmp_path)
    bare = {k.removeprefix("transformer."): v for k, v in tensors_of(tmp_path).items()}
    bare["h.0.attn.bias"] = np.ones((1, 1, 32, 32), np.float32)  # the causal mask, in files of old versions
    names = sorted(bare)
    (tmp_path / "model.safetensors").unlink()
    for part in range(2):
        chosen = {k: bare[k] for k in names[part::2]}
        safetensors.numpy.save_file(chosen, tmp_path / f"model-{part}.safetensors")
    assert_bit_equal(models.import_hf(tmp_path)[1], params)


def test_bfloat16_file_comes_back_as_float32(tmp_path):
    params, _ = trained(LLAMA)
    models.export_hf(LLAMA, params, tmp_path, dtype="bfloat16")
    assert all(a.dtype == jnp.bfloat16 for a in tensors_of(tmp_path).values())
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"
    _, loaded = models.import_hf(tmp_path)
    assert_bit_equal(loaded, jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params))


def test_exported_config_carries_rope_scaling(tmp_path):
    models.export_hf(SCALED, random_params(SCALED), tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["rope_scaling"] == {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    assert (values["rope_theta"], values["head_dim"]) == (500000.0, 64)
    assert values["architectures"] == ["LlamaForCausalLM"]


def test_newer_and_older_spellings_of_rope_scaling(tmp_path):
    models.export_hf(SCALED, random_params(SCALED), tmp_path)
    numbers = json.loads((tmp_path / "config.json").read_text())["rope_scaling"]
    edit_config(
        tmp_path, rope_scaling=None, rope_theta=None, rope_parameters={**numbers, "rope_theta": 500000.0}
    )
    assert models.import_hf(tmp_path)[0] == SCALED
    older = {"type": "llama3", **{k: v for k, v in numbers.items() if k != "rope_type"}}
    edit_config(tmp_path, rope_scaling=older, rope_theta=500000.0, rope_parameters=None)
    assert models.import_hf(tmp_path)[0] == SCALED
    edit_config(tmp_path, rope_scaling={"rope_type": "default"})
    assert models.import_hf(tmp_path)[0] == dataclasses.replace(SCALED, rope_scaling=None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "scaling type must be .* got 'linear'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "scaling type must be .* got 'yarn'"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "scaling type must be .* got 'dynamic'",
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "must give exactly .* got .'factor'."),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},
            r"one rotary setting, got rope_theta",
        ),
        ({"model_type": "mamba"}, "model_type 'gpt2' or 'llama', got 'mamba'"),
        ({"hidden_act": "gelu"}, 'hidden_act = "silu", got "gelu"'),
        ({"attention_bias": True}, "attention_bias = false, got true"),
        ({"sliding_window": 16}, "sliding_window below max_position_embeddings, got 16"),
        ({"num_attention_heads": 7, "num_key_value_heads": 2}, "n_heads 7 and n_kv_heads 2"),
        (
            {"intermediate_size": 60},
            r"gate_proj.weight must have shape \(60, 32\) by config.json, got \(64, 32\)",
        ),
        ({"num_hidden_layers": 3}, "must hold model.layers.2.input_layernorm.weight"),
        ({"num_hidden_layers": 1}, r"with 1 layers, got also \['model.layers.1"),
    ],
)
def test_refusals(changes, message, tmp_path):
    models.export_hf(LLAMA, trained(LLAMA)[0], tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        models.import_hf(tmp_path)


def test_gpt_refusals(tmp_path):
    models.export_hf(GPT, random_params(GPT), tmp_path)
    for changes, message in [
        ({"activation_function": "relu"}, 'activation_function = "gelu_new", got "relu"'),
        ({"activation_function": "gelu_new", "tie_word_embeddings": False}, "tie_word_embeddings = true"),
    ]:
        edit_config(tmp_path, **changes)
        with pytest.raises(ValueError, match=message):
            models.import_hf(tmp_path)
    wide = dataclasses.replace(GPT, head_dim=16)
    with pytest.raises(ValueError, match=r"head_dim \* n_heads equal to width, got 16 \* 4 and 32"):
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), models.abstract_params(wide))
        models.export_hf(wide, zeros, tmp_path)


def test_missing_files_and_keys(tmp_path):
    with pytest.raises(ValueError, match=r"must hold config.json"):
        models.import_hf(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 5}))
    with pytest.raises(ValueError, match=r"must have .*'hidden_size'.*got none"):
        models.import_hf(tmp_path)
    models.export_hf(LLAMA, trained(LLAMA)[0], tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"must hold .safetensors files"):
        models.import_hf(tmp_path)


def test_settings_override_on_import_and_params_must_fit_on_export(tmp_path):
    models.export_hf(LLAMA, trained(LLAMA)[0], tmp_path)
    config, _ = models.import_hf(tmp_path, dtype="bfloat16", remat=True)
    assert config == dataclasses.replace(LLAMA, dtype="bfloat16", remat=True)
    with pytest.raises(ValueError, match=r"params must fit the llama config"):
        models.export_hf(TIED, trained(LLAMA)[0], tmp_path)
