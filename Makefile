# make demo   train, export and check a small network: the main job, end to end
# make test   formatting, types and the selected tests
#             (make test VELA=5.1: with that release of Vela; make record VELA=5.1 likewise)
# make notebooks   run the notebooks of examples/ and store their outputs
# make record the figures that the tests hold the zoo's models to, written anew
#
# Both work on a fresh clone with Python 3.11 and pip. The environment lives in .venv and is reused until
# pyproject.toml or this file changes. PyTorch's CPU build comes from its own index where that can be reached, unless
# PIP_ARGS, which is passed to pip, is set, for example to another index. SYSTEM_PACKAGES=no installs no Debian package.

PYTHON ?= python3.11
PIP_ARGS ?=
RECIPE ?= ETHOSU_U85_INT8
MACS ?=
WORKERS ?= 2
SYSTEM_PACKAGES ?= yes
MINUTES ?= 10
TARGET ?=
SEED ?=
GOLDEN ?=
PARTS ?=
REVISION = $(shell git describe --always --dirty)

# What Debian has and PyPI has not: a Vulkan driver for the CPU and a loader that is new enough for it (the one in
# chromium-common; Debian 12's own is 1.3), a compiler for the plugin of ExecuTorch's runtime; for the tests, those of
# the device backends, and a board to run them on.
DEBIAN := g++ mesa-vulkan-drivers chromium-common
DEBIAN_TEST := ccache cmake clang libclang-rt-dev gcc-arm-none-eabi libnewlib-arm-none-eabi libstdc++-arm-none-eabi-newlib \
  qemu-system-arm chromium

# The release of Vela that tests and records are of: by default that of the environment. Another one is installed beside
# it, without a whole environment, and found first. make test runs a small part of what depends on it with the older
# release, make verify (tests/verify.py) all of it.
VELA ?=
OLDER := 5.1
ONE_JOB := tests/backends/test_ethosu.py tests/runtime/test_ethosu_emulator.py::test_vela_bugs tests/targets
vela = $(if $(1),PYTHONPATH=$(CURDIR)/build/vela-$(1))

# Each of the many processes of a test run would compile all modules anew without bytecode files.
export PYTHONDONTWRITEBYTECODE :=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready-demo
READY_TEST := $(VENV)/.ready-test
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: demo test test-older-vela coverage notebooks record selection cpp-suites lint lint-types lint-python lint-cpp format env clean debian debian-test

demo: debian $(READY)
	RECIPE=$(RECIPE) MACS=$(MACS) $(BIN)/python examples/digits.py

test: debian-test $(READY_TEST) $(VELA:%=build/vela-%)
	$(MAKE) --no-print-directory --jobs $(WORKERS) lint test-older-vela
	$(call vela,$(VELA)) $(BIN)/python -m pytest -n $(WORKERS) -q

# One process: it runs beside mypy, which is one process too.
test-older-vela: $(READY_TEST) build/vela-$(OLDER)
	$(call vela,$(OLDER)) timeout 180 $(BIN)/python -m pytest -q $(ONE_JOB)

# Which lines of the compiler core no test runs.
coverage: debian-test $(READY_TEST) $(VELA:%=build/vela-%)
	$(call vela,$(VELA)) $(BIN)/python -m pytest -n $(WORKERS) -q --line-coverage

notebooks: $(READY_TEST)
	$(BIN)/python examples/execute_notebooks.py

record: $(READY_TEST) $(VELA:%=build/vela-%)
	$(call vela,$(VELA)) $(BIN)/python -m pytest -n $(WORKERS) -q tests/models -k figures_are_those_recorded --record --verify

# Random graphs for MINUTES: of TARGET, by default of TOSA_FP and TOSA_INT8. At the same commit, another run continues where
# the last one stopped.
fuzz: debian $(READY_TEST)
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) --workers $(WORKERS) \
	  $(if $(TARGET),--target $(TARGET)) --record build/fuzz/$(REVISION)

# Measure all tests and record the cases that make test runs (tests/case_selection.py). It takes an hour.
selection: debian-test $(READY_TEST)
	rm -rf build/measured
	$(BIN)/python -m pytest -n $(WORKERS) -q --measure build/measured
	$(BIN)/python -m tests.case_selection build/measured

# Run the tests that compile C++ (tests/cpp_suites.py), and record the digest of their sources if they pass.
cpp-suites: debian-test $(READY_TEST)
	$(BIN)/python -m pytest -n $(WORKERS) -q --cpp-suites

# All checks of a release, in parts that are run once at each commit: see tests/verify.py. PARTS="golden fuzz" selects
# some. With GOLDEN=folder also programs that others made, with their results: see tests/golden.py.
verify: debian-test $(READY_TEST) build/vela-$(OLDER)
	$(BIN)/python -m tests.verify --workers $(WORKERS) $(if $(SEED),--seed $(SEED)) --older-vela $(OLDER) \
	  $(if $(GOLDEN),--golden $(GOLDEN)) $(if $(PARTS),--parts $(PARTS))

lint: lint-types lint-python lint-cpp

lint-python: $(READY_TEST)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint-types: $(READY_TEST)
	$(BIN)/mypy

lint-cpp: $(READY_TEST)
	scripts/lint_cpp.sh $(BIN)

format: $(READY_TEST)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	find runtime -name '*.cpp' -o -name '*.h' -o -name '*.hpp' | xargs $(BIN)/clang-format -i

env: $(READY_TEST)

debian:
	@SYSTEM_PACKAGES=$(SYSTEM_PACKAGES) scripts/debian_packages.sh $(DEBIAN)

debian-test:
	@SYSTEM_PACKAGES=$(SYSTEM_PACKAGES) scripts/debian_packages.sh $(DEBIAN) $(DEBIAN_TEST)

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache

# Debian keeps ensurepip in a package of its own: without it, the system's pip puts one into the environment.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV) || { \
	  $(PYTHON) -m venv --clear --without-pip $(VENV) && \
	  $(PYTHON) -m pip --python $(BIN)/python install $(PIP_ARGS) pip; }

build/vela-%: | $(READY_TEST)
	$(PIP) install --quiet --progress-bar off $(PIP_ARGS) --no-deps --target $@ 'ethos-u-vela==$*.*' || \
	  { rm -rf $@; false; }

$(READY): pyproject.toml Makefile | $(BIN)/python
	@scripts/install_pytorch.sh $(BIN)/python $(PIP_ARGS)
	$(PIP) install --quiet --progress-bar off $(PIP_ARGS) --editable '.[demo]'
	touch $@

$(READY_TEST): pyproject.toml Makefile | $(BIN)/python
	@scripts/install_pytorch.sh $(BIN)/python $(PIP_ARGS)
	$(PIP) install --quiet --progress-bar off $(PIP_ARGS) --editable '.[test]'
	touch $@ $(READY)
