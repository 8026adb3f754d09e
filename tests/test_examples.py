"""Every example in a docstring of scape_jax and pallas_kernels runs and prints what it says."""

import doctest
import importlib
import pkgutil

import jax.numpy as jnp
import pytest

import pallas_kernels
import scape_jax
from tests.quick_compile import quick_compile  # noqa: F401

# The modules with Triton kernels have no examples, and need Triton.
MODULES = [
    module.name
    for package in (scape_jax, pallas_kernels)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if "triton" not in module.name
]


def examples_of(name: str) -> list[doctest.DocTest]:
    found = doctest.DocTestFinder().find(importlib.import_module(name), extraglobs={"jnp": jnp})
    return [test for test in found if test.examples]


@pytest.mark.parametrize("name", [name for name in MODULES if examples_of(name)])
def test_examples(name):
    runner = doctest.DocTestRunner()
    for test in examples_of(name):
        runner.run(test)
    assert runner.failures == 0
