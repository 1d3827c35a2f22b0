# From a fresh clone: `make demo` and `make test`. Each makes .venv, installs and builds only what is missing or changed.
PYTHON ?= python3
TORCH ?= 2.13.0
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
CODE := setup.py sdpa dispatch kernels tuning_tables bench tests examples
NATIVE := $(wildcard kernels/cpu/*.cpp kernels/cpu/*.h)
SUITES := cpu-forward cpu-backward cpu-decode overhead
READY := $(VENV)/built

.PHONY: demo test lint bench gpu-test wheel clean

demo: $(READY)
	$(BIN)/python examples/train_gpt.py

test: lint
	$(BIN)/python -m pytest -q -m "not gpu" --durations=10

lint: $(READY)
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/clang-format --dry-run -Werror $(NATIVE)

bench: $(READY)
	for suite in $(SUITES); do $(BIN)/sdpa bench --suite $$suite || exit 1; done

gpu-test: $(READY)
	$(BIN)/python -m pytest -q -m gpu

wheel: $(READY)
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

clean:
	rm -rf $(VENV) build dist *.egg-info kernels/cpu/*.so

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/torch-$(TORCH): | $(BIN)/python
	@echo "installing torch $(TORCH) into $(VENV)"
	$(PIP) torch==$(TORCH) "setuptools>=77" wheel ninja
	touch $@

$(VENV)/installed: $(VENV)/torch-$(TORCH) setup.py pyproject.toml
	@echo "installing sdpa-kernels and what its tests and tables need"
	$(PIP) torch==$(TORCH) --no-build-isolation --editable ".[cli,test]"
	touch $@

$(READY): $(VENV)/installed $(NATIVE)
	$(BIN)/python setup.py --quiet build_ext --inplace
	touch $@
