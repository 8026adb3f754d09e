"""Properties of the decoders: causality, head sharing, scan, remat, precision, initial values, one path."""

import dataclasses
import functools
import math
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import models
from models._layers import attention_implementation, rotary_tables
from tests.helpers import TOLERANCES, assert_bit_equal, assert_close, make_mesh
from tests.models.random_models import random_params, random_tokens
from tests.quick_compile import quickest_compile  # noqa: F401

FAMILIES = {"gpt": models.preset("tiny_gpt"), "llama": models.preset("tiny")}


APPLY = jax.jit(models.apply, static_argnums=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_causal(family):
    """Changing token t leaves the logits before t bit-equal, and changes those from t on."""
    config = FAMILIES[family]
    tokens = random_tokens(config)
    params = random_params(config)
    base = APPLY(config, params, tokens)
    for t in (0, 5, 11):
        changed = APPLY(config, params, tokens.at[:, t].set((tokens[:, t] + 1) % config.vocab_size))
        assert_bit_equal(changed[:, :t], base[:, :t])
        assert np.all(np.any(changed[:, t:] != base[:, t:], axis=-1))


@pytest.mark.parametrize("kv", [1, 2])
def test_grouped_heads_equal_full_heads_with_tiled_keys_and_values(kv):
    config = dataclasses.replace(FAMILIES["llama"], n_kv_heads=kv)
    full = dataclasses.replace(config, n_kv_heads=4)
    params = random_params(config)

    def tile(kernel_NxDxKE):
        n, d, _ = kernel_NxDxKE.shape
        heads = kernel_NxDxKE.reshape(n, d, kv, config.head_dim)
        return jnp.repeat(heads, 4 // kv, axis=2).reshape(n, d, -1)

    attention = params["layers"]["attention"]
    tiled = {**attention, **{k: {"kernel": tile(attention[k]["kernel"])} for k in ("key", "value")}}
    wide = {**params, "layers": {**params["layers"], "attention": tiled}}
    tokens = random_tokens(config)
    assert_close(APPLY(config, params, tokens), APPLY(full, wide, tokens), "model")


@pytest.mark.parametrize("family", FAMILIES)
def test_scan_equals_a_loop_over_layers(family):
    """The scan runs every layer, in order, on its own slice; unrolling does not change the result."""
    config = dataclasses.replace(FAMILIES[family], n_layers=3)
    params, tokens = random_params(config), random_tokens(config)
    model = models.merge(config, params)
    x = model.embed(tokens, "float32")
    rotary = None
    if family == "gpt":
        x = x + model.positions.embedding[...][None, : tokens.shape[1]]
    else:
        rotary = rotary_tables(config, tokens.shape[1])
    graphdef, stacked = nnx.split(model.layers)
    for i in range(3):
        x = nnx.merge(graphdef, jax.tree.map(lambda a, i=i: a[i], stacked))(x, rotary)
    looped = model.logits(model.final_norm(x))
    assert_close(APPLY(config, params, tokens), looped, "model")
    for unroll in (2, 8):
        unrolled = dataclasses.replace(config, scan_unroll=unroll)
        assert_close(APPLY(unrolled, params, tokens), looped, "model")


@pytest.mark.parametrize(("family", "unroll"), [("gpt", 1), ("llama", 2)])
def test_remat_changes_no_gradient_and_recomputes(family, unroll):
    config = dataclasses.replace(FAMILIES[family], scan_unroll=unroll)
    remat = dataclasses.replace(config, remat=True)
    batch = {"tokens": random_tokens(config)}
    plain, again = (
        jax.jit(jax.value_and_grad(models.loss_fn(c))).lower(random_params(config), batch)
        for c in (config, remat)
    )
    assert_close(
        again.compile()(random_params(config), batch), plain.compile()(random_params(config), batch), "model"
    )
    # More products in the program: the layer's forward pass stands in the backward pass too.
    assert again.as_text().count("dot_general") > plain.as_text().count("dot_general")


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_close_and_parameters_stay_float32(family):
    config = FAMILIES[family]
    half = dataclasses.replace(config, dtype="bfloat16")
    params, batch = random_params(config, std=0.05), {"tokens": random_tokens(config, length=13)}
    logits = APPLY(half, params, batch["tokens"])
    assert logits.dtype == jnp.float32
    exact = APPLY(config, params, batch["tokens"])
    scale = float(jnp.max(jnp.abs(exact)))
    error = float(jnp.max(jnp.abs(logits - exact)))
    # Some dozens of roundings of relative size 2^-8 add up at random: within 8 of them, and not bit-equal.
    assert 0 < error < 8 * TOLERANCES["bf16"].rtol * scale
    value, grads = jax.jit(jax.value_and_grad(models.loss_fn(half)))(params, batch)
    want_value, want = jax.jit(jax.value_and_grad(models.loss_fn(config)))(params, batch)
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, want_value, rtol=TOLERANCES["bf16"].rtol)
    for (path, g), w in zip(
        jax.tree_util.tree_flatten_with_path(grads)[0], jax.tree.leaves(want), strict=True
    ):
        assert g.dtype == jnp.float32, path
        if np.linalg.norm(w) > 1e-6:  # the key bias of GPT has gradient 0: softmax ignores a shift
            assert np.linalg.norm(g - w) < 0.05 * np.linalg.norm(w), path


def test_bfloat16_program_multiplies_bfloat16_only():
    """Every product has bfloat16 operands, or names the algorithm that rounds them: none falls to float32."""
    config = dataclasses.replace(FAMILIES["llama"], dtype="bfloat16")
    batch = {"tokens": random_tokens(config)}
    text = jax.jit(jax.grad(models.loss_fn(config))).lower(random_params(config), batch).as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert len(products) > 20
    for line in products:
        operands = line.rsplit(" : ", 1)[1].split(" -> ")[0]
        assert "f32" not in operands.replace("bf16", "") or "lhs_precision_type = bf16" in line, line


@pytest.mark.parametrize("name", ["tiny", "tiny_gpt", "demo"])
def test_initial_loss_is_that_of_a_uniform_guess(name):
    config = models.preset(name)
    batch = {"tokens": random_tokens(config, batch=8, length=33 if name != "demo" else 65)}
    loss = jax.jit(models.loss_fn(config))(models.init_params(config, 0), batch)
    assert abs(float(loss) - math.log(config.vocab_size)) < 0.1


def test_initial_values():
    """Std 0.02, the projections into the residual stream divided by sqrt(2 layers), norms 1, biases 0."""
    config = models.GPTConfig(
        vocab_size=512, max_length=64, n_layers=8, width=128, n_heads=4, ff_width=256, dtype="float32"
    )
    layers = (params := models.init_params(config, 0))["layers"]
    for kernel in (
        params["embed"]["embedding"],
        params["positions"]["embedding"],
        *(layers["attention"][name]["kernel"] for name in ("query", "key", "value")),
        layers["mlp"]["up"]["kernel"],
    ):
        assert abs(float(jnp.std(kernel)) / 0.02 - 1) < 0.05 and abs(float(jnp.mean(kernel))) < 1e-3
    for kernel in (layers["attention"]["out"]["kernel"], layers["mlp"]["down"]["kernel"]):
        assert abs(float(jnp.std(kernel)) / (0.02 / 4) - 1) < 0.05
    assert np.all(layers["attention_norm"]["scale"] == 1) and not np.any(layers["attention"]["query"]["bias"])
    # Layers and projections are drawn apart, and the seed matters.
    query, key = layers["attention"]["query"]["kernel"], layers["attention"]["key"]["kernel"]
    assert not np.allclose(query[0], query[1]) and not np.allclose(query, key)
    other = models.init_params(config, 1)["layers"]["attention"]["query"]["kernel"]
    assert not np.allclose(query, other)
    assert_bit_equal(models.init_params(config, 0), params)


def test_build_and_init_params_start_equal():
    config = FAMILIES["llama"]
    built = models.params_of(models.build(config, 5))
    assert_close(built, models.init_params(config, 5))
    shapes = [jax.tree.map(lambda x: (x.shape, x.dtype), p) for p in (built, models.abstract_params(config))]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_module_and_the_function_are_one(family):
    """merge/params_of round trip; the module gives the function's logits and trains under nnx.Optimizer."""
    config = FAMILIES[family]
    params, tokens = random_params(config), random_tokens(config, length=9)
    model = models.merge(config, params)
    assert_bit_equal(models.params_of(model), params)
    assert_bit_equal(jax.jit(lambda m, t: m(t))(model, tokens), APPLY(config, params, tokens))

    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        def loss(model):
            return models.token_losses(model(tokens[:, :-1]), tokens[:, 1:]).mean()

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    losses = [float(step(model, optimizer)) for _ in range(5)]
    assert losses[-1] < losses[0] - 0.01


def test_gradients_under_shard_map_equal_those_of_the_whole_batch():
    """Local gradients of 4 workers average to the global one, with chunked loss and remat, in both modes."""
    config = dataclasses.replace(FAMILIES["llama"], loss_chunk=5, remat=True)
    params, batch = random_params(config), {"tokens": random_tokens(config, batch=8, length=13)}
    loss_and_grad = jax.value_and_grad(models.loss_fn(config))
    want = jax.jit(loss_and_grad)(params, batch)
    for check_vma in (False, True):

        def worker(params, batch, check_vma=check_vma):
            if check_vma:  # else jax.grad sums over workers by itself
                params = jax.tree.map(lambda a: jax.lax.pcast(a, "data", to="varying"), params)
            return jax.lax.pmean(loss_and_grad(params, batch), "data")

        sharded = jax.shard_map(
            worker, mesh=make_mesh(4), in_specs=(P(), P("data")), out_specs=P(), check_vma=check_vma
        )
        assert_close(jax.jit(sharded)(params, batch), want, "model")


def test_loss_is_traced_once_for_equal_configs():
    config = FAMILIES["llama"]
    same = models.config_from_dict(config.to_dict())
    assert models.loss_fn(config) is models.loss_fn(same)


def test_chunked_loss_never_holds_all_logits():
    """With chunks, no array of the compiled step has B * L * V entries."""
    config = dataclasses.replace(FAMILIES["llama"], vocab_size=997)
    batch = {"tokens": random_tokens(config, batch=2, length=33)}

    def biggest(chunk):
        loss = models.loss_fn(dataclasses.replace(config, loss_chunk=chunk))
        text = jax.jit(jax.grad(loss)).lower(models.abstract_params(config), batch).as_text()
        shapes = [s.split("x")[:-1] for s in re.findall(r"tensor<([\dx]+x)f32>", text)]
        return max(math.prod(int(d) for d in dims if d) for dims in shapes if "997" in dims)

    assert biggest(None) >= 2 * 32 * 997
    assert biggest(8) < 2 * 32 * 997


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (jnp.zeros((1, 33), jnp.int32), "got 33 tokens with max_length 32"),
        (jnp.zeros((1, 0), jnp.int32), "got 0 tokens"),
        (jnp.zeros((4,), jnp.int32), r"integers of shape \(batch, length\), got int32 of shape \(4,\)"),
        (jnp.zeros((1, 4), jnp.float32), "got float32"),
    ],
)
def test_input_errors(tokens, message):
    config = FAMILIES["llama"]
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(functools.partial(models.apply, config), models.abstract_params(config), tokens)


