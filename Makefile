# make train   a small MoE learns Python's standard library on this CPU, then writes a report
# make test    the tests
# Both create .venv the first time (Python >= 3.12 needed) and are quick after that. `make help` lists the rest.

VENV ?= .venv
PYTHON_RUN = $(VENV)/bin/python
OLDEST_VENV = .venv-oldest
OLDEST_JAX = 0.11.2
# What is checked again on the oldest supported jax: everything that touches XLA's FFI, sharding, differentiation and Grain.
OLDEST_TESTS = $(addprefix tests/, test_config.py test_data_packing.py test_routing.py test_schedule.py test_mesh.py \
  test_native_module.py test_native_layer.py test_native_transforms.py test_native_errors.py test_training_step.py)
NATIVE_SOURCES := $(shell find CMakeLists.txt cmake ffi kernels_cuda -type f 2>/dev/null)
INSTALL = scripts/install.sh
# One process per core of the smallest machine; a file stays in one process, so that it compiles its programs once.
WORKERS ?= -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: help setup train test test-all test-oldest cuda test-cuda-host test-cuda cuda-library torch lint sanitize bench-cpu lock

help:
	@echo "make train        train configs/quickstart.yaml: an MoE on Python's own source code"
	@echo "make test         the tests (under 10 minutes on 2 cores)"
	@echo "make test-all     the tests and the slow sweeps"
	@echo "make test-oldest  part of the tests on jax $(OLDEST_JAX), the oldest supported"
	@echo "make cuda         build the CUDA kernels too (needs nvcc 13.0 or newer)"
	@echo "make test-cuda-host  checks of the CUDA code that need nvcc and no GPU (host emulator, compiled code)"
	@echo "make cuda-library  build the kernels as a C library, for benchmarks/gpu_*.py and the kernels' own tests"
	@echo "make test-cuda    the tests that need a GPU (and torch); builds that library"
	@echo "make lint         ruff and mypy"
	@echo "make sanitize     C++ tests under the address, undefined-behaviour and thread sanitizers"
	@echo "make bench-cpu    the CPU benchmark of the expert layer"
	@echo "make lock         write constraints.txt from what .venv holds"

setup: $(VENV)/.installed

$(VENV)/.deps: pyproject.toml constraints.txt scripts/install.sh scripts/requirements.py
	@$(INSTALL) $(VENV) deps
	@touch $@

$(VENV)/.installed: $(VENV)/.deps $(NATIVE_SOURCES) moejax/__init__.py
	@$(INSTALL) $(VENV) moejax
	@touch $@

train: $(VENV)/.installed
	$(PYTHON_RUN) train.py configs/quickstart.yaml $(ARGS)

# The CUDA kernels have targets of their own below: their tests compile for minutes.
test: $(VENV)/.installed
	$(PYTHON_RUN) -m pytest $(WORKERS) --ignore=tests/cuda $(ARGS)

test-all: $(VENV)/.installed
	$(PYTHON_RUN) -m pytest $(WORKERS) --ignore=tests/cuda --slow $(ARGS)

$(OLDEST_VENV)/.deps: pyproject.toml constraints.txt scripts/install.sh scripts/requirements.py
	@JAX_PIN=$(OLDEST_JAX) $(INSTALL) $(OLDEST_VENV) deps
	@touch $@

$(OLDEST_VENV)/.installed: $(OLDEST_VENV)/.deps $(NATIVE_SOURCES) moejax/__init__.py
	@MOEJAX_CUDA=0 $(INSTALL) $(OLDEST_VENV) moejax
	@touch $@

test-oldest: $(OLDEST_VENV)/.installed
	$(OLDEST_VENV)/bin/python -m pytest $(WORKERS) $(OLDEST_TESTS) $(ARGS)

cuda: $(VENV)/.deps
	@MOEJAX_CUDA=1 $(INSTALL) $(VENV) moejax
	@touch $(VENV)/.installed

# What of the CUDA code a machine without a GPU can check: the built module's cubins, and the kernels on the host emulators, whose
# fibers are Boost.Context's (tests/cuda/host_build.py).
test-cuda-host: cuda
	@$(PYTHON_RUN) -c "from tests.cuda.host_build import boost_context as found; found()" 2>/dev/null || \
	  $(PYTHON_RUN) -m pip install -qq --no-deps --only-binary :all: cmeel-boost==1.90.0 || \
	  { echo "no wheel of cmeel-boost for this Python: install Boost.Context (Debian: apt install libboost-context-dev)" >&2; exit 1; }
	@$(PYTHON_RUN) -c "import importlib.metadata as m; m.version('nvidia-cutlass')" 2>/dev/null || \
	  $(PYTHON_RUN) -m pip install -qq --no-deps nvidia-cutlass==4.2.0.0
	@command -v cuobjdump >/dev/null || [ -x /usr/local/cuda/bin/cuobjdump ] || \
	  $(PYTHON_RUN) -m pip install -qq -c constraints.txt nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm
	PATH="$$PATH:/usr/local/cuda/bin:$$(echo $(CURDIR)/$(VENV)/lib/python*/site-packages/nvidia/cu13/bin)" MOEJAX_CUDA=1 $(PYTHON_RUN) -m pytest $(WORKERS) -m "not gpu" tests/cuda tests/test_cuda_module.py $(ARGS)

# On a machine with a GPU: all tests marked gpu. Those of the kernels alone drive the C library through torch, and would skip without.
test-cuda: torch cuda cuda-library
	MOEJAX_CUDA=1 $(PYTHON_RUN) -m pytest -m gpu $(ARGS)

cuda-library: $(VENV)/.deps
	@PATH="$$PATH:$${CUDA_HOME:-/usr/local/cuda}/bin"; command -v nvcc >/dev/null || { echo "cuda-library needs nvcc 13.0 or newer: on PATH, or under CUDA_HOME" >&2; exit 1; }
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH:$${CUDA_HOME:-/usr/local/cuda}/bin" && cmake -S kernels_cuda -B build/cuda -G Ninja && cmake --build build/cuda

torch: $(VENV)/.deps
	@$(PYTHON_RUN) -c "import torch" || { echo "test-cuda needs torch, which moejax does not, and which replaces JAX's CUDA packages by older ones: in an" \
	  "environment for these tests alone, make setup VENV=.venv-gpu-tests, .venv-gpu-tests/bin/pip install torch==2.11.0, make test-cuda VENV=.venv-gpu-tests" >&2; exit 1; }

lint: $(VENV)/.deps
	$(PYTHON_RUN) -m ruff check .
	$(PYTHON_RUN) -m ruff format --check .
	$(PYTHON_RUN) -m mypy

sanitize: $(VENV)/.installed
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" bash ffi/tests/sanitize.sh

bench-cpu: $(VENV)/.installed
	$(PYTHON_RUN) benchmarks/cpu_moe.py $(ARGS)

lock: $(VENV)/.deps
	@{ sed -n '/^#/p' constraints.txt; $(PYTHON_RUN) -m pip freeze --all --exclude moejax | grep -E '^[A-Za-z0-9._-]+=='; } > constraints.new
	@mv constraints.new constraints.txt && echo "constraints.txt: $$(grep -c == constraints.txt) packages"
