"""The code of the README runs as printed and lowers the loss."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType

import gasloc_jax
import scape_jax

README = Path(__file__).resolve().parents[1] / "README.md"


def test_flax_code_of_the_readme_trains():
    text = README.read_text(encoding="utf-8")
    code, _ = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    (after,) = re.findall(r"Afterwards `([^`]+)`", text)

    inputs = jax.random.normal(jax.random.key(0), (64, 8))
    batch = {"x": inputs, "y": jnp.sum(inputs[:, :2], axis=1, keepdims=True)}
    model = nnx.Linear(8, 1, rngs=nnx.Rngs(0))

    def loss(model: nnx.Module, batch: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean(jnp.square(model(batch["x"]) - batch["y"]))

    before = float(loss(model, batch))
    names = {"jax": jax, "nnx": nnx, "AxisType": AxisType, "scape_jax": scape_jax}
    names |= {"model": model, "loss": loss, "batches": [batch] * 40}
    exec(compile(code, str(README), "exec"), names)
    exec(compile(after, str(README), "exec"), names)

    assert float(names["metrics"]["loss"]) < before
    assert float(loss(model, batch)) < before


def test_gossip_code_of_the_readme_trains():
    _, code = re.findall(
        r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    workers = jax.device_count()
    inputs = jax.random.normal(jax.random.key(0), (workers, 10, 4, 8))
    batches = {"x": inputs, "y": jnp.sum(inputs[..., :2], axis=-1)}

    def loss_fn(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean(jnp.square(batch["x"] @ params["w"] - batch["y"]))

    names = {"jax": jax, "optax": optax, "gasloc_jax": gasloc_jax, "loss_fn": loss_fn}
    names |= {"params": {"w": jnp.zeros(8)}, "rounds": [batches] * 10}
    exec(compile(code, str(README), "exec"), names)
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[3:]), batches)
    assert float(loss_fn(names["params"], flat)) < 0.98 * float(loss_fn({"w": jnp.zeros(8)}, flat))