def test_batch_errors():
    config = FAMILIES["llama"]
    params, loss = random_params(config), models.loss_fn(config)
    with pytest.raises(
        ValueError, match=r"shape \(batch, length \+ 1\) with length at least 1, got \(2, 1\)"
    ):
        loss(params, {"tokens": jnp.zeros((2, 1), jnp.int32)})
    with pytest.raises(ValueError, match=r"must have shape \(2,\) .* or \(2, 4\) .* got \(2, 5\)"):
        loss(params, {"tokens": jnp.zeros((2, 5), jnp.int32), "weight": jnp.ones((2, 5))})


def test_params_of_another_model_are_named():
    config = FAMILIES["llama"]
    params = random_params(config)
    tied = dataclasses.replace(config, tied_head=True)
    with pytest.raises(ValueError, match=r"unexpected head/kernel \(32, 61\)"):
        models.apply(tied, params, random_tokens(config))
    with pytest.raises(
        ValueError, match=r"layers/attention/key/kernel has shape \(2, 32, 16\), not \(2, 32, 8\)"
    ):
        models.apply(dataclasses.replace(config, n_kv_heads=1), params, random_tokens(config))
    del params["embed"]
    with pytest.raises(ValueError, match=r"missing embed/embedding \(61, 32\)"):
        models.apply(config, params, random_tokens(config))


