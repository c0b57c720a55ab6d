# `make demo` and `make test` are all that a fresh machine needs: Python 3.11 or newer, git and a package index.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
INSTALLED := .venv/.installed
# One thread a process: tests run side by side, and start processes of their own.
TEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
PYTHON_FILES := src tests examples docs/make_protocol.py

.PHONY: demo test check nightly bench docs clean

demo: $(INSTALLED)  ## train digits in real processes; the run is kept under runs/demo-N
	$(BIN)/squall train digits --out runs/demo-N

test: $(INSTALLED)  ## all tests but the nightly ones
	$(TEST) -n 2

check: $(INSTALLED)  ## what CI runs
	$(BIN)/ruff format --check $(PYTHON_FILES)
	$(BIN)/ruff check $(PYTHON_FILES)
	$(BIN)/mypy
	$(TEST) -n 2

nightly: $(INSTALLED)  ## long grids, and faults planted into the deciders
	$(TEST) -m nightly --timeout 3600
	$(BIN)/python -m tests.simulated.mutants

bench: $(INSTALLED)  ## every figure of speed, for a quiet machine; takes an hour, and keeps each under benchmarks/results/
	$(BIN)/squall bench --out benchmarks/results

docs: $(INSTALLED)  ## write docs/protocol.md from the state tables
	$(BIN)/python docs/make_protocol.py

clean:  ## remove the environment and what tools have cached; runs/ is kept
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Squall needs Python 3.11 or newer; say where: make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(INSTALLED)
