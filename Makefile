# Everything that is done often, each one command. Needs Linux, make, and Python 3.11 or newer with its venv module.
#
# torch comes from pip's index, on Linux usually as a CUDA build. Without a GPU, put PyTorch's CPU index into
# PIP_EXTRA_INDEX_URL first: pip then prefers the smaller CPU build of the pinned version.

SHELL := /bin/bash
PYTHON ?= python3
MODEL ?= smollm2-135m-instruct
DEMO_PORT ?= 50051
DEMO_QUESTION ?= Why is the sky blue? Answer in two sentences.
# Two more than two cores: while tests wait for processes, leases and clocks, others compute.
PYTEST_WORKERS ?= 4
BIN := .venv/bin

.PHONY: setup site model demo test test-quick mutants isa sanitize lint kernels protos locks sbom audit bench chaos try-compose try-kubernetes clean

setup: .venv/.installed .venv/.warm

# As a path, not by setuptools' finder: to a script beside a clone whose folder is called octavo, that folder is a package
# without a file, which comes before a finder and after a path.
EDITABLE := --config-settings editable_mode=compat --editable

# Again only when the dependencies have changed.
.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Octavo needs Python 3.11 or newer: make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	  || { echo "Python's venv module is missing: apt-get install python3-venv"; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	@echo "Installing Octavo and its dependencies into .venv: a few minutes the first time"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt $(EDITABLE) '.[dev]'
	@touch $@

CXX_FILES := $(wildcard kernels/cpu/native/*.cpp kernels/cpu/native/*.h)
NATIVE := $(CXX_FILES) $(wildcard kernels/cpu/native/*.py)

# Compiled once here, so that neither the first start nor a test waits for it. Without a compiler of C++ pip brings one.
.venv/.warm: .venv/.installed $(NATIVE)
	@test -n "$$(command -v $${CXX:-g++} g++ clang++ c++)" || $(BIN)/python -m pip install --quiet --disable-pip-version-check ziglang
	@$(BIN)/python kernels/cpu/native/build.py
	@touch $@

# As other processors would compute, which only tests ask for.
.venv/.warm-tests: .venv/.warm
	@$(BIN)/python kernels/cpu/native/build.py --tests
	@touch $@

model: setup
	@$(BIN)/octavo model fetch $(MODEL)

demo: model
	@PORT=$(DEMO_PORT) MODEL=$(MODEL) QUESTION='$(subst ','\'',$(DEMO_QUESTION))' BIN=$(BIN) bash deploy/demo.sh

# Slow files are begun first (tests/conftest.py), not those of many tests, as xdist would. Bytecode is kept, whatever the
# environment says: hundreds of processes are started, and each would compile the same sources for a fifth of a second.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

test: model .venv/.warm-tests
	$(PYTEST) --durations=20 --junitxml=.pytest_cache/results.xml $(PYTEST_ARGS)

# Files that take a moment each, by tests/seconds.json: options, messages, core, plain kernels, docs. Made for a minute.
test-quick: setup
	$(PYTEST) --quick --quiet $(PYTEST_ARGS)

# What the tests of the scheduler's core and the worker's mirror find of 200 random changes: ten to thirty minutes on one core.
mutants: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutants 200

# The tests of kernels and workers as other processors would compute them, as far as this one can: ten minutes each.
isa: model
	$(BIN)/python -m tests.isa all $(PYTEST_ARGS)

# The tests of kernels with checks of memory and of undefined behaviour, as this processor computes best, as one with AVX2
# alone, as one without, and with AMX's tiles emulated: twenty minutes.
SANITIZED := .pytest_cache/sanitized
SANITIZED_TESTS := tests/kernels/test_cpu_*.py tests/kernels/test_int*.py tests/kernels/test_layer_stack.py \
  tests/kernels/test_shared_*.py tests/kernels/test_sampling.py
# Emulated tiles take many minutes for the rows of the test that is left out, which the other levels run.
TILES := tests/kernels/test_tile_products.py \
  --deselect tests/kernels/test_shared_work.py::test_a_thread_that_ends_gives_its_memory_back
sanitize: setup
	$(call sanitized,best,)
	$(call sanitized,avx2,--level avx2)
	$(call sanitized,plain,--level plain)
	$(call sanitized,amx-emulated,--level amx-emulated)
sanitized = $(BIN)/python kernels/cpu/native/build.py --sanitize $(2) --into $(SANITIZED)/$(1) && \
  LD_PRELOAD=$$(g++ -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0:quarantine_size_mb=16 \
  UBSAN_OPTIONS=halt_on_error=1 $(if $(2),KERNELS_CPU_LEVEL=$(1)) \
  KERNELS_CPU_LIBRARY=$$(ls -t $(SANITIZED)/$(1)/*.so | head -1) OMP_NUM_THREADS=1 \
  $(BIN)/python -m pytest -q -p no:cacheprovider $(SANITIZED_TESTS) \
  $(if $(findstring amx,$(1)),$(TILES)) -k "not triton"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)
	$(BIN)/mypy
	$(BIN)/python -m pytest --quiet tests/test_stubs.py

# Compiles every variant for six GPU architectures, without a GPU, or for TARGETS (sm_90,sm_120). Keeps what is compiled.
kernels: setup
	$(BIN)/octavo bench kernels --compile-only $(if $(TARGETS),--target $(TARGETS))

protos: setup
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. \
	  protos/*.proto

# docs/ as pages of HTML in site/; `.venv/bin/zensical serve` shows them while they are written.
site: setup
	$(BIN)/zensical build --strict

# Writes the hashes of what images install; needed after a change of pyproject.toml or constraints.txt.
locks: setup
	bash deploy/lock.sh
	$(BIN)/python -m deploy.sbom

# Writes what images have in CycloneDX, from the locks; `make locks` does it too.
sbom: setup
	$(BIN)/python -m deploy.sbom

# Known vulnerabilities of what images install: fails for one, and says so in one line where their data is out of reach.
audit: setup
	$(BIN)/python -m deploy.audit

# Images and compose files on a Docker engine: half an hour the first time. Options: see the script.
try-compose: setup
	bash deploy/try-compose.sh

# Manifests and chart on an API server: KUBEBUILDER_ASSETS has etcd, kube-apiserver, kubectl; CRDS those of custom kinds.
try-kubernetes: setup
	$(BIN)/python -m pytest -m api_server tests/test_kubernetes_api_server.py $(PYTEST_ARGS)

bench: model
	$(BIN)/python -m benchmarks.readme_figures

# The short profile, which `make test` also runs, then the long one, without limits of time: about an hour.
chaos: model
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/chaos $(PYTEST_ARGS)
	OMP_NUM_THREADS=1 TESTS_TRY=10 $(BIN)/python -m pytest -m 'chaos or without_end' --timeout 0 -o faulthandler_timeout=0 $(PYTEST_ARGS)

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info kernels/cpu/native/built
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
