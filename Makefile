# Each target sets up everything it needs: a virtual environment with fusegen in it, and a CUDA
# compiler from the package index where the system has none.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Whose GEMMs and layouts tests compare with; its dependencies would bring a second CUDA toolkit.
CUTLASS := nvidia-cutlass==4.2.0.0
HAVE_NVCC := $(shell command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
HAVE_GPU := $(shell command -v nvidia-smi)
REPORTS := build/tests
ON_GPU := hopper hopper_quantized hopper_lean hopper_rows hopper_saved main_grad cached_weights chains moe_layers
TARGETS := $(filter-out all,$(basename $(notdir $(wildcard specs/targets/*.yaml))))
BUNDLES := $(filter-out $(dir $(wildcard generated/*/manifest.json)),$(wildcard generated/*/))
INPUTS := pyproject.toml constraints.txt Makefile

# Tests are imported by two processes in each of several tiers, and pytest's rewriting of them takes minutes.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test lint lint-style lint-types lint-benchmarks lint-generated lint-digests lint-matrix collect test-fast test-broad test-options test-kernels test-exhaustive test-all compiled compile-all gpu-build gpu-test release-check check regenerate before clean

# Trains a small model with mixture-of-experts layers of plain PyTorch and with generated ones.
demo: $(VENV)/demo.stamp
	$(BIN)/fusegen demo

# What every change should pass before it is shown to anybody: a few minutes.
test: lint test-fast

# What needs no test to be wrong: style, types, generated files that are stale; two at a time.  Bundles of
# which only a part is kept as files are looked at in test-all.
lint: $(VENV)/test.stamp
	$(MAKE) -j 2 lint-generated lint-types lint-benchmarks lint-style

lint-style: $(VENV)/test.stamp
	$(BIN)/ruff check --config pyproject.toml .
	$(BIN)/ruff format --check generator tests benchmarks examples conftest.py

lint-types: $(VENV)/test.stamp
	$(BIN)/mypy

lint-benchmarks: $(VENV)/test.stamp
	cd benchmarks && MYPYPATH=.:../generator:../tests/gpu:../tests/compile $(abspath $(BIN))/mypy --config-file ../pyproject.toml *.py kernels/*.py

lint-generated: $(VENV)/test.stamp
	$(BIN)/fusegen check $(BUNDLES)

# The same of every bundle, with cells that are kept as digests, and of the JSON Schemas.
lint-digests: $(VENV)/test.stamp
	$(BIN)/fusegen check

# What README.md says has run, and what has changed since; test-all looks, since the further bundles must be generated for it.
lint-matrix: $(VENV)/test.stamp
	$(BIN)/python tests/gpu/ledger.py readme --check

# Tiers of tests: tests/tiers.py says which test is in which.
# Tests run side by side; threads of PyTorch's own would only wait for each other.
test-fast test-broad test-options test-kernels test-exhaustive: test-%: $(VENV)/test.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --tier $* -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --durations=10 --junitxml=$(REPORTS)/$*.xml --record $(REPORTS)/$*.txt

# The names of all tests, for test-all.
collect: $(VENV)/test.stamp
	mkdir -p $(REPORTS)
	$(BIN)/python -m pytest -qq --tier all --collect-only --record $(REPORTS)/all.txt > $(REPORTS)/all.log || { cat $(REPORTS)/all.log; exit 1; }

# Everything that needs no GPU, the fast tests first, and that every test ran in one tier.
test-all:
	$(MAKE) test
	$(MAKE) -j 2 lint-matrix lint-digests collect
	$(MAKE) test-broad
	$(MAKE) test-kernels
	$(MAKE) test-options
	$(BIN)/python tests/tiers.py $(foreach tier,fast broad kernels options,$(REPORTS)/$(tier).txt) --all $(REPORTS)/all.txt

# Every kernel of every module, recipe and option for every architecture, against its contract: a few processor hours without a
# cache of objects. What it finds is recorded for docs/architectures.md.
compile-all: $(VENV)/test.stamp
	$(BIN)/python tests/compile/compile_all.py --record $(ARCHS)
	$(BIN)/python docs/pages.py

# Compile the units of bundles that are not on record as what their contracts say, and record them: test-kernels
# compiles what is not on record, and a sample of the rest.
compiled: $(VENV)/test.stamp
	PYTHONPATH=tests $(BIN)/python -m tests.compile.on_record

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

# What `fusegen bench revisions` holds this revision against: the GPU bundle of an earlier one.
before: $(VENV)/test.stamp
	@test -n "$(REVISION)" || { echo "usage: make before REVISION=COMMIT"; exit 2; }
	rm -rf build/revision build/before && git worktree prune
	git worktree add --quiet --detach build/revision $(REVISION)
	cd build/revision && export PYTHONPATH=$$PWD/generator && $(abspath $(BIN))/python -m fusegen generate $(foreach target,$(ON_GPU),--target $(target)) --namespace before --out ../before && $(abspath $(BIN))/python -m fusegen build ../before/*
	git -C build/revision rev-parse --short HEAD > build/before/REVISION
	git worktree remove --force build/revision

# Regenerate the committed bundles and everything else that is printed.
regenerate: $(VENV)/test.stamp
	$(BIN)/fusegen generate $(foreach target,$(TARGETS),--target $(target))
	$(BIN)/fusegen generate
	$(BIN)/python docs/tables.py
	$(BIN)/python tests/gpu/ledger.py readme
	$(BIN)/python docs/pages.py

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fusegen needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo.stamp: $(VENV)/bin/python $(INPUTS)
	$(PIP) -c constraints.txt -e '.[torch]'
ifneq ($(HAVE_GPU),)
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
