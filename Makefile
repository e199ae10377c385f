# Everything a person needs, by name: `make` lists it.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: help up down test test-gpu check format bench bench-engine bench-shared bench-gateway soak audit lock clean

help: ## List what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

$(VENV)/.base: requirements.lock deploy/install.sh
	@PYTHON=$(PYTHON) deploy/install.sh base

$(VENV)/.dev: requirements.lock requirements-dev.lock deploy/install.sh $(VENV)/.base
	@PYTHON=$(PYTHON) deploy/install.sh dev

up: $(VENV)/.base ## Set up and serve a real model; prints the URL and the first sign-in (ARGS=--detach: in the background)
	@exec $(BIN)/python manage.py up $(ARGS)

down: $(VENV)/.base ## Drain and stop everything that `make up` started
	@exec $(BIN)/python manage.py down

test: $(VENV)/.dev ## Set up and run every test that needs no GPU
	@deploy/optional.sh
	$(BIN)/python -m pytest -m "not gpu" $(ARGS)

test-gpu: $(VENV)/.dev ## Run the tests that need an NVIDIA card
	$(BIN)/python -m pytest -m gpu $(ARGS)

check: $(VENV)/.dev ## What CI checks besides tests: style, types, import rules, migrations, generated docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -W ignore::RuntimeWarning manage.py makemigrations --check --dry-run --skip-checks
	$(BIN)/python manage.py settings_table --check

format: $(VENV)/.dev ## Format and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

audit: $(VENV)/.dev ## Known vulnerabilities in the pinned dependencies
	$(BIN)/pip-audit --disable-pip --no-deps --requirement requirements.lock

bench: $(VENV)/.dev ## Measure the bars against a running stack of its own (ARGS=--json)
	$(BIN)/python bench/first_light.py $(ARGS)

bench-engine: $(VENV)/.dev ## Measure the engine against vLLM and llama.cpp, 15 minutes (bench/rivals.sh installs them; ARGS=--quick)
	$(BIN)/python bench/engine.py $(ARGS)

bench-gateway: $(VENV)/.dev ## Measure the gateway against LiteLLM and vllm-router, 15 minutes (bench/peers.sh installs them; ARGS=--quick)
	$(BIN)/python bench/gateway.py $(ARGS)

bench-shared: $(VENV)/.dev ## Limits, queue and slots over two gateway processes, full size (ARGS=--quick)
	$(BIN)/python bench/gateway_limits.py $(ARGS)
	$(BIN)/python bench/gateway_queue.py $(ARGS)

soak: $(VENV)/.dev ## Long runs (ARGS='--scale 0.01' for a short one)
	$(BIN)/python bench/engine_soak.py $(ARGS)
	$(BIN)/python bench/soak.py $(ARGS)
	$(BIN)/python bench/gateway_faults.py $(ARGS)

lock: $(VENV)/.dev ## Pin what is installed now into the lock files
	@deploy/lock.sh

clean: ## Remove the environment and caches; data in .fanlight/ stays
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
