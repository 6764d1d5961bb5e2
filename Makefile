PYTHON ?= python3
BIN := .venv/bin
UV := uv==0.13.9
TESTS ?= tests
# Empty keeps the pins that still fit; `make lock UPGRADE=--upgrade` moves every version.
UPGRADE ?=

COMPILE = UV_CUSTOM_COMPILE_COMMAND="make lock" $(BIN)/uv pip compile --quiet --universal \
	--python-version 3.10 --no-annotate --excludes requirements/cuda.txt $(UPGRADE) pyproject.toml

.PHONY: help demo test lint docs lock clean
.DEFAULT_GOAL := help

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-6s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: .venv/demo.stamp .venv/package.stamp  ## Compare optimizers on the digits data set
	$(BIN)/mkor compare digits

# One thread a process: two workers that each start two threads on two cores take turns waiting.
test: .venv/test.stamp .venv/package.stamp  ## Run the tests (TESTS=tests/math for a part)
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal $(TESTS)

lint: .venv/test.stamp .venv/package.stamp docs  ## Check style, types and the docs build
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/test.stamp .venv/package.stamp  ## Build the documentation into site/
	NO_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --strict --quiet

lock: $(BIN)/python  ## Write requirements/*.txt from pyproject.toml
	$(BIN)/pip install -qq $(UV)
	$(COMPILE) --constraints requirements/constraints.txt --extra bench --output-file requirements/demo.txt
	$(COMPILE) --constraints requirements/demo.txt --extra dev --output-file requirements/test.txt

clean:  ## Remove everything that make created
	rm -rf .venv site build dist src/*.egg-info .*_cache .hypothesis
	find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv .venv

# The stamps lie in .venv, so that removing it forgets them. demo.txt is a part of test.txt.
.venv/demo.stamp: requirements/demo.txt | $(BIN)/python
	@echo 'Installing requirements/demo.txt (minutes, once) ...'
	@$(BIN)/pip install -qq --requirement requirements/demo.txt
	touch $@

.venv/test.stamp: requirements/test.txt | $(BIN)/python
	@echo 'Installing requirements/test.txt (minutes, once) ...'
	@$(BIN)/pip install -qq --requirement requirements/test.txt
	touch $@ .venv/demo.stamp

# The build backend is the setuptools that the lock pins, which must be there first.
.venv/package.stamp: pyproject.toml | .venv/demo.stamp
	$(BIN)/pip install -qq --no-deps --no-build-isolation --editable .
	touch $@
