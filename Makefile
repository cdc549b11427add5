# The commands of a checkout. Those that need an environment make it first: .venv, with the versions of constraints.txt.

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-all test-cluster test-night lint types format docs bench bench-advice clean
SHELL := /bin/bash

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# The Python of the environment, for instance PYTHON=python3.13; empty: python3.11, python3 or python, whichever is there first.
PYTHON ?=
# Another torch than the one of constraints.txt, for instance TORCH=2.6.0.
TORCH ?=
# Extra words for pip, for instance PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu" for the small torch without CUDA.
PIP_FLAGS ?=
# sympy: a torch may ask for one version of it, and no other.
CONSTRAINTS := $(if $(TORCH),<(sed -e 's/^torch==.*/torch==$(TORCH)/' -e '/^sympy==/d' constraints.txt),constraints.txt)
INSTALL = $(BIN)/python -m pip install --quiet --no-input --disable-pip-version-check $(PIP_FLAGS) -c $(CONSTRAINTS)
# Extra words for pytest, for instance TESTS="tests/core -x"; with any, only what they say is run.
TESTS ?=
# Of the random tests; each run has its own.
SEED := $(or $(SEED),$(shell od -An -N3 -tu4 /dev/urandom | tr -d ' '))
SIDE_BY_SIDE := -n logical --maxprocesses 8 --dist worksteal --hypothesis-seed=$(SEED)
# The tests start a thousand processes: without compiled modules on the disk, each compiles the package for itself.
unexport PYTHONDONTWRITEBYTECODE
# Tests that kill and stop processes, with deadlines: each starts up to seven, which wait half of the time, so three at a time on any machine,
# and nothing else beside them.
FAULTS := tests/faults
# Tests on several hosts: engines of their own are started, two at a time but only one Ray, and nothing else beside them.
CLUSTER := tests/cluster

help:  ## this list
	@echo "offbeat: data-parallel training that keeps going when workers are slow, dead or new"; echo
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## *(.*)/  make \1\t\2/' | expand -t 20

demo: $(READY)  ## four workers under several rules; one is slow, one is killed and comes back
	@$(BIN)/python examples/demo.py

test: $(READY)  ## the tests for before a commit, 3 to 4 minutes on two cores, and docstrings' examples; TESTS="..." for some, whole
ifeq ($(strip $(TESTS)),)
	@echo "Random tests with seed $(SEED); make test SEED=$(SEED) repeats them. More: make test-all, make test-night."
	@$(BIN)/python -m pytest $(SIDE_BY_SIDE)
else
	@OFFBEAT_ALL_TESTS=night $(BIN)/python -m pytest $(TESTS)
endif

# How much of the tests is run, see tests/tiers.py.
ASKED := 1
test-night: ASKED := night

test-all: $(READY)  ## the tests of CI on one host: more random schedules, each kind of fault; less than half an hour on two cores
	@echo "Random tests with seed $(SEED); SEED=$(SEED) repeats them."
	@OFFBEAT_ALL_TESTS=$(ASKED) $(BIN)/python -m pytest $(SIDE_BY_SIDE) --ignore=$(FAULTS) --ignore=$(CLUSTER)
	@OFFBEAT_ALL_TESTS=$(ASKED) $(BIN)/python -m pytest $(FAULTS) -n 3 --dist worksteal

test-cluster: $(READY)  ## jobs on several hosts: namespaces, torchrun, Ray, and a real Slurm and etcd, which it installs (root, Debian)
	@tests/cluster/install_services.sh || echo "Slurm and etcd cannot be installed here: their tests skip"
	@$(INSTALL) -e '.[ray-train]' \
	  || echo "Ray cannot be installed here: its tests skip"
	@OFFBEAT_ALL_TESTS=$(ASKED) OFFBEAT_CLUSTER_TESTS=1 $(BIN)/python -m pytest $(CLUSTER) -n 2 --dist loadgroup

test-night: test-all test-cluster  ## everything: four times as many random schedules, and the tests that resemble another one; an hour

lint: $(READY)  ## ruff: style and likely bugs
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(READY)  ## mypy --strict
	@$(BIN)/mypy

format: $(READY)  ## let ruff rewrite what it can
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

docs: $(READY)  ## the documentation as a site: out/site/index.html
	@$(INSTALL) -e '.[docs]'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet && echo out/site/index.html

bench: $(READY)  ## measure this machine; see benchmarks/
	@$(BIN)/python -m benchmarks.dataplane && $(BIN)/python -m benchmarks.step

bench-advice: $(READY)  ## is the advice right? records a run, predicts other rules, and runs them; 15 minutes or more
	@$(BIN)/python -m benchmarks.advice

clean:  ## remove the environment and everything tools and runs have left
	rm -rf $(VENV) build dist runs out .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests examples benchmarks experiments -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# An environment of another Python than the one that was asked for is made anew.
VERSION_OF = $(shell $(1) -c 'import sys; print(sys.version)' 2>/dev/null)
ifneq ($(strip $(PYTHON)),)
ifneq ($(call VERSION_OF,$(BIN)/python),$(call VERSION_OF,$(PYTHON)))
.PHONY: $(READY)
ANOTHER := yes
endif
endif
# With another torch than the one that was asked for, it is kept, and pip changes that torch.
ifneq ($(TORCH),)
ifeq ($(wildcard $(VENV)/lib/python*/site-packages/torch-$(TORCH).dist-info $(VENV)/lib/python*/site-packages/torch-$(TORCH)+*.dist-info),)
.PHONY: $(READY)
endif
endif

# Once per change of the two files. A half-made .venv (no pip, another Python, a broken link) is made anew; a good one is kept.
# --no-compile: a module is compiled when it is first imported. Most of the 16,000 never are, and compiling all took almost half of the time.
$(READY): pyproject.toml constraints.txt
	@if [ -n "$(ANOTHER)" ] || ! $(BIN)/python -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	  for python in $(or $(strip $(PYTHON)),python3.11 python3 python); do \
	    if "$$python" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found="$$python"; break; fi; \
	  done; \
	  if [ -z "$${found:-}" ]; then \
	    echo "offbeat needs Python 3.11 or newer with its venv module. Tried $(or $(strip $(PYTHON)),python3.11 python3 python); '$(or $(strip $(PYTHON)),python3) --version' says:"; \
	    echo "  $$($(or $(strip $(PYTHON)),python3) --version 2>&1)"; \
	    echo "Install it first, on Debian or Ubuntu for instance: sudo apt install python3.11 python3.11-venv"; exit 1; \
	  fi; \
	  echo "Making the environment $(VENV) with $$("$$found" --version) ..."; \
	  "$$found" -m venv --clear $(VENV); \
	fi
	@echo "Installing offbeat and what it needs into $(VENV) (once; a minute or two, mostly PyTorch) ..."
	@$(INSTALL) --no-compile -e '.[dev]' \
	  || { echo "Could not install: pip's message above says what is missing. Mend it and say make again; nothing is lost."; exit 1; }
	@touch $(READY)
