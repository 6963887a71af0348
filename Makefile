# Every target runs in .venv, which is made on first use and renewed when pyproject.toml or constraints.txt change.

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo serve test test-all sanitize lint clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z.-]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(INSTALLED) ## Watch a conversation with a real model, decoded by several drafters side by side
	@$(BIN)/specdec pull smollm2 || echo "(so the demo has to do with the embedded model)" >&2
	$(BIN)/specdec demo $(ARGS)

serve: $(INSTALLED) ## Serve the embedded model, as OpenAI's API, on http://127.0.0.1:8000 (ARGS="--model smollm2")
	$(BIN)/specdec serve $(ARGS)

test: $(INSTALLED) ## Run the quick tests, one worker per core (ARGS="-k name" narrows them)
	$(BIN)/python -m pytest -n auto --dist loadfile -m "not slow" $(ARGS)

test-all: $(INSTALLED) ## Run all tests, the full matrices included
	$(BIN)/python -m pytest -n auto --dist worksteal $(ARGS)

sanitize: $(INSTALLED) ## Run the tests of what is written in C under gcc's sanitizers, which takes minutes
	$(BIN)/python scripts/sanitize.py $(ARGS)

lint: $(INSTALLED) ## Check style, format, types and the direction of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy specdec drafters
	$(BIN)/lint-imports

.venv: $(INSTALLED) ## Make the virtual environment (the other targets do so by themselves)

clean: ## Remove .venv, build output and caches; runs/ stays
	rm -rf $(VENV) build dist *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The build tools are pinned like the rest: hence first they, then the project without build isolation.
$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing the pinned dependencies into $(VENV); the first time takes a few minutes."
	$(PIP) setuptools wheel
	$(PIP) --no-build-isolation --editable '.[dev,bench]'
	@touch $@

$(BIN)/python:
	@for python in python3.11 python3; do \
	    if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        $$python -m venv $(VENV) && exit 0; \
	        rm -rf $(VENV); \
	        echo "error: '$$python -m venv $(VENV)' failed; install Python's venv module (Debian: python3-venv)" >&2; \
	        exit 1; \
	    fi; \
	done; \
	echo "error: neither python3.11 nor a python3 of version 3.11 or later was found; install Python 3.11" >&2; \
	exit 1
