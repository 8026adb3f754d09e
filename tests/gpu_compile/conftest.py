"""Without the compiler that `make gpu-compile` fetches the tests of this folder are skipped and say so."""

import pytest

from tests.gpu_compile import deviceless


@pytest.fixture(scope="session", autouse=True)
def compiler() -> None:
    if parts := deviceless.missing():
        pytest.skip(f"the GPU compiler is not complete (no {', '.join(parts)}): make gpu-compile")
