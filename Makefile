# Every target sets itself up in .venv; nothing global is touched.
PYTHON ?= python3
BIN := .venv/bin

# The native module built in place, for work on the kernels.
.PHONY: dev
dev:
	@cmake -S . -B build/dev -G Ninja -DPython_EXECUTABLE=$(abspath $(BIN)/python) \
	  -Dnanobind_DIR=$$($(BIN)/python -m nanobind --cmake_dir) > build/dev.log || (cat build/dev.log; false)
	@cmake --build build/dev
	@cp build/dev/_kernels*.so src/tilewright/
