# What a newcomer types. Every target first makes .venv, once: see launch/setup_env.sh.

VENV ?= .venv
BIN := $(VENV)/bin
# Extra arguments, e.g.: make demo ARGS="--model tiny-mla", make test ARGS="-k page"
ARGS ?=
# What was asked for may all be in other sections; pytest ends with 5 where it runs no test.
NONE_FIT = || [ $$? -eq 5 -a -n '$(ARGS)' ]

# The sections of the tests, in the order in which they run. One that is not listed here by name is a folder of tests/.
FAST := lint types contract unit
SECTIONS := $(FAST) kernels packaging server regression
# Tests at a time: one where they would share a GPU.
WORKERS ?= $(if $(wildcard /dev/nvidia0),1,2)
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS)
# Many tests start a Python of their own. Without bytecode each would compile SGLang anew: a minute of a core.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help env demo test test-fast soak gpu-soak $(SECTIONS:%=test-%) test-coverage

help:
	@echo "make demo          serve a small model with DDTREE and compare it with stock SGLang"
	@echo "make test          all sections of the tests: $(SECTIONS)"
	@echo "make test-fast     the sections that take a few minutes: $(FAST)"
	@echo "make test-SECTION  one of them, e.g. make test-unit"
	@echo "make soak          random requests to random servers against stock SGLang, ten minutes of them"
	@echo "make gpu-soak      ten thousand requests and more to a server on a GPU, judged by stock SGLang"

env:
	@launch/setup_env.sh $(VENV)

demo: env
	@$(BIN)/ddtree demo $(ARGS)

test: env
	@MAKE="$(MAKE)" tests/run_sections.sh $(SECTIONS) coverage

test-fast: env
	@MAKE="$(MAKE)" tests/run_sections.sh $(FAST)

test-lint: env
	$(BIN)/ruff check .

test-types: env
	tests/check_types.sh $(BIN)/mypy

test-contract: env
	$(PYTEST) --dist worksteal tests/contract $(ARGS) $(NONE_FIT)

test-unit test-kernels: test-%: env
	COVERAGE_FILE=.coverage.$* $(PYTEST) --dist worksteal --cov --cov-report= tests/$* $(ARGS) $(NONE_FIT)

# The tests of a file share servers and wheels, so they stay with one worker.
test-packaging test-server: test-%: env
	$(PYTEST) --dist loadfile tests/$* $(ARGS) $(NONE_FIT)

test-regression: env
	$(PYTEST) --dist load tests/regression $(ARGS) $(NONE_FIT)

# Of the last run of each section that is measured.
test-coverage: env
	$(BIN)/coverage combine --quiet --keep $(wildcard .coverage.unit .coverage.kernels)
	$(BIN)/coverage report --skip-empty

# E.g.: make soak ARGS="--minutes 30"
soak: env
	@$(BIN)/python tests/regression/soak.py $(ARGS)

# E.g.: make gpu-soak ARGS="--json soak.json"
gpu-soak: env
	@$(BIN)/python tests/regression/gpu_soak.py $(ARGS)
