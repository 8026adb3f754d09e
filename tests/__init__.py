"""Tests, laid out as the packages are. Shared tools: `from tests.helpers import assert_close, make_mesh`."""
