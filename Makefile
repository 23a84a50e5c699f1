# Two commands matter: `make run` answers a question with a real small model, `make test` runs the tests.
# Both need CPython >= 3.11, gcc, g++, cmake and make; everything else is installed into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OS := $(shell uname -s)
ARCH := $(shell uname -m)

# A Mac with Apple silicon uses Metal (plain mlx), a machine with an NVIDIA driver CUDA, all others the CPU.
ifeq ($(OS)-$(ARCH),Darwin-arm64)
EXTRA ?=
else ifneq ($(shell command -v nvidia-smi 2>/dev/null),)
EXTRA ?= cuda
else
EXTRA ?= cpu
endif

empty :=
comma := ,
space := $(empty) $(empty)
extras = $(if $(strip $(1)),[$(subst $(space),$(comma),$(strip $(1)))])

NATIVE_SOURCES := $(shell find native/src native/python native/*.cmake native/CMakeLists.txt native/pyproject.toml -type f -not -name "*.pyc")

.PHONY: run test lint types clean

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "arriero needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/.run: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.$(call extras,$(EXTRA))'
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.run
	$(BIN)/python -m pip install --quiet --editable '.$(call extras,$(EXTRA) dev)'
	@touch $@

# Our own CPU kernels: without a compiler the product still works on plain MLX, slower, and says so.
$(VENV)/.native: $(NATIVE_SOURCES) $(VENV)/.run
ifeq ($(EXTRA),cpu)
	@echo 'building the CPU kernels (a minute or two)'
	@$(BIN)/python -m pip install --quiet ./native || echo 'WARNING: the CPU kernels could not be built; arriero runs on plain MLX, far slower' >&2
endif
	@touch $@

run: $(VENV)/.run $(VENV)/.native
	@$(BIN)/python tools/demo.py

test: $(VENV)/.dev $(VENV)/.native
	@if $(BIN)/python -c 'import arriero_cpu' 2>/dev/null; then cd native && ../$(BIN)/python -m pytest tests; \
	else echo 'the CPU kernels are not built here: their own tests are left out'; fi
	$(BIN)/python -m pytest $(PYTEST)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build native/build src/*.egg-info .mypy_cache .ruff_cache .pytest_cache
