# Every target sets itself up in .venv; nothing global is touched. CONTRIBUTING.md tells which one to use when.
PYTHON ?= python3
BIN := .venv/bin
PIP := env -u MAKEFLAGS $(BIN)/python -m pip --quiet --disable-pip-version-check
# Python files of packages are compiled when they are first imported, since most of them never are. They must be kept then:
# torch alone takes 7 s to import from source.
INSTALL := $(PIP) install --no-compile -c constraints.txt
unexport PYTHONDONTWRITEBYTECODE
# Without make's flags, by which ninja would ask make for its jobs.
NINJA := env -u MAKEFLAGS $(BIN)/cmake --build
CTEST := $(BIN)/ctest --parallel 2 --output-on-failure --test-dir

# A compiler cache serves where there is one.
export CMAKE_CXX_COMPILER_LAUNCHER ?= $(shell command -v ccache)

PYTHON_FOLDERS := src tests benchmarks tools packages
CPP_FILES = $(shell find csrc tests -name "*.h" -o -name "*.cc") src/tilewright/ops/torch_backend/gpu_kernels.cu
SOURCES := pyproject.toml constraints.txt CMakeLists.txt README.md \
  $(shell find csrc src -type f -not -name '*.so' -not -path '*/__pycache__/*')
TINY_SOURCES := $(shell find packages/tilewright-tiny/src packages/tilewright-tiny/pyproject.toml -type f -not -path '*/__pycache__/*')

# What is set up: for the demo, or for tests, which need more and serve the demo too.
MODE := $(if $(filter demo,$(MAKECMDGOALS)),$(if $(wildcard .venv/.package-test),test,demo),test)

.PHONY: demo set-up
demo: set-up
	@$(BIN)/tilewright demo

set-up:
	@$(MAKE) --no-print-directory -j 2 MODE=$(MODE) .venv/.package-$(MODE)

# What lint does on one core goes on beside builds.
.PHONY: test lint test-cpp test-python
test: set-up
	@$(MAKE) --no-print-directory -j 2 lint test-cpp
	@$(MAKE) --no-print-directory test-python

# Lint but for types, and the fast tests of engine, inputs and weights: what to run while working. After `make dev`, of src
# as it stands.
.PHONY: quick dev op
QUICK := tests/engine tests/inputs tests/weights tests/test_types.py tests/test_config.py tests/test_docs.py
quick:
	@test -x $(BIN)/pytest || $(MAKE) --no-print-directory set-up
	$(BIN)/ruff check $(PYTHON_FOLDERS)
	$(BIN)/ruff format --check $(PYTHON_FOLDERS)
	OMP_WAIT_POLICY=passive $(BIN)/pytest -q -n 2 --dist loadfile -m "not slow and not fuzz and not alone" $(QUICK)

# An editable install: a changed Python line counts at once, and after a change to C++ `make dev` compiles what it touches,
# at the best level of each op alone.
dev: .venv/.needs-test
	@rm -f .venv/.package-*
	$(INSTALL) $(BUILD_OPTIONS) --config-settings=build-dir=build/dev \
	  --config-settings=cmake.define.TILEWRIGHT_LEVELS=host --editable .
	$(INSTALL) $(BUILD_OPTIONS) --editable ./packages/tilewright-tiny

# The C++ tests of one op at one level and scalar: make op OP=norm LEVEL=avx2
OP ?= linear
LEVEL ?= host
op: .venv/.tools
	@$(BIN)/cmake -S . -B build/op_$(LEVEL) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DTILEWRIGHT_PYTHON=OFF \
	  -DTILEWRIGHT_TESTS=ON -DTILEWRIGHT_LEVELS=$(LEVEL) > build/op.log || (cat build/op.log; false)
	$(NINJA) build/op_$(LEVEL) --target test_$(OP)
	build/op_$(LEVEL)/test_$(OP)

