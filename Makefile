# Every target sets up what it needs, a virtual environment of its own with the pinned versions.
# Needs make and Python >= 3.11.

VENV ?= .venv
PY = $(VENV)/bin/python
PIP_INSTALL = $(PY) -m pip install --quiet --disable-pip-version-check --no-input -c constraints.txt
# What `make test` runs, and further flags for pytest.
TESTS ?= tests
PYTEST_FLAGS ?=

# The first Python >= 3.11 that can make a virtual environment. Another one: make PYTHON=/path/to/python3
CAN_USE = import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))
ifndef PYTHON
PYTHON := $(shell for p in python3 python3.11 python3.12 python3.13 python3.14 python; do \
	"$$p" -c '$(CAN_USE)' >/dev/null 2>&1 && { command -v "$$p"; break; }; done)
endif

.NOTPARALLEL:
.PHONY: help demo test lint format gpu-compile clean

help:
	@echo "make demo    train a small language model with SCAPE on 8 virtual workers (a few minutes, no GPU)"
	@echo "make test    run the tests          (TESTS=tests/models PYTEST_FLAGS=-x)"
	@echo "make lint    ruff and mypy"
	@echo "make format  let ruff repair and lay out the code"
	@echo "make gpu-compile  fetch the GPU compiler and Triton for the tests of kernels (1 GB, no GPU needed)"
	@echo "make clean   remove environments and caches; runs/ is kept"

demo: $(VENV)/.installed-test
	$(PY) scripts/pretrain.py --config demo

test: $(VENV)/.installed-test
	$(PY) -m pytest $(PYTEST_FLAGS) $(TESTS)

lint: $(VENV)/.installed-dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(VENV)/.installed-dev
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# XLA's GPU compiler for the JAX of $(VENV), and the ptxas and libdevice that it needs, in a folder of their own; Triton and
# jax-triton in a second one, since a process that sees the first has a GPU plugin. Nothing of either is installed.
# Elsewhere: GPU_COMPILE_DIR=... for this and for the tests.
GPU_COMPILER = jax-cuda13-pjrt jax-cuda13-plugin nvidia-cuda-nvcc nvidia-nvvm
GPU_TRITON = triton jax-triton
GPU_UNUSED = nvidia/cu13/bin/nvcc nvidia/cu13/bin/nvlink nvidia/cu13/bin/cudafe++ nvidia/cu13/bin/fatbinary \
	nvidia/cu13/nvvm/bin nvidia/cu13/lib triton/backends/nvidia/bin triton/backends/nvidia/lib/cupti* triton/backends/amd/lib
gpu-compile: $(VENV)/.installed-test
	@folder="$${GPU_COMPILE_DIR:-.gpu-compile}/$$($(PY) -c 'import jax; print(jax.__version__)')"; \
	fetch() { \
		[ "$$1/.complete" -nt constraints.txt ] && return; \
		echo "Fetching the GPU compiler into $$1" && \
		rm -rf "$$1" && \
		$(PIP_INSTALL) --no-deps --target "$$@" && \
		(cd "$$1" && rm -rf $(GPU_UNUSED)) && \
		touch "$$1/.complete"; \
	}; \
	fetch "$$folder" $(GPU_COMPILER) && fetch "$$folder-triton" $(GPU_TRITON)

# The stamp is younger than what it was made from, so the install runs again only when a dependency changes.
# Without build isolation the pinned setuptools builds the package; an isolated build would fetch any version.
$(VENV)/.installed-%: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "No Python 3.11 to 3.14 with venv was found on PATH." \
		"Install one (Debian: python3 and python3-venv) or name it: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c '$(CAN_USE)' || \
		{ echo "PYTHON=$(PYTHON) must be Python 3.11 to 3.14 and have venv." >&2; exit 1; }
	@$(PY) -m pip --version >/dev/null 2>&1 || \
		{ echo "Making $(VENV) with $(PYTHON)"; "$(PYTHON)" -m venv --clear "$(VENV)"; }
	@echo "Installing scape-gasloc[$*] into $(VENV)"
	@$(PIP_INSTALL) pip setuptools wheel
	@$(PIP_INSTALL) --no-build-isolation -e ".[$*]"
	@touch "$@"

clean:
	rm -rf .venv .venv-next .gpu-compile build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
