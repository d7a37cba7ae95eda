# Every target creates what it needs: a virtual environment in .venv and, where this is root on Debian or Ubuntu, system packages.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help venv system-packages demo test lint format docs clean

help: ## Say what the targets do.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

venv: $(BIN)/.installed ## Create the virtual environment with the project and its development tools.

$(BIN)/.installed: pyproject.toml
	@sh tools/make-venv.sh "$(PYTHON)" "$(VENV)"
	@touch $@

system-packages: ## Install what the tests use of the system (a C compiler, Prometheus), where that is possible.
	@sh tools/system-packages.sh

demo: venv ## Run the exporter on the built-in simulated node: http://localhost:9844/metrics
	$(BIN)/python -m exporter --demo

test: system-packages venv ## Run the whole suite.
	$(BIN)/python -m pytest

lint: venv ## Check style and types.
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: venv ## Write the code in the project's style.
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: venv ## Write the generated parts of the documentation anew.
	$(BIN)/python tools/generate_docs.py

clean: ## Remove everything that the other targets made.
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
