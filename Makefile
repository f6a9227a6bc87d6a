# Every target sets itself up in .venv; nothing global is touched.
PYTHON ?= python3
BIN := .venv/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
CPP_FILES = $(shell find csrc benchmarks tests -name "*.h" -o -name "*.cc") src/tilewright/ops/torch_backend/gpu_kernels.cu
# Without make's flags, by which ninja would ask make for its jobs.
NINJA := env -u MAKEFLAGS $(BIN)/cmake --build
SOURCES := pyproject.toml constraints.txt CMakeLists.txt README.md \
  $(shell find csrc src -type f -not -name '*.so' -not -path '*/__pycache__/*')

.PHONY: demo
demo: .venv/.package
	@$(BIN)/tilewright demo

.PHONY: test lint test-cpp test-cpp-emulated test-python
# What lint and the wheel do on one core goes on beside builds.
test: .venv/.test
	@$(MAKE) --no-print-directory -j 2 lint test-cpp
	@$(MAKE) --no-print-directory -j 2 dist/.wheel test-cpp-emulated
	@$(MAKE) --no-print-directory test-python

lint: .venv/.test
	$(BIN)/ruff check src tests benchmarks tools training
	$(BIN)/ruff format --check src tests benchmarks tools training
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)

# The C++ tests, with optimisation low enough that the sanitizers name lines. Where the CPU has no tiles, their
# instructions and those of bf16 are simulated (csrc/base/x86/simulated.h): every machine with AVX-512 tests all levels.
SIMULATE := $(if $(filter x86_64,$(shell uname -m)),$(if $(shell grep -m 1 -o amx_tile /proc/cpuinfo),OFF,ON),OFF)
test-cpp: .venv/.test
	@mkdir -p build
	@$(BIN)/cmake -S . -B build/sanitize -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) \
	  -DTILEWRIGHT_PYTHON=OFF -DTILEWRIGHT_TESTS=ON -DTILEWRIGHT_SANITIZE=ON \
	  -DTILEWRIGHT_SIMULATE=$(SIMULATE) -DCMAKE_BUILD_TYPE=Debug "-DCMAKE_CXX_FLAGS_DEBUG=-O1 -g1" > build/sanitize.log || (cat build/sanitize.log; false)
	$(NINJA) build/sanitize
	$(BIN)/ctest --test-dir build/sanitize --parallel 2 --output-on-failure

# The C++ tests of the architecture that this machine is not, cross-built and run under emulation, so that a change made
# on one does not break the other. Without sanitizers, which the emulator is too slow for. On x86-64 the emulator's
# masked loads touch what the mask leaves out: slack instead of guard pages.
OTHER_ARCH := $(if $(filter x86_64,$(shell uname -m)),aarch64,x86_64)
EMULATOR := qemu-$(OTHER_ARCH)
CROSS_CXX := $(OTHER_ARCH)-linux-gnu-g++
test-cpp-emulated: .venv/.test
	@if command -v $(EMULATOR) > /dev/null && command -v $(CROSS_CXX) > /dev/null; then \
	  $(MAKE) --no-print-directory run-emulated; \
	else \
	  echo "LEFT OUT: the C++ tests of $(OTHER_ARCH). They need $(EMULATOR) and $(CROSS_CXX), on Debian the packages" \
	    "qemu-user and g++-$(subst _,-,$(OTHER_ARCH))-linux-gnu."; \
	  test "$$TILEWRIGHT_TEST_EMULATED" != required; \
	fi

.PHONY: run-emulated
run-emulated:
	@mkdir -p build
	@$(BIN)/cmake -S . -B build/$(OTHER_ARCH) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) \
	  -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=$(OTHER_ARCH) -DCMAKE_CXX_COMPILER=$(CROSS_CXX) \
	  "-DCMAKE_CROSSCOMPILING_EMULATOR=$(EMULATOR);-cpu;max;-L;/usr/$(OTHER_ARCH)-linux-gnu" \
	  -DTILEWRIGHT_PYTHON=OFF -DTILEWRIGHT_TESTS=ON -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG=-O1 \
	  $(if $(filter x86_64,$(OTHER_ARCH)),-DTILEWRIGHT_TEST_SLACK=ON) \
	  > build/$(OTHER_ARCH).log || (cat build/$(OTHER_ARCH).log; false)
	$(NINJA) build/$(OTHER_ARCH)
	$(BIN)/ctest --test-dir build/$(OTHER_ARCH) --parallel 2 --output-on-failure

# Against the installed package: src is not on the path. One test installs the wheel elsewhere. Two processes, then the
# tests that must not run beside others (pyproject.toml, markers). A file's tests stay in one process, so that what they
# share is made once; files in the order of their names, whose last are short: neither process waits long for the other.
# Kernel threads without work sleep instead of spinning, since two processes share the cores.
test-python: .venv/.test dist/.wheel
	OMP_WAIT_POLICY=passive $(BIN)/pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "not alone and not ray"
	$(BIN)/pytest -q -m "alone and not ray"

# The tests of replicas, with the extra `ray`.
.PHONY: test-ray
test-ray: .venv/.test
	$(PIP_INSTALL) "tilewright[ray]"
	$(BIN)/pytest -q tests/cluster tests/test_replica_flags.py tests/test_batch_blocks.py

# The package, not editable. Without build isolation, so that a change compiles only what it touches; the objects stay in
# build/release, where a test looks at their symbols.
.venv/.package: $(SOURCES)
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP_INSTALL) scikit-build-core nanobind cmake ninja
	@$(BIN)/python tools/install_torch.py
	$(PIP_INSTALL) --no-build-isolation --check-build-dependencies --config-settings=build-dir=build/release .
	@touch $@

.venv/.test: .venv/.package
	$(PIP_INSTALL) "tilewright[test]"
	@touch $@

# What users install: dist/tilewright-*.whl for this Python and architecture, from the objects in build/release. libgomp
# stays out: the kernels use the one that torch brings (docs/threads.md).
.PHONY: wheel
wheel: dist/.wheel

dist/.wheel: .venv/.package
	$(PIP_INSTALL) "tilewright[wheel]"
	@rm -rf dist build/wheel
	env -u MAKEFLAGS $(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation \
	  --config-settings=build-dir=build/release --wheel-dir build/wheel .
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/auditwheel repair --exclude libgomp.so.1 --wheel-dir dist build/wheel/*.whl
	@touch $@

# The native module built in place, for work on the kernels: then PYTHONPATH=src $(BIN)/pytest.
.PHONY: dev
dev:
	@mkdir -p build
	@cmake -S . -B build/dev -G Ninja -DPython_EXECUTABLE=$(abspath $(BIN)/python) \
	  -Dnanobind_DIR=$$($(BIN)/python -m nanobind --cmake_dir) > build/dev.log || (cat build/dev.log; false)
	@cmake --build build/dev
	@cp build/dev/_kernels*.so src/tilewright/
