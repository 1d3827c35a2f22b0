# From a fresh clone: `make demo` and `make test`. Each makes .venv, installs and builds only what is missing or changed.
PYTHON ?= python3
TORCH ?= 2.13.0
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
CODE := setup.py sdpa dispatch kernels tuning_tables bench tests examples
NATIVE := $(wildcard bench/*.c sdpa/*/*.cpp sdpa/*/*.h examples/*.cpp kernels/cpu/*.cpp kernels/cpu/*/*.cpp kernels/cpu/*.h kernels/cuda/*.cpp kernels/cuda/*.h kernels/cuda/*.cuh kernels/cuda/*/*.cuh)
# What is formatted and not compiled here: Metal's source, and the emulator of its tests, which they compile themselves.
METAL := $(wildcard kernels/metal/*.metal tests/metal/*/*.cpp tests/metal/*/*.h)
# Headers that the CUDA kernels are built with, where there is an nvcc.
CUTLASS ?= 4.2.0.0
SANITIZER ?= compute-sanitizer
# Processes that test on a GPU: nearly all of their time goes into compiling.
GPU_JOBS ?= 8
# For how long `make fuzz` begins new cases, from which seed (none: a random one), and how many at most (0: any number).
SECONDS ?= 120
SEED ?=
CASES ?= 0
CALLS ?= 100000
# Tests run in so many processes.
JOBS ?= 2
# What `make test-torch VERSION=...` runs: by default what lies between a call and its kernel, where most of torch's private parts
# are. TESTS=tests is all that needs no GPU.
ENTRY := calls compile decorators derivatives eager errors graph_derivatives native_calls neighbours operators patch repeated \
  repeated_backward semantics toggles varlen
TESTS ?= $(ENTRY:%=tests/test_%.py)
VERSION ?= $(TORCH)
OTHER := .venv-torch-$(VERSION)
SUITES := cpu-forward cpu-backward cpu-decode overhead
READY := $(VENV)/built

.PHONY: demo test test-ordinary test-interpreted test-metal test-torch install-torch test-arm prepare-arm fuzz lint bench gpu-test gpu-soak gpu-sanitize wheel clean

demo: $(READY)
	$(BIN)/python examples/train_gpt.py

# Two processes test on two processors. OpenMP's threads spin while they wait for one another, on the processor that the other
# process needs: tests of two threads took five times as much of it.
test-ordinary test-interpreted test-torch test-arm: export OMP_WAIT_POLICY := passive

test: lint test-ordinary test-interpreted

test-ordinary: $(READY)
	$(BIN)/python -m pytest -q -m "not gpu" --durations=10 -n $(JOBS) --dist worksteal

# Triton reads the variable when it defines a kernel, so that these tests want a process of their own.
test-interpreted: $(READY)
ifeq ($(shell uname -s),Linux)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -q --durations=10 -n $(JOBS) --dist worksteal tests/interpreted
else
	@echo "Triton has no package for this system: its kernels are not tested"
endif

# The Metal kernels on this CPU, in an emulator that clang compiles them for (Debian's package clang-19).
test-metal: $(READY)
	$(BIN)/python -m pytest -q --durations=10 -n $(JOBS) --dist worksteal tests/metal

install-torch: $(OTHER)/ready

# With another torch and the library that was built with the torch of .venv.
test-torch: $(OTHER)/ready
	$(OTHER)/bin/python -m pytest -q -m "not gpu" --durations=10 -n $(JOBS) --dist worksteal $(TESTS)

# Arm without an Arm machine; what it downloads stays in build/aarch64. Where its tools cannot be had it says so and ends.
test-arm: $(VENV)/torch-$(TORCH)
	$(BIN)/python tests/arm/run.py

# The tools and downloads of test-arm, and no test.
prepare-arm: $(VENV)/torch-$(TORCH)
	$(BIN)/python tests/arm/run.py --prepare

# Reads and writes out of bounds, undefined arithmetic, leaks: the operators of cpu_flash, called at random. What fails has a
# seed, and is called again alone by `make fuzz SEED=... CASES=1`.
fuzz: $(READY)
	$(BIN)/python tests/sanitize/run.py --seconds $(SECONDS) --cases $(CASES) $(if $(SEED),--seed $(SEED))

lint: $(READY)
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(NATIVE) $(METAL)

bench: $(READY)
	for suite in $(SUITES); do $(BIN)/sdpa bench --suite $$suite || exit 1; done

gpu-test: $(READY)
	$(BIN)/python -m pytest -q -m gpu --durations=10 -n $(GPU_JOBS) --dist worksteal

gpu-soak: $(READY)
	$(BIN)/python tests/soak.py --calls $(CALLS)

# Reads and writes out of bounds, by a tool of the CUDA toolkit; torch's allocator would hide those inside its blocks.
gpu-sanitize: $(READY)
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SANITIZER) --tool memcheck --error-exitcode 1 \
		$(BIN)/python -m pytest -q -m gpu -k sanitized tests/test_gpu.py tests/test_gpu_cuda_bias.py

wheel: $(READY)
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

clean:
	rm -rf $(VENV) .venv-torch-* build dist *.egg-info kernels/*/*.so sdpa/*/*.so
	find sdpa -maxdepth 1 -type l -delete

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/torch-$(TORCH): | $(BIN)/python
	@echo "installing torch $(TORCH) into $(VENV)"
	$(PIP) torch==$(TORCH) "setuptools>=77" wheel ninja
	touch $@

# CUTLASS' headers come last: pip calls it an error that their package's own requirements are missing, where it installs others.
$(VENV)/installed: $(VENV)/torch-$(TORCH) setup.py pyproject.toml
	@echo "installing sdpa and what its tests and tables need"
	$(PIP) torch==$(TORCH) --no-build-isolation --editable ".[cli,test]"
	if [ "$$SDPA_BUILD_CUDA" != 0 ] && command -v nvcc > /dev/null; then $(PIP) --no-deps nvidia-cutlass==$(CUTLASS); fi
	touch $@

# Torch and what it asks for that .venv has not; all else is found in .venv. PyPI's torch for x86-64 needs CUDA's libraries,
# 4 to 6 GB of them; PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu and VERSION=2.15.0+cpu do without.
$(OTHER)/ready: | $(READY)
	@echo "installing torch $(VERSION) into $(OTHER)"
	$(BIN)/python -m venv --clear $(OTHER)
	site=$$(cd $(VENV) && echo lib/python*/site-packages) && \
		echo "import site; site.addsitedir('$(abspath $(VENV))/$$site')" > $(OTHER)/$$site/shared.pth
	$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check --no-cache-dir torch==$(VERSION) "setuptools>=77"
	touch $@

$(READY): $(VENV)/installed $(NATIVE) kernels/cuda/instances.def
	@echo "building the native libraries"
	$(BIN)/python setup.py --quiet build_ext --inplace
	touch $@
