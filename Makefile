# The two commands are `make train` (the main job) and `make test`. Both make the environment first:
# .venv, filled once, and again when the packages asked for change.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# GPUs where there are some, else four processes on the CPU.
RANKS ?= $(shell n=$$(nvidia-smi -L 2>/dev/null | grep -c '^GPU'); test "$$n" -gt 0 && echo $$n || echo 4)
PYTEST := $(BIN)/python -m pytest

# Compiled operators stay in the checkout: a stale lock in the user's cache hangs every later job.
export TORCH_EXTENSIONS_DIR := $(CURDIR)/.torch_extensions
# Several processes share the cores; one thread each.
export OMP_NUM_THREADS ?= 1
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: help env train test test-all lint format clean

help:
	@echo "make train     install into .venv and run the main job"
	@echo "make test      unit tests, then the small distributed grid"
	@echo "make test-all  every test, the long ones too"
	@echo "make lint      ruff and mypy"
	@echo "make clean     remove .venv and everything built"
	@echo "PYTHON=python3.12 takes another interpreter; RANKS=8 other than $(RANKS) processes."

env: $(STAMP)

$(STAMP): pyproject.toml setup.py constraints.txt ds_autoplan_hook.pth
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 10) <= v <= (3, 13) or sys.exit("ds_autoplan needs Python 3.10 to 3.13, $(PYTHON) is %d.%d; name another: make PYTHON=python3.12" % v)'
	@test ! -e $(VENV) || test -x $(BIN)/pip || { echo "$(VENV) holds no pip: remove it, and it is made anew"; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || rm -rf $(VENV)
	@test -x $(BIN)/pip || $(PYTHON) -m virtualenv $(VENV) || rm -rf $(VENV)
	@test -x $(BIN)/pip || { echo "No virtual environment could be made. On Debian and Ubuntu: apt install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test,lint]'
	@touch $@

train: $(STAMP)
	$(BIN)/deepspeed --num_gpus $(RANKS) examples/train_clm.py --deepspeed_config examples/ds_autoplan.json

test: $(STAMP)
	$(PYTEST) -m "not full"

test-all: $(STAMP)
	$(PYTEST)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .torch_extensions .pytest_cache .mypy_cache .ruff_cache runs
