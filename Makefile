# Two commands do everything on a fresh machine: `make demo` and `make test`. Both set up `.venv` first.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
# Test processes at once (a gigabyte each): more than two cores, because half of an integration test is waiting for processes.
# Files run in their own order: integration tests, the longest, come first, so that no process ends with one alone.
WORKERS ?= 5
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Tiny models are fastest on one thread a process; telemetry stays off everywhere.
export OMP_NUM_THREADS ?= 1
export PREFECT_SERVER_ANALYTICS_ENABLED ?= false
export DO_NOT_TRACK ?= 1
export MLFLOW_DISABLE_TELEMETRY ?= true
export TOKENIZERS_PARALLELISM ?= false
export PYTHONUNBUFFERED ?= 1
# Hundreds of short processes: what one has compiled, the others read (some environments forbid to keep it).
test test-unit test-full: export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup demo test test-unit test-full coverage lint format types ui ui-down automations drill docs wheel clean lock bench-peers gpu-check

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP) ## create .venv with everything, pinned

$(STAMP): pyproject.toml constraints.txt
	@echo "Setting up $(VENV) (once; a few minutes, about 2.6 GB)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version.split()[0])'
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check 'torch==2.13.0'
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --config-settings editable_mode=compat --editable '.[dev]'
	@touch $(STAMP)

demo: $(STAMP) ## the main job, end to end, on this machine (a few minutes)
	@$(BIN)/python -m flows.train --config configs/demo.yaml

test: $(STAMP) ## the test-suite
	tests/run $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-unit: $(STAMP) ## the part of it that is over soon: nothing but units (tests/support/components.py)
	tests/run $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m 'not component' --durations=5 \
	  tests/unit tests/test_architecture.py

# Thousands of random histories and schedules, sixty kills, whole drills, the soak: before a release. Interrupted, it goes on where it was.
test-full: $(STAMP) ## every test at full length (at most two hours on two cores; stores benchmarks/results/test_full.json)
	$(BIN)/python -m benchmarks.test_full

coverage: $(STAMP) ## which share of dflash/ the tests run (stores benchmarks/results/coverage_of_tests.json)
	$(BIN)/python -m benchmarks.coverage_of_tests

lint: $(STAMP) ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP) ## apply the format and the safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP) ## mypy, strict
	$(BIN)/mypy

ui: $(STAMP) ## Prefect and MLflow user interfaces on 127.0.0.1
	infra/local/up

ui-down: ## stop what `make ui` started
	infra/local/down

automations: $(STAMP) ## install (or bring up to date) the automations on the Prefect server
	$(BIN)/python -m flows.automations

# FAULT: nan, explosion, ramp, bad-resume, hung-save, killed-worker, corrupt-checkpoint, save-artefact, or all.
FAULT ?= nan
drill: $(STAMP) ## plant a fault in a demo training on real servers and judge what happens (FAULT=nan)
	@$(BIN)/python -m flows.drill --fault $(FAULT)

docs: $(STAMP) ## regenerate the generated pages
	$(BIN)/python -m dflash config reference --output docs/configuration.md
	$(BIN)/python -m dflash config metrics --output docs/metrics.md
	$(BIN)/python -m dflash compare --reference --markdown >docs/reference-results.md

# What an earlier build left in build/lib would get into the wheel.
wheel: $(STAMP) ## dist/*.whl: the library, the command `dflash` and the Prefect plugin
	rm -rf build/lib build/bdist.*
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .

# CHECK="--device cpu --tiny" walks every path that a CPU has; CHECK="--only staging" takes some.
gpu-check: $(STAMP) ## every path that only a GPU has, on one GPU (under 8 minutes; skips without one)
	$(BIN)/python benchmarks/gpu_check.py $(CHECK)

bench-peers: .venv-peers/.installed ## environment of the peers that benchmarks compare with (once, about 1 GB)

# Their wheels alone: the full requirements bring serving engines that no benchmark needs.
.venv-peers/.installed: Makefile
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install -qq --disable-pip-version-check 'torch==2.13.0'
	.venv-peers/bin/python -m pip install -qq --disable-pip-version-check 'transformers==5.8.1' 'datasets==5.1.0' \
		'hs-connectors==0.9.0' 'loguru==0.7.3' 'openai>=2' 'pydantic-settings>=2' psutil
	.venv-peers/bin/python -m pip install -qq --disable-pip-version-check --no-deps 'specforge==0.2.0' 'speculators==0.9.0'
	@touch $@

lock: $(STAMP) ## rewrite constraints.txt, requirements.lock (hashes) and docs/licences.md from the environment
	(head -n 1 constraints.txt; $(BIN)/python -m pip freeze --exclude-editable | sed 's/^torch==.*/torch==2.13.0/') > constraints.new
	mv constraints.new constraints.txt
	$(BIN)/python -m release.hashes
	$(BIN)/python -m release.licences

clean: ## remove the environment, caches and build output (never runs/)
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
