"""Programs compiled without LLVM's expensive passes, and without XLA's newer emitters: half, a third of the time to compile.

For modules whose many programs run once or twice on a few numbers. What holds for these to the bit or to a tolerance are
relations of results; the algorithms themselves are tested as users run them, with every optimization: the kernels, and in
every `test_reference.py` a case at least of each number of workers, codec and selection.

Usage: import one of the fixtures into the module or into a folder's conftest.py. Two programs that must agree to the bit
may not do so with the older emitters, which contract other products and sums: those modules take `quick_compile`.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from jax._src import compiler

# One MLIR pipeline a fusion costs more than all else in a program of small leaves. Later JAX has no other emitters.
HAS_OLDER_EMITTERS = jax.__version_info__ < (0, 11)
OPTION = "xla_cpu_use_fusion_emitters"

# What `quick_compile` does, for processes that a test starts.
ENVIRONMENT = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def with_older_emitters(get_compile_options: Any) -> Any:
    """XLA reads its flags once a process, and JAX takes options for one `jit` at a time: neither is for a module."""

    def get(*args: Any, **kwargs: Any) -> Any:
        options = get_compile_options(*args, **kwargs)
        options.env_option_overrides = [*options.env_option_overrides, (OPTION, False)]
        return options

    return get


@contextlib.contextmanager
def compiled_quickly(older_emitters: bool = HAS_OLDER_EMITTERS) -> Iterator[None]:
    """Holds for every program that is compiled inside, in all threads."""
    jax.config.update("jax_disable_most_optimizations", True)
    with pytest.MonkeyPatch.context() as patch:
        if older_emitters:
            patch.setattr(compiler, "get_compile_options", with_older_emitters(compiler.get_compile_options))
        try:
            yield
        finally:
            jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(autouse=True, scope="module")
def quick_compile() -> Iterator[None]:
    with compiled_quickly(older_emitters=False):
        yield


@pytest.fixture(autouse=True, scope="module")
def quickest_compile() -> Iterator[None]:
    with compiled_quickly():
        yield
