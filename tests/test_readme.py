"""The Flax code of the README runs as printed, lowers the loss, and puts the weights back into the module."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType

import scape_jax

README = Path(__file__).resolve().parents[1] / "README.md"


def test_flax_code_of_the_readme_trains():
    text = README.read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
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
