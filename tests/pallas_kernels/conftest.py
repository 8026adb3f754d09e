"""Triton, where it is at hand, before any test module can import it."""

import tests.pallas_kernels.triton_on_cpu  # noqa: F401