# What is slow: the C++ tests under sanitizers and of the other architecture, replicas, the wheel, recipes, long fuzzing.
.PHONY: test-all test-cpp-sanitized test-cpp-emulated test-ray test-long
test-all: test test-cpp-sanitized test-cpp-emulated test-long test-ray

lint: set-up
	$(BIN)/ruff check $(PYTHON_FOLDERS)
	$(BIN)/ruff format --check $(PYTHON_FOLDERS)
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)

# The C++ tests of every level that this machine runs, linked from the objects of the package. Where the CPU lacks the
# tiles or bf16 products of x86, these levels are compiled apart, with their instructions simulated
# (csrc/base/x86/simulated.h): every machine with AVX-512 tests all levels of x86.
SIMULATED := $(if $(filter x86_64,$(shell uname -m)),$(if $(shell grep -m 1 -o amx_tile /proc/cpuinfo),,amx;avx512_bf16))
test-cpp: set-up
	@$(BIN)/cmake build/release -DTILEWRIGHT_TESTS=ON > build/tests.log || (cat build/tests.log; false)
	$(NINJA) build/release --target tests
	$(CTEST) build/release
ifneq ($(SIMULATED),)
	@$(BIN)/cmake -S . -B build/simulated -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DTILEWRIGHT_PYTHON=OFF \
	  -DTILEWRIGHT_TESTS=ON -DTILEWRIGHT_SIMULATE=ON "-DTILEWRIGHT_LEVELS=$(SIMULATED)" \
	  -DCMAKE_BUILD_TYPE=Debug "-DCMAKE_CXX_FLAGS_DEBUG=-O1" > build/simulated.log || (cat build/simulated.log; false)
	$(NINJA) build/simulated
	$(CTEST) build/simulated
endif

# The same tests with optimisation low enough that the sanitizers name lines.
test-cpp-sanitized: set-up
	@$(BIN)/cmake -S . -B build/sanitize -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DTILEWRIGHT_PYTHON=OFF \
	  -DTILEWRIGHT_TESTS=ON -DTILEWRIGHT_SANITIZE=ON -DTILEWRIGHT_SIMULATE=$(if $(SIMULATED),ON,OFF) \
	  -DCMAKE_BUILD_TYPE=Debug "-DCMAKE_CXX_FLAGS_DEBUG=-O1 -g1" > build/sanitize.log || (cat build/sanitize.log; false)
	$(NINJA) build/sanitize
	$(CTEST) build/sanitize

# The C++ tests of the architecture that this machine is not, cross-built and run under emulation, so that a change made
# on one does not break the other. On x86-64 the emulator's masked loads touch what the mask leaves out: slack instead of
# guard pages.
OTHER_ARCH := $(if $(filter x86_64,$(shell uname -m)),aarch64,x86_64)
EMULATOR := qemu-$(OTHER_ARCH)
CROSS_CXX := $(OTHER_ARCH)-linux-gnu-g++
test-cpp-emulated: set-up
	@if command -v $(EMULATOR) > /dev/null && command -v $(CROSS_CXX) > /dev/null; then \
	  $(MAKE) --no-print-directory run-emulated; \
	else \
	  echo "LEFT OUT: the C++ tests of $(OTHER_ARCH). They need $(EMULATOR) and $(CROSS_CXX), on Debian the packages" \
	    "qemu-user and g++-$(subst _,-,$(OTHER_ARCH))-linux-gnu."; \
	  test "$$TILEWRIGHT_TEST_EMULATED" != required; \
	fi

