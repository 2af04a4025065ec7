# The authoritative interface of this repository: `make help` lists it.

VENV ?= .venv
# The first Python here that is new enough; any other: make train PYTHON=/path/to/python
PYTHON ?= $(firstword $(foreach name,python3 python3.13 python3.12 python3.11,$(shell \
	$(name) -c 'import sys; sys.version_info >= (3, 11) and print("$(name)")' 2>/dev/null)))
BIN = $(VENV)/bin
# Workers for the tests.
JOBS ?= auto
# The torch of make test-torch: the oldest that pyproject.toml allows.
TORCH ?= 2.7.1
CONSTRAINTS ?= constraints.txt
# Modules are compiled once, whatever the environment says: torch and its compiler take 9 s to import from their
# sources and 3.5 s else, and the tests start dozens of processes.
export PYTHONDONTWRITEBYTECODE =
# Whatever is to be added to the command of a target: make train ARGS="max_duration=4ep"
ARGS ?=

# Frameworks for the tests alone, each in a folder: what tools/composer.txt and tools/megatron.txt list.
ADAPTERS = $(VENV)/composer/.made $(VENV)/megatron/.made $(VENV)/rollouts/.made

# One thread each: the tests run side by side, those of a file in one process, which starts ranks once.
TEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --maxprocesses 8 --dist loadfile
# Not compiled: Python compiles what is used, when it is (half of the time of an installation).
# The build of the package itself obeys the pins too (older pip reads the first, newer the second).
INSTALL = PIP_CONSTRAINT=$(CURDIR)/$(CONSTRAINTS) PIP_BUILD_CONSTRAINT=$(CURDIR)/$(CONSTRAINTS) \
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help train test test-quick test-long test-torch test-phantom test-phantomgpu test-adapters adapters chaos lint format types layers docs wheel release bench bench-peers golden page check clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

train: $(VENV)/.train  ## train the packaged default (about a minute); makes the environment first
	$(BIN)/stretto train $(ARGS)

test: $(VENV)/.develop  ## run the tests but the longest (make test-long); makes the environment first
	$(TEST) $(ARGS)

test-quick: $(VENV)/.develop  ## run the tests that are not marked slow
	$(TEST) -m "not slow" $(ARGS)

test-long: $(VENV)/.develop  ## run the tests that make test leaves out because they take long
	STRETTO_LONG=1 $(TEST) -m "long or distributed" $(ARGS)

# In an environment of its own. From the usual index an old torch comes with CUDA, several GB; for the CPU alone,
# set PIP_EXTRA_INDEX_URL to the index of its CPU builds.
test-torch: .venv-torch-$(TORCH)/constraints.txt  ## the same with another torch, in .venv-torch-2.7.1: make test-torch TORCH=2.7.1
	$(MAKE) test-quick VENV=$(<D) CONSTRAINTS=$<

# Only files with such tests: others import more packages.
test-phantom: $(VENV)/.develop  ## run the tests that need a GPU but not its numbers, without one (after phantomgpu setup)
	$(BIN)/phantomgpu run --gpu h100 --memory 16GiB --steps 1000000 -- \
		$(BIN)/python -m pytest -q -n 0 -m phantom $(ARGS) $$(grep -rl --include="*.py" "mark\.phantom" tests)

test-phantomgpu: $(VENV)/.develop  ## run the tests of phantomgpu; downloads the CUDA build of torch once (530 MB)
	$(BIN)/phantomgpu setup
	$(TEST) $(ARGS) tests/phantomgpu

test-adapters: $(VENV)/.develop  ## test the adapters against the real frameworks (makes environments of 1 GB each)
	$(BIN)/python tools/test_adapters.py $(ARGS)

# Composer is not in the environment: it pins an old torch. So it lies in a folder before it (16 s, 35 MB), and so
# do the engines of NVIDIA (10 s, 37 MB) and trainers on rollouts (5 s, 34 MB). The others (transformers, Accelerate,
# Lightning) are in the environment, and make test runs their examples.
adapters: $(ADAPTERS)  ## run the tests of Composer, Megatron, Automodel and losses of rollouts; those of the other frameworks are in make test
	PYTHONPATH=$(CURDIR)/src:$(abspath $(VENV)/composer) $(TEST) $(ARGS) -p no:unraisableexception -k composer tests/docs/test_coming_from.py \
		tests/integrations/test_examples.py tests/integrations/test_composer.py
	PYTHONPATH=$(CURDIR)/src:$(abspath $(VENV)/megatron) $(TEST) $(ARGS) $(wildcard tests/integrations/test_megatron*.py tests/integrations/test_automodel*.py)
	PYTHONPATH=$(CURDIR)/src:$(abspath $(VENV)/rollouts) $(TEST) $(ARGS) tests/integrations/test_rollouts.py

