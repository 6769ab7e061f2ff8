# tokenmill: `make run` answers a prompt on real weights, `make test` runs the checks.
#
#   PYTHON   interpreter for the virtual environment (3.11 or newer)
#   VENV     where it goes
#   PEERS    where other engines are, or go (benchmarks/peers/README.md); QUICK=1 runs small work
#   TORCH    requirement that picks the torch build; installed first, so that nothing else
#            brings in another one

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
PEERS ?= .peers
PROMPT ?= Why is the sky blue? Answer in two sentences.

JOBS ?= 2
# Test files are shared out among so many processes.
SHARED := --numprocesses $(JOBS) --dist loadfile

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: run test test-all lint check-amx check-aarch64 bench peers peers-setup docs clean

run: $(VENV)/.installed
	$(BIN)/tokenmill chat "$(PROMPT)"

test: lint
	$(BIN)/python -m pytest $(SHARED)

test-all: lint
	$(BIN)/python -m pytest $(SHARED) -m "slow or not slow"

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The kernels for AMX on a machine without it: tiles in plain code, beside the other kernels.
EMULATED := build/emulated-amx
check-amx: $(VENV)/.installed-dev
	$(PIP) install --no-deps --upgrade --target $(EMULATED) \
	  --config-settings=cmake.define.TOKENMILL_EMULATED_TILES=ON .
	PYTHONPATH=$(EMULATED):$$($(BIN)/python -c "import sysconfig as s; print(s.get_path('purelib'))") \
	  $$($(BIN)/python -c "import sys; print(sys._base_executable)") -m pytest $(SHARED) \
	  tests/kernels tests/e2e/test_instruction_sets.py --ignore tests/kernels/gpu

# The kernels for aarch64: built with a cross compiler and, if QEMU is there, tested under it.
check-aarch64: $(VENV)/.installed-dev
	PATH=$(abspath $(BIN)):$$PATH PYTHON=$(abspath $(BIN))/python JOBS=$(JOBS) \
	  scripts/check-aarch64.sh

bench: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/offline.py

peers-setup: $(VENV)/.installed
	PYTHON=$(BIN)/python benchmarks/peers/setup.sh $(PEERS)

peers: $(VENV)/.installed
	$(BIN)/python benchmarks/peers/compare.py --peers $(PEERS) $(if $(QUICK),--quick)

docs: $(VENV)/.installed-dev
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/generate_models.py

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install "$(TORCH)"
	touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(PIP) install --editable ".[serve]"
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed pyproject.toml
	$(PIP) install --editable ".[dev]"
	touch $@
