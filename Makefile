# make demo   fine-tunes SmolLM2-135M under a small device budget, from nothing to a plot and an export
# make test   builds everything and runs every test that needs neither a GPU nor 17 GB (ctest label large), those in C++
#             also under both sanitizers
# Both install what is missing (Debian packages as root, Python packages into .venv).

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:

BUILD := build
PYTHON := .venv/bin/python
JOBS ?= $(shell nproc)
STAMPS := $(BUILD)/stamps
LAUNCHER = $(if $(shell command -v ccache),-DCMAKE_CXX_COMPILER_LAUNCHER=ccache -DCMAKE_CUDA_COMPILER_LAUNCHER=ccache)
export CCACHE_NOHASHDIR := 1
export CCACHE_SLOPPINESS := pch_defines,time_macros
FORMATTED = $(shell git ls-files '*.h' '*.cc' '*.cu' '*.cuh')
TIDIED = $(shell git ls-files '*.cc')
RELEASE_ARCHITECTURES = $(shell sed -n 's/.*"CMAKE_CUDA_ARCHITECTURES": "\(.*\)".*/\1/p' CMakePresets.json)

# Of `make demo`: MODEL is a Hugging Face folder of your own, ARGS are further options of orlop finetune.
MODEL ?=
DEMO_DIR ?= demo
ARGS ?=

.PHONY: demo test test-gpu asan tsan build wheel format lint clean
.DEFAULT_GOAL := build

$(STAMPS)/apt: .ci/apt-packages.txt .ci/apt.sh
	.ci/apt.sh
	mkdir -p $(STAMPS) && touch $@

$(STAMPS)/venv-demo: pyproject.toml .ci/venv.sh .ci/venv.py $(STAMPS)/apt
	.ci/venv.sh demo --with-model
	touch $@

$(STAMPS)/venv-wheel: pyproject.toml .ci/venv.sh .ci/venv.py $(STAMPS)/apt
	.ci/venv.sh wheel
	touch $@

$(STAMPS)/venv-test: pyproject.toml .ci/venv.sh .ci/venv.py $(STAMPS)/apt
	.ci/venv.sh test --with-model
	touch $@

# The interpreter whose headers the Python module is built against is the one of .venv.
CONFIGURE = cmake --preset $(1) $(LAUNCHER) -DPython_EXECUTABLE=$(CURDIR)/$(PYTHON) >$(STAMPS)/configure-$(1).log \
	|| { cat $(STAMPS)/configure-$(1).log; exit 1; }

# Only what the demo runs, so that its first call is short.
demo: $(STAMPS)/venv-demo
	$(call CONFIGURE,dev)
	ninja -C $(BUILD) -j $(JOBS) --quiet orlop_python
	PYTHONPATH=$(BUILD)/python $(PYTHON) -m orlop.demo --output $(DEMO_DIR) $(if $(MODEL),--model $(MODEL)) $(ARGS)

build: $(STAMPS)/venv-demo
	$(call CONFIGURE,dev)
	ninja -C $(BUILD) -j $(JOBS)

# dist/orlop-*.whl for machines that have nothing installed, with code for every GPU that is supported.
wheel: $(STAMPS)/venv-wheel
	$(if $(LAUNCHER),CMAKE_CXX_COMPILER_LAUNCHER=ccache CMAKE_CUDA_COMPILER_LAUNCHER=ccache) \
	  .ci/wheel.sh dist '-Ccmake.define.CMAKE_CUDA_ARCHITECTURES=$(RELEASE_ARCHITECTURES)'

test: $(STAMPS)/venv-test
	JOBS=$(JOBS) LAUNCHER="$(LAUNCHER)" .ci/test.sh all

asan tsan: $(STAMPS)/venv-demo
	JOBS=$(JOBS) LAUNCHER="$(LAUNCHER)" .ci/test.sh $@

# On a machine with a GPU; what it prints is kept in tests/gpu_report.md.
test-gpu: $(STAMPS)/venv-test
	JOBS=$(JOBS) LAUNCHER="$(LAUNCHER)" .ci/test.sh gpu

format:
	clang-format -i $(FORMATTED)
	ruff check --fix --quiet
	ruff format --quiet

# Without precompiled headers: each file includes what it uses.
lint: build
	clang-format --dry-run --Werror $(FORMATTED)
	ruff check --quiet
	ruff format --check --quiet
	cmake --preset dev -B build-lint -DORLOP_PRECOMPILE=OFF -DCMAKE_EXPORT_COMPILE_COMMANDS=ON -DPython_EXECUTABLE=$(CURDIR)/$(PYTHON) >$(STAMPS)/configure-lint.log
	clang-tidy --quiet -p build-lint $(TIDIED)

clean:
	rm -rf $(BUILD) build-asan build-tsan build-fuzz build-lint build-release
