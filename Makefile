# Every target works on a fresh clone: it needs python3 (3.10 or later) and a C and C++ compiler, and installs the rest
# into .venv.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
BUILD := build

.PHONY: demo test lint types warnings pytest fuzz release bench clean

demo: $(VENV)/installed
	mkdir -p $(BUILD)
	$(BIN)/coda-edge optimize "$$($(BIN)/python -m models fetch minilm)" -o $(BUILD)/minilm.coda
	$(BIN)/python -m models.demo $(BUILD)/minilm.coda
	$(BIN)/python -m benchmarks.minilm $(BUILD)/minilm.coda

test: lint types warnings pytest

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed
	$(BIN)/mypy -p coda_edge -p passes -p models -p benchmarks

# The runtime by itself, as a program that embeds it builds it; warnings are errors.
warnings: $(VENV)/installed
	$(BIN)/cmake -S . -B $(BUILD)/runtime
	$(BIN)/cmake --build $(BUILD)/runtime

pytest: $(VENV)/installed
	$(BIN)/python -m pytest -q -n auto --dist loadfile

# Before a release: what takes longer than a test may.
release: test fuzz $(VENV)/installed
	mkdir -p $(BUILD)
	$(BIN)/coda-edge optimize "$$($(BIN)/python -m models fetch minilm)" -o $(BUILD)/minilm.coda
	$(BIN)/python tests/release.py "$$($(BIN)/python -m models fetch minilm)" $(BUILD)/minilm.coda
	$(BIN)/python -m pytest -q -m emulated

fuzz: $(VENV)/installed
	$(BIN)/python tests/fuzzing.py --seconds 600

bench: $(VENV)/installed
	$(BIN)/python -m pip install --quiet -e ".[bench]"
	$(BIN)/python -m benchmarks.cpu --suite --markdown --out $(BUILD)/benchmarks

clean:
	rm -rf $(VENV) $(BUILD)

# Editable, so that Python sources are used in place; what the runtime is built from makes it out of date.
$(VENV)/installed: pyproject.toml CMakeLists.txt $(shell find runtime coda_edge/onnxruntime/native -name '*.[ch]' -o -name '*.cpp' -o -name CMakeLists.txt)
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -e ".[cross,demo,test,dev]"
	touch $@