chaos: $(VENV)/.develop  ## kill real runs again and again; they must end as if nothing had happened
	$(BIN)/python tests/chaos/suite.py $(ARGS)

lint: $(VENV)/.develop  ## style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.develop  ## mend what lint can mend by itself
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.develop  ## check all types, strictly
	$(BIN)/mypy

layers: $(VENV)/.develop  ## check that every import points down
	$(BIN)/lint-imports --no-cache --no-logo

docs: $(VENV)/.develop  ## build the documentation into docs/_build/html; a warning is an error
	$(BIN)/sphinx-build --fail-on-warning --keep-going --nitpicky --quiet -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

wheel: $(VENV)/.develop  ## build the wheel and try it, away from the source tree
	$(BIN)/python tools/try_wheel.py

release: $(VENV)/.develop  ## build sdist, wheels and notes into dist, and try them in an empty environment of each Python here
	$(BIN)/python tools/release.py $(ARGS)

bench: $(VENV)/.develop  ## the shortest form of every benchmark
	$(BIN)/python bench/import_time.py --quick
	$(BIN)/python bench/schedules.py --quick
	$(BIN)/python bench/plan.py --quick
	$(BIN)/python bench/lengths.py --quick
	$(BIN)/python bench/order.py --quick
	$(BIN)/python bench/resume.py --quick
	$(BIN)/python bench/saving.py --quick
	$(BIN)/python bench/clock.py --quick
	$(BIN)/python bench/step_cost.py --quick
	$(BIN)/python bench/noise.py --quick
	$(BIN)/python bench/memory.py --quick
	$(BIN)/python bench/token_budgets.py --few 2
	$(BIN)/python bench/study.py --quick --runs 2

bench-peers: $(VENV)/.develop  ## step and clock cost beside the peers' (makes 5 GB of environments)
	$(BIN)/python bench/clock.py
	$(BIN)/python bench/step_cost.py

golden: $(VENV)/.develop  ## rewrite the golden files and the generated parts of docs/; read the diff before you commit it
	STRETTO_UPDATE_GOLDEN=1 $(BIN)/python -m pytest -q tests/test_public_face.py tests/planning/test_table.py
	$(BIN)/python tools/generated_docs.py

page: $(VENV)/.python  ## take the chart library of the run page from npm (an installation does it, too)
	$(BIN)/python tools/vendor_uplot.py

# Types, documentation and the wheel take one core each and the tests often wait, so they run beside them.
check: lint $(ADAPTERS)  ## exactly what CI runs; what is no test runs beside the tests
	@$(MAKE) --keep-going types layers docs wheel > $(VENV)/checks.txt 2>&1 & checks=$$!; \
	$(MAKE) adapters test; tests=$$?; \
	wait $$checks || { cat $(VENV)/checks.txt; exit 1; }; exit $$tests

clean:  ## remove the environment and everything that was built
	rm -rf $(VENV) .venv-torch-* build dist docs/_build .mypy_cache .pytest_cache .ruff_cache .hypothesis

.venv-torch-%/constraints.txt: constraints.txt
	@mkdir -p $(@D)
	@{ grep -v '^torch==' $<; echo 'torch==$*'; } > $@

# An environment is made again only when what it holds has changed. The one for training is small;
# the one for developing adds to it.
$(VENV)/.python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or later is needed; say make PYTHON=..."; exit 1; }
	@test -x $(BIN)/python || echo "making $(VENV) with $(PYTHON)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.train: $(VENV)/.python pyproject.toml $(CONSTRAINTS)
	@echo "installing stretto and what it needs into $(VENV) (a minute or two, once)"
	@$(INSTALL) --editable '.[plot]'
	@touch $@

$(VENV)/.develop: $(VENV)/.python pyproject.toml $(CONSTRAINTS)
	@echo "installing stretto and its development tools into $(VENV) (a minute or two, once)"
	@$(INSTALL) --editable '.[dev,docs,mlflow,plot,sklearn,tensorboard]'
	@touch $@ $(VENV)/.train

# Wheels of Megatron Core are for Python 3.12 on Linux alone. What the tests import of them is Python that any runs.
$(VENV)/megatron/.made: WHEELS = --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 \
	--ignore-requires-python
$(VENV)/rollouts/.made: WHEELS = --only-binary=:all: --python-version 3.12 --ignore-requires-python

$(ADAPTERS): $(VENV)/%/.made: $(VENV)/.develop tools/%.txt
	@rm -rf $(@D)
	@$(INSTALL) --no-deps $(WHEELS) --target $(@D) --requirement tools/$*.txt
	@touch $@
