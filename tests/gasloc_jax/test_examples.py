"""Every example in a docstring of gasloc_jax runs and prints what it says."""

import doctest
import importlib
import pkgutil

import pytest

import gasloc_jax
from tests.quick_compile import quickest_compile  # noqa: F401

MODULES = [m.name for m in pkgutil.iter_modules(gasloc_jax.__path__)]


def examples_of(name: str) -> list[doctest.DocTest]:
    module = importlib.import_module(f"gasloc_jax.{name}")
    return [test for test in doctest.DocTestFinder().find(module) if test.examples]


@pytest.mark.parametrize("name", [name for name in MODULES if examples_of(name)])
def test_examples(name):
    runner = doctest.DocTestRunner()
    for test in examples_of(name):
        runner.run(test)
    assert runner.failures == 0


def test_every_public_function_has_an_example():
    public = {name for name in gasloc_jax.__all__ if name[0].islower()} - {"layers_are_stacked"}
    with_example = {test.name.split(".")[-1] for name in MODULES for test in examples_of(name)}
    # Two take nothing and say all in a line.
    assert public - with_example == {"complete", "exponential", "make_payload", "ring"}