.PHONY: run-emulated
run-emulated:
	@$(BIN)/cmake -S . -B build/$(OTHER_ARCH) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) \
	  -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=$(OTHER_ARCH) -DCMAKE_CXX_COMPILER=$(CROSS_CXX) \
	  "-DCMAKE_CROSSCOMPILING_EMULATOR=$(EMULATOR);-cpu;max;-L;/usr/$(OTHER_ARCH)-linux-gnu" \
	  -DTILEWRIGHT_PYTHON=OFF -DTILEWRIGHT_TESTS=ON -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG=-O1 \
	  $(if $(filter x86_64,$(OTHER_ARCH)),-DTILEWRIGHT_TEST_SLACK=ON) \
	  > build/$(OTHER_ARCH).log || (cat build/$(OTHER_ARCH).log; false)
	$(NINJA) build/$(OTHER_ARCH)
	$(CTEST) build/$(OTHER_ARCH)

# Against the installed package: src is not on the path. Two processes, then the tests that must not run beside others
# (pyproject.toml, markers). A file's tests stay in one process, so that what they share is made once; files in the order
# of their names, whose last are short: neither process waits long for the other. Kernel threads without work sleep
# instead of spinning, since two processes share the cores.
test-python: set-up
	OMP_WAIT_POLICY=passive $(BIN)/pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "not alone and not long and not ray"
	$(BIN)/pytest -q -m "alone and not long and not ray"

test-long: set-up dist/.wheel
	TILEWRIGHT_TEST_FUZZ=long OMP_WAIT_POLICY=passive $(BIN)/pytest -q -n 2 --dist loadfile -m "long or fuzz"

# The tests of replicas, with the extra `ray`.
test-ray: set-up
	@$(BIN)/python tools/requirements.py ray > build/ray.txt
	$(INSTALL) --requirement build/ray.txt
	$(BIN)/pytest -q tests/cluster tests/test_replica_flags.py tests/test_batch_blocks.py

# The package as users have it, not editable, with the kernels of levels that this CPU runs: for the demo the best level of
# each op, for tests all of them. It is built while what it depends on is installed. The objects stay in build/release,
# and a change compiles only what it touches.
LEVELS := $(if $(filter demo,$(MODE)),host,runnable)
BUILD_OPTIONS := --no-deps --no-build-isolation

.venv/.tools:
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) scikit-build-core nanobind cmake ninja
	@mkdir -p build && touch $@

.venv/.native-$(MODE): $(SOURCES) | .venv/.tools
	@rm -rf build/package
	@echo "Compiling kernels for this CPU, which takes some minutes the first time."
	@$(PIP) wheel $(BUILD_OPTIONS) --config-settings=build-dir=build/release \
	  --config-settings=cmake.define.TILEWRIGHT_LEVELS=$(LEVELS) --wheel-dir build/package .
	@touch $@

.venv/.needs-$(MODE): pyproject.toml constraints.txt tools/requirements.py tools/install_torch.py | .venv/.tools
	@$(BIN)/python tools/install_torch.py
	@$(BIN)/python tools/requirements.py $(filter test,$(MODE)) > build/requirements.txt
	$(INSTALL) --requirement build/requirements.txt
	@touch $@

.venv/.package-$(MODE): .venv/.native-$(MODE) .venv/.needs-$(MODE) $(TINY_SOURCES)
	$(INSTALL) $(BUILD_OPTIONS) --force-reinstall build/package/*.whl ./packages/tilewright-tiny
	@rm -f .venv/.package-* && touch $@

# What users install: dist/*.whl for this Python and architecture, with all levels. libgomp stays out: the kernels use the
# one that torch brings (docs/threads.md).
.PHONY: wheel
wheel: dist/.wheel

dist/.wheel: .venv/.package-$(MODE)
	$(INSTALL) "tilewright[wheel]"
	@rm -rf dist build/wheel
	$(PIP) wheel $(BUILD_OPTIONS) --config-settings=build-dir=build/release \
	  --config-settings=cmake.define.TILEWRIGHT_LEVELS=all --wheel-dir build/wheel .
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/auditwheel repair --exclude libgomp.so.1 --wheel-dir dist build/wheel/*.whl
	$(PIP) wheel $(BUILD_OPTIONS) --wheel-dir dist ./packages/tilewright-tiny
	@touch $@
