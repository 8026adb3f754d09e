"""Strict settings for every test: 8 virtual CPU devices, no rank promotion (after equinox's conftest).

Warnings are errors too, by pyproject.toml. Importing this file must not start a JAX backend: the number of
devices can only be set before one exists.
"""

import os
from collections.abc import Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
# (3,) + (4, 3) is almost always a forgotten axis; code under test writes its broadcasts out.
jax.config.update("jax_numpy_rank_promotion", "raise")

# The same examples in every run, and no time limit for one: the first call of each shape compiles.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(autouse=True, scope="module")
def _drop_compiled_programs() -> Iterator[None]:
    """Frees a module's compiled programs: hundreds of 8-device programs otherwise pile up in one process."""
    yield
    jax.clear_caches()
