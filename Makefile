# What a newcomer types. Every target first makes .venv, once: see launch/setup_env.sh.

VENV ?= .venv
BIN := $(VENV)/bin
# Extra arguments, e.g.: make demo ARGS="--model tiny-mla", make test ARGS="-k page"
ARGS ?=
# What was asked for may all be in the other section; pytest ends with 5 where it runs no test.
NONE_FIT = || [ $$? -eq 5 -a -n '$(ARGS)' ]

.DEFAULT_GOAL := help
.PHONY: help env demo test test-fast soak lint

help:
	@echo "make demo        serve a small model with DDTREE and compare it with stock SGLang"
	@echo "make test        lint and all tests, the fast ones first"
	@echo "make test-fast   lint and the tests that start no server"
	@echo "make soak        random requests to random servers against stock SGLang, ten minutes of them"

env:
	@launch/setup_env.sh $(VENV)

demo: env
	@$(BIN)/ddtree demo $(ARGS)

test: test-fast
	@echo "tests that start servers"
	$(BIN)/python -m pytest -m server $(ARGS) $(NONE_FIT)

test-fast: lint
	@echo "tests that start no server, two at a time"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not server" -n 2 --dist worksteal $(ARGS) $(NONE_FIT)

# E.g.: make soak ARGS="--minutes 30"
soak: env
	@$(BIN)/python tests/regression/soak.py $(ARGS)

lint: env
	$(BIN)/ruff check .
