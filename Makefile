# Each target sets up everything it needs: a virtual environment with fusegen in it, and a CUDA
# compiler from the package index where the system has none.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
CUTLASS := nvidia-cutlass==4.2.0.0
HAVE_NVCC := $(shell command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
HAVE_GPU := $(shell command -v nvidia-smi)
INPUTS := pyproject.toml constraints.txt Makefile

.PHONY: demo test gpu-build gpu-test release-check check regenerate clean

# Trains a small mixture-of-experts model with plain PyTorch experts and with generated ones.
demo: $(VENV)/demo.stamp
	$(BIN)/fusegen demo

# Everything that needs no GPU.
test: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check generator tests benchmarks examples
	$(BIN)/mypy
	cd benchmarks && MYPYPATH=.:../generator:../tests/gpu:../tests/compile $(abspath $(BIN))/mypy --config-file ../pyproject.toml *.py kernels/*.py
	$(BIN)/fusegen check
	$(BIN)/python tests/gpu/ledger.py readme --check
	# Tests run side by side; threads of PyTorch's own would only wait for each other.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 tests $(wildcard generated/*/tests)
	$(BIN)/python tests/gpu/ledger.py report

# On a machine with a GPU: run the tests of every bundle it can run, and record what ran.
gpu-test: $(VENV)/test.stamp
	$(BIN)/python tests/gpu/ledger.py run
	$(BIN)/python tests/gpu/ledger.py readme

# What the tests of a GPU need built, on a machine without one.
gpu-build: $(VENV)/test.stamp
	$(BIN)/python tests/gpu/ledger.py build

# Fails on kernels that changed since they last ran on a GPU.
release-check: $(VENV)/test.stamp
	$(BIN)/python tests/gpu/ledger.py check

# Regenerate the committed bundles and everything else that is printed.
regenerate: $(VENV)/test.stamp
	$(BIN)/fusegen generate --target cpu --target cpu_quantized --target hopper --target hopper_quantized --target hopper_lean --target main_grad --target cached_weights
	$(BIN)/fusegen generate
	$(BIN)/python docs/tables.py
	$(BIN)/python tests/gpu/ledger.py readme

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fusegen needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo.stamp: $(VENV)/bin/python $(INPUTS)
	$(PIP) -c constraints.txt -e '.[torch]'
ifneq ($(HAVE_GPU),)
	$(PIP) --no-deps $(CUTLASS)
ifeq ($(HAVE_NVCC),)
	$(PIP) -e '.[cuda]'
endif
endif
	touch $@

$(VENV)/test.stamp: $(VENV)/bin/python $(INPUTS)
	$(PIP) -c constraints.txt -e '.[torch,dev]'
	$(PIP) --no-deps $(CUTLASS)
ifeq ($(HAVE_NVCC),)
	$(PIP) -e '.[cuda]'
endif
	touch $@

clean:
	rm -rf $(VENV) generated/*/lib build dist
