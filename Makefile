# Two commands do everything: `make demo` and `make test`. `make help` lists the rest.
.NOTPARALLEL:
.DEFAULT_GOAL := help
.PHONY: help demo test test-jax-min lint format format-check types notebooks venv clean

VENV ?= .venv
VENV_MIN ?= .venv-min
DEMO_ARGS ?=
TEST_ARGS ?=
# What the demo needs beyond the run-time dependencies: on a machine with an NVIDIA GPU, JAX for it too.
# `make demo CUDA=` stays on the CPU.
CUDA ?= $(if $(shell nvidia-smi -L 2>/dev/null),cuda)
comma := ,
EXTRAS_DEMO = viz$(if $(strip $(CUDA)),$(comma)cuda)
EXTRAS_TEST = $(EXTRAS_DEMO),notebooks,test
# The oldest JAX that pyproject.toml allows, and the newest flax that was out with it.
MIN_PINS := jax==0.11.2 jaxlib==0.11.2 flax==0.12.10
# A collective that one rank never reaches hangs: no test may take longer than this.
TEST_TIMEOUT_S ?= 900
# The timer is a thread: a signal would wait for XLA to return.
PYTEST := pytest --timeout=$(TEST_TIMEOUT_S) --timeout-method=thread

RUN := "$(VENV)/bin/python" -m
export PYTHON

help: ## this list
	@echo "make TARGET [PYTHON=/path/to/python3.13] [VENV=.venv]"
	@sed -n 's/^\([a-z-]*\):.*## /  \1\t/p' Makefile | expand -t 18

demo: ## train a small MoE model and check it against the dense oracle; DEMO_ARGS="--steps 50", CUDA= for CPU
	@sh scripts/make_venv.sh "$(VENV)" "$(EXTRAS_DEMO)"
	"$(VENV)/bin/jaxmoe" demo $(DEMO_ARGS)

venv: ## make the environment of `make test` without running anything
	@sh scripts/make_venv.sh "$(VENV)" "$(EXTRAS_TEST)"

test: venv ## the whole suite; TEST_ARGS="-n 2 -k routing"
	$(RUN) $(PYTEST) -n 2 --dist loadgroup $(TEST_ARGS)

test-jax-min: ## the suite without its slow tests, on jax 0.11.2 exactly
	@sh scripts/make_venv.sh "$(VENV_MIN)" viz,notebooks,test $(MIN_PINS)
	"$(VENV_MIN)/bin/python" -m $(PYTEST) -n 2 --dist loadgroup -m "not slow" $(TEST_ARGS)

lint: venv ## ruff's checks
	$(RUN) ruff check .

format: venv ## rewrite the sources in the house format
	$(RUN) ruff check --fix-only .
	$(RUN) ruff format .

format-check: venv ## fail where `make format` would change something
	$(RUN) ruff format --check .

types: venv ## mypy
	$(RUN) mypy

notebooks: venv ## execute every notebook, and check that each .py and .ipynb agree
	$(RUN) scripts.run_notebooks notebooks

clean: ## remove the environments and caches
	rm -rf "$(VENV)" "$(VENV).lock" "$(VENV_MIN)" "$(VENV_MIN).lock" .pytest_cache .mypy_cache .ruff_cache dist build
	find . -name .git -prune -o -name __pycache__ -type d -exec rm -rf {} +
