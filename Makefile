# gradwire: everything here needs python3 (3.11 or later), make and pip, and makes its own .venv.
# Another Python: make PYTHON=python3.12 test

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
RUNS := $(VENV)/runs

.DEFAULT_GOAL := help
.PHONY: help setup demo quick test acceptance test-torch lint types layers tests docs package format clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1	\2/p' Makefile | expand -t 18

setup: $(READY) ## create .venv with gradwire and everything that is pinned
demo: $(RUNS) ## train a small transformer data-parallel on this machine
	@$(BIN)/gradwire demo

# mypy runs beside the tests. If it finds errors, they are shown at once and, from its cache, at the end.
test: lint layers ## check everything: the four below
	@$(MAKE) --no-print-directory types & types=$$!; $(MAKE) --no-print-directory tests; tests=$$?; \
	wait $$types || $(MAKE) --no-print-directory types || exit 1; exit $$tests

lint: $(READY) ## ruff: rules and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(READY) ## mypy, strict
	$(BIN)/mypy

layers: $(READY) ## import-linter: imports point down the layers
	$(BIN)/lint-imports

QUICK := tests/unit/collectives tests/unit/reducer tests/unit/autograd tests/unit/test_errors.py tests/unit/test_events.py \
	tests/unit/groups/test_base.py tests/unit/groups/test_work.py tests/unit/groups/test_threads.py tests/unit/groups/test_wrappers.py \
	tests/conformance/test_threads.py

quick: lint types layers ## the inner loop, under two minutes: lint, types, layers, and tests that start no processes
	$(BIN)/python -m pytest $(QUICK)

# Without bytecode every worker compiles all tests again, and every rank that is started the package.
unexport PYTHONDONTWRITEBYTECODE

# Tests wait for processes a good part of their time, so one more runs at once than there are cores. Each worker has its own warm
# rank processes.
JOBS ?= $(shell cores=$$(nproc); echo $$((cores < 4 ? cores + 1 : 4)))
PARALLEL = -n $(JOBS) --dist worksteal

tests: $(READY) ## pytest: tests, and the examples in docstrings and documents [JOBS=1]
	$(BIN)/python -m pytest $(PARALLEL)

acceptance: $(READY) ## long tests; 160 hangs and 50 stragglers detected, no alarm in 151 healthy runs, a llama on meshes, 2,000 faults: about 2 hours
	$(BIN)/python -m pytest -m acceptance
	$(BIN)/python -m benchmarks faults --faults 2000
	PYTHONPATH=tests $(BIN)/python -m detection.hangs --healthy 50
	PYTHONPATH=tests $(BIN)/python -m detection.stragglers
	PYTHONPATH=tests $(BIN)/python -m detection.follow
	$(BIN)/gradwire run -n 2 tests/integrations/scripts/torchtitan_checks.py --steps 50 \
		hsdp:gloo hsdp:shared_memory fsdp:gloo fsdp:shared_memory
	$(BIN)/python tests/helpers/protocol_search.py --ranks 3 --crashes 3 --cuts 1 --restarts 1

# Everything but torch is pinned as in .venv. One virtual environment per version: some gigabytes where torch comes with CUDA.
TORCH_VENV = .venv-torch-$(VERSION)
TORCH_BIN = $(TORCH_VENV)/bin

test-torch: ## the tests on another torch: make test-torch VERSION=2.15.0 [TESTS=tests/unit/interop]
	@test -n "$(VERSION)" || { echo "Which torch? make test-torch VERSION=2.15.0" >&2; exit 2; }
	@test -x $(TORCH_BIN)/python || $(PYTHON) -m venv $(TORCH_VENV)
	@sed 's/^torch==.*/torch==$(VERSION)/; /^-r/d' requirements.txt requirements-dev.txt > $(TORCH_VENV)/requirements.txt
	@cmp -s $(TORCH_VENV)/requirements.txt $(TORCH_VENV)/installed.txt || { \
		echo "setting up $(TORCH_VENV)"; \
		$(TORCH_BIN)/python -m pip install --quiet --disable-pip-version-check -r $(TORCH_VENV)/requirements.txt --editable . && \
		cp $(TORCH_VENV)/requirements.txt $(TORCH_VENV)/installed.txt; }
	$(TORCH_BIN)/python -m pytest $(PARALLEL) $(TESTS)

docs: $(READY) ## build the documentation site in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

package: $(READY) ## build the source distribution and the wheel, in dist/
	rm -rf dist
	$(BIN)/python -m build --no-isolation

format: $(READY) ## format the code and fix what ruff can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean: ## remove .venv and everything that was built or cached
	rm -rf $(VENV) .venv-torch-* build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests -name __pycache__ -type d -exec rm -rf {} +

# The stamps are newer than what they were made from, so a second run starts at once.
$(READY): requirements-dev.txt $(RUNS)
	@echo "setting up what the tests need"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $(READY)

$(RUNS): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "gradwire needs Python 3.11 or later, and $(PYTHON) is " + sys.version.split()[0] + ". Name another: make PYTHON=python3.12 ...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV) (the first time, torch is downloaded)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt --editable .
	@touch $(RUNS)
