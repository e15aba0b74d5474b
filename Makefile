# make demo: plan GPT-3 2.6B on eight 32 GB V100.   make test: the tests.   Both make .venv first, once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := results/demo

.PHONY: demo test lint schemas clean

$(VENV)/.base: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "solver_plan needs Python 3.11 or newer: make PYTHON=python3.11 …")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.dev: $(VENV)/.base
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,run]'
	touch $@

demo: $(VENV)/.base
	mkdir -p $(DEMO)
	$(BIN)/solver-plan profile models/gpt.py:gpt3_2_6b --cluster v100_8x32gb --global-batch 256 --out $(DEMO)/problem.json
	$(BIN)/solver-plan plan $(DEMO)/problem.json --time-limit 30 --out $(DEMO)/plan.json
	$(BIN)/solver-plan check $(DEMO)/problem.json $(DEMO)/plan.json
	$(BIN)/solver-plan show $(DEMO)/plan.json --problem $(DEMO)/problem.json

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

schemas: $(VENV)/.base
	$(BIN)/python -m solver_plan.schemas

clean:
	rm -rf $(VENV) build results .mypy_cache .ruff_cache .pytest_cache .hypothesis
