# Two commands from a fresh clone: `make demo` and `make test`. Each makes .venv, installs torch and builds what is missing.
PYTHON ?= python3
TORCH ?= 2.13.0
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
SOURCES := $(wildcard kernels/cpu/*.cpp kernels/cpu/*.h) setup.py pyproject.toml

.PHONY: demo test lint bench gpu-test wheel clean

demo: $(VENV)/installed
	$(BIN)/python examples/train_gpt.py

test: $(VENV)/installed lint
	$(BIN)/python -m pytest -q -m "not gpu" --durations=10

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: $(VENV)/installed
	for suite in cpu-forward cpu-backward cpu-decode overhead; do $(BIN)/sdpa bench --suite $$suite || exit 1; done

# On a machine with a GPU, where torch and the package are installed already.
gpu-test:
	$(PYTHON) -m pytest -q -m gpu

wheel: $(VENV)/installed
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

clean:
	rm -rf $(VENV) build dist *.egg-info kernels/cpu/*.so

$(VENV)/torch:
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip "setuptools>=77" wheel ninja
	$(PIP) torch==$(TORCH)
	touch $@

$(VENV)/installed: $(VENV)/torch $(SOURCES)
	$(PIP) --no-build-isolation --editable ".[cli,test]"
	touch $@
