# Two commands matter: `make demo` and `make test`. Each makes what it needs first, shows progress, and can be run again.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# OpenMP threads of torch would spin at barriers; on shared cores that made a step twenty times as long.
export OMP_WAIT_POLICY ?= PASSIVE
# pytest's compiled tests are kept for its next process, which saves ten seconds each.
unexport PYTHONDONTWRITEBYTECODE

# Kept beside the other caches, so that a new clone has them. Python would compile 7,500 files of packages again; it finds those of a
# clone at the same path.
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/diffusion-operator
export MYPY_CACHE_DIR ?= $(CACHE)/mypy
export PYTHONPYCACHEPREFIX ?= $(CACHE)/compiled

PYTHON ?= python3
PY := .venv/bin/python
SUITE := $(PY) -m tools.suite
GOAL ?=
GPU ?=
SOAK ?=
# `make test` has a sample of the cases of these, and `make soak` has all.
SAMPLED := tests/worker/families tests/worker/runner/step_cache/test_step_cache_families.py tests/operator/process/test_fault_points.py tests/tools/test_gpu_run.py
SAMPLED += tests/worker/runner/parallel/test_setup.py tests/operator/reconcile/test_adapter_storm.py
SAMPLED += tests/worker/rehearsal/test_step_caches_rehearsed.py tests/worker/processes/test_errors_of_sdks.py tests/worker/processes/test_oldest_torch.py tests/worker/options/test_withheld.py
CANARY ?=

.PHONY: help preflight venv lint test test-fast test-slow test-cluster test-kind demo cluster cluster-down digits bench soak canary gpu gpu-wheels

help: ## show this
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

preflight: # requirements of the machine, checked by the system's Python before anything is changed
	@tools/make-venv --check
	@$(PYTHON) -m tools.devcluster.preflight

venv: ## the one virtual environment, made again when a pin or a dependency changes
	@tools/make-venv

lint: venv ## ruff, mypy strict, the layers
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@.venv/bin/lint-imports --no-logo 2>/dev/null | tail -n 25 | grep -v '^$$'

test: preflight venv ## every test, in the stages that follow; the cluster is brought up for the last of them
	@$(SUITE)

test-fast: venv ## lint and the tests that need neither a cluster nor minutes
	@$(SUITE) lint fast fast-torch

test-slow: preflight venv ## the tests with real ranks, workers and API servers
	@$(SUITE) images slow

test-cluster: preflight venv ## the tests on a kind cluster with our images
	@$(SUITE) images cluster

test-kind: test-cluster

demo: preflight venv ## from nothing to an image, an adapter, a sleep and a waking
	@$(PY) -m tools.demo

cluster: preflight venv ## the development cluster alone
	@$(PY) -m tools.devcluster up

cluster-down: venv ## end it; nothing stays but the cache
	@$(PY) -m tools.devcluster down

digits: venv ## train the model and the adapters of examples/digits again
	@$(PY) examples/digits/train.py

bench: venv ## a single benchmark (GOAL=P4) or all of them
	@$(PY) -m benchmarks $(GOAL)

soak: venv ## the fuzz tests and soaks at full size, and all images of the digits' exam (SOAK="--minutes 5", SOAK="--help")
	@PYTHONPATH=.:tests $(PY) -m support.soak.run $(SOAK)
	@$(if $(SOAK),,WHOLE=1 $(PY) -m pytest -q $(SAMPLED))
	@$(if $(SOAK),,$(PY) examples/digits/evaluate.py --no-sheet)

canary: venv ## import, load, families and adapters with the newest releases of all libraries (CANARY="--resolve-only")
	@$(PY) -m tools.newest_releases $(CANARY)

gpu: ## the first minutes on a machine with a GPU, by its own python3 (GPU="--device cpu --tiny", GPU="--help")
	@$(PYTHON) -m tools.gpu $(GPU)

gpu-wheels: venv ## fill .gpu-wheels/ with all that `make gpu` carries to a machine without a network
	@$(PYTHON) -m tools.gpu.wheels
	@$(PY) -m tools.gpu.judge .gpu-wheels/judge.npz
