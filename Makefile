# sglang-dlite: every target installs what it needs, and does nothing twice.
#   make PYTHON=python3.12 ...  another interpreter     make VENV=dir ...  another environment

PYTHON ?= python3
VENV   ?= .venv
PORT   ?= 30000
JSON   ?=
ARGS   ?=

BIN   := $(VENV)/bin
STAMP := $(VENV)/.sglang-dlite-installed

.DEFAULT_GOAL := help
KERNEL_SOURCES := $(wildcard sgl-kernel/setup.py sgl-kernel/pyproject.toml sgl-kernel/csrc/* \
                    sgl-kernel/python/sglang_dlite_kernel/*.py)
KERNEL_STAMP   := $(VENV)/.sglang-dlite-kernel-installed

.PHONY: help install demo serve check bench soak gpu-check test test-slow lint format clean

help:  ## show this text
	@echo "usage: make TARGET [PYTHON=python3] [VENV=.venv]"
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) $(KERNEL_STAMP)  ## create .venv and install the package with its development tools

# The package is installed editable, so only its metadata can make an installation stale.
# The stamp comes last: an interrupted installation is taken up again by the next call.
$(STAMP): python/pyproject.toml
	@set -e; \
	if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  found=; \
	  for python in $(PYTHON) python3.12 python3.13 python3.11; do \
	    if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	      found="$$python"; break; \
	    fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo "error: no Python >= 3.11 found (tried $(PYTHON), python3.12, python3.13, python3.11)."; \
	    echo "       Install one, or name it: make install PYTHON=/path/to/python3.12"; \
	    exit 1; \
	  fi; \
	  echo "== creating $(VENV) with $$found"; \
	  "$$found" -m venv $(VENV); \
	fi; \
	echo "== installing sglang-dlite and SGLang into $(VENV) (several GB the first time)"; \
	$(BIN)/python -m pip install --editable 'python[dev]'; \
	touch $@

# The compiled CPU kernels are an option: without a compiler, or where the build fails, serving goes
# on with torch operators. --no-build-isolation builds them against the torch that will load them.
# Another installation may have brought another torch, so it is followed by another build, from nothing.
$(KERNEL_STAMP): $(KERNEL_SOURCES) $(STAMP)
	@rm -rf sgl-kernel/build
	@if ! command -v $${CXX:-c++} >/dev/null; then \
	  echo "note: no C++ compiler; the CPU kernels are not built (a GPU does not need them)"; \
	elif echo "== building the CPU kernels" && $(BIN)/python -m pip install --quiet \
	  --no-build-isolation --no-deps --force-reinstall ./sgl-kernel; then \
	  touch $@; \
	else \
	  echo "warning: the CPU kernels did not build; a CPU is served by torch operators instead"; \
	fi

demo: install  ## play one agent session with and without DLITE (JSON=file writes the table as well)
	@$(BIN)/python -m sglang_dlite.demo --work-dir work/demo $(if $(JSON),--json "$(JSON)") $(ARGS)

serve: install  ## keep the embedded model served with DLITE (PORT=30000); Ctrl-C stops it
	@$(BIN)/python -m sglang_dlite.demo.serve --port $(PORT) $(ARGS)

check: install  ## diagnose the installation
	@$(BIN)/sglang-dlite check

bench: install  ## measure DLITE against the target alone, write work/bench/cpu/report.html (~9 min)
	@$(BIN)/sglang-dlite bench --config cpu --max-minutes 15 $(ARGS)

soak: install  ## 10 minutes of random traffic, every reply checked (ARGS="--minutes 2 --seed 1")
	@$(BIN)/python test/soak $(ARGS)

# Installs nothing: with no .venv, any $(PYTHON) that has torch, Triton and safetensors does.
gpu-check: ## prove the CUDA path on this machine's GPU (JSON=file writes the results as well)
	@PYTHONPATH=python $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m sglang_dlite.gpu_check \
	  $(if $(JSON),--json "$(JSON)") $(ARGS)

test: install  ## run the fast tests (ARGS="-k name" goes to pytest)
	@$(BIN)/python -m pytest $(ARGS)

test-slow: install  ## run the tests that launch servers or take minutes
	@$(BIN)/python -m pytest -m "slow and not gpu" $(ARGS)

lint: $(STAMP)  ## check formatting, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP)  ## rewrite the sources in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove the environment and what the demo left
	rm -rf $(VENV) sgl-kernel/build work/demo .mypy_cache .pytest_cache .ruff_cache
