"""Programs compiled without LLVM's expensive passes, which halves the time to compile them.

For modules whose many programs run once or twice on a few numbers. What holds for these to the bit or to a tolerance are
relations of results; the algorithms themselves are tested as users run them, with every optimization: `tests/scape_jax`,
`tests/gasloc_jax`, `tests/pallas_kernels` and the models' `test_reference.py`.

Usage: import the fixture into the module or into a folder's conftest.py.
"""

from collections.abc import Iterator

import jax
import pytest

# The same for processes that a test starts.
ENVIRONMENT = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


@pytest.fixture(autouse=True, scope="module")
def quick_compile() -> Iterator[None]:
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
