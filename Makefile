# Stretto: `make` lists what can be made.
PYTHON ?= python3
NAME ?= quickstart
CONFIG ?= quickstart
VENV := .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help setup train test lint clean

help:  ## list these targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## */  make \1\t/' | expand -t 16

setup: $(VENV)/.installed  ## create .venv and install Stretto into it
	@echo 'Ready. Next: make train'

train: $(VENV)/.installed  ## train the shipped nano model on this machine, about five minutes (NAME=…, CONFIG=…)
	@$(BIN)/stretto train $(CONFIG) --name $(NAME)

test: $(VENV)/.developed  ## run every test
	@$(BIN)/python -m pytest

lint: $(VENV)/.developed  ## check format, lint and types
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/pyright

clean:  ## remove .venv and caches; runs/ stays
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Stretto needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Say which to use: make setup PYTHON=python3.12")'
	@$(PYTHON) -m venv $(VENV)

PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "Installing PyTorch, then Stretto, into $(VENV): once, a few minutes."
	@$(PIP) torch==2.13.0
	@$(PIP) -e .
	@touch $@

$(VENV)/.developed: $(VENV)/.installed
	@$(PIP) -e '.[dev]'
	@touch $@
