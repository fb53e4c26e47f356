# What a newcomer types. Every target first makes .venv, once: see launch/setup_env.sh.

VENV ?= .venv
BIN := $(VENV)/bin
# Extra arguments, e.g.: make demo ARGS="--model tiny-mla", make test ARGS="-k page"
ARGS ?=

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

test: lint
	$(BIN)/python -m pytest $(ARGS)

test-fast: lint
	$(BIN)/python -m pytest -m "not server" $(ARGS)

# E.g.: make soak ARGS="--minutes 30"
soak: env
	@$(BIN)/python tests/regression/soak.py $(ARGS)

lint: env
	$(BIN)/ruff check .
