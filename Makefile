# make run    set up and serve the bundled demo model on 127.0.0.1:8000
# make test   set up and run the default tests
# make test-matrix   every layout of many models beside one rank: minutes
# make check  what does not need to run the code: lint, types, imports, sizes, generated docs
#
# PYTHON=python3.12 picks an interpreter, TORCH_INDEX_URL=... a package index with CPU-only builds of torch,
# PORT=8001 another port, ARGS='--max-num-seqs 4' anything else for the server.

SHELL := /bin/bash
PYTHON ?= python3
PORT ?= 8000
TESTS ?= tests
export TORCH_INDEX_URL

.PHONY: run test test-long test-matrix check docs format clean

run:
	@PYTHON="$(PYTHON)" scripts/setup.sh server "$(PORT)"
	@exec .venv/bin/moesaic serve demo --port $(PORT) $(ARGS)

test:
	@PYTHON="$(PYTHON)" scripts/setup.sh test
	@.venv/bin/python -m pytest -n 2 --dist loadfile -m "not long and not matrix and not gpu" $(TESTS)

test-long:
	@PYTHON="$(PYTHON)" scripts/setup.sh test
	@.venv/bin/python -m pytest -n 2 --dist loadfile -m "long and not gpu" $(TESTS)

test-matrix:
	@PYTHON="$(PYTHON)" scripts/setup.sh test
	@.venv/bin/python -m pytest -n 2 -m matrix $(TESTS)

check:
	@PYTHON="$(PYTHON)" scripts/setup.sh test
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy
	@.venv/bin/lint-imports
	@.venv/bin/python scripts/sizes.py --check
	@.venv/bin/python scripts/docs.py --check
	@.venv/bin/python scripts/performance.py --check

docs:
	@.venv/bin/python scripts/docs.py

format:
	@.venv/bin/ruff check --fix .
	@.venv/bin/ruff format .

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