def test_build_rejects_a_name():
    with pytest.raises(ValueError, match=r"got 'tiny'. models.preset\(name\) gives one"):
        models.build("tiny")


def test_named_attention_is_used_or_raises():
    """ "cudnn" never falls back silently: without a GPU it must fail, and None must not choose it."""
    config = dataclasses.replace(FAMILIES["llama"], dtype="bfloat16")
    tokens = random_tokens(config)
    named = dataclasses.replace(config, attention="xla")
    assert_bit_equal(
        APPLY(config, random_params(config), tokens), APPLY(named, random_params(config), tokens)
    )
    with pytest.raises(Exception, match=r"(?i)cudnn|gpu|cuda"):
        models.apply(dataclasses.replace(config, attention="cudnn"), random_params(config), tokens)


@pytest.mark.parametrize(
    ("backend", "capability", "change", "want"),
    [
        ("gpu", "9.0", {}, "cudnn"),
        ("gpu", "8.0", {}, "cudnn"),
        ("gpu", "7.5", {}, "xla"),
        ("gpu", "gfx942", {}, "xla"),
        ("cpu", None, {}, "xla"),
        ("gpu", "9.0", {"dtype": "float32"}, "xla"),
        ("gpu", "9.0", {"head_dim": 12}, "xla"),
        ("gpu", "9.0", {"head_dim": 256}, "xla"),
        ("gpu", "9.0", {"attention": "xla"}, "xla"),
        ("cpu", None, {"attention": "cudnn"}, "cudnn"),
    ],
)
def test_default_attention_is_cudnn_where_it_can_run(monkeypatch, backend, capability, change, want):
    device = (
        types.SimpleNamespace()
        if capability is None
        else types.SimpleNamespace(compute_capability=capability)
    )
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    config = dataclasses.replace(models.preset("llama500m"), **change)
    assert attention_implementation(config) == want
