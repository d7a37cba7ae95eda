# Every target creates what it needs: a virtual environment in .venv and, where this is root on Debian or Ubuntu, system packages.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help venv system-packages kubernetes-tools demo test coverage mutation fuzz fuzz-long reliability bench bench-fleet bench-profile day lint audit format docs captures screenshots manifests image image-requirements clean

help: ## Say what the targets do.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

venv: $(BIN)/.installed ## Create the virtual environment with the project and its development tools.

$(BIN)/.installed: pyproject.toml
	@sh tools/make-venv.sh "$(PYTHON)" "$(VENV)" '.[dev]'
	@touch $@

# What runs it, without what tests it.
$(BIN)/.runs: pyproject.toml
	@[ -e $(BIN)/.installed ] || sh tools/make-venv.sh "$(PYTHON)" "$(VENV)" .
	@touch $@

system-packages: ## Install what the tests use of the system (a C compiler, Prometheus, Chromium), where that is possible.
	@sh tools/system-packages.sh

kubernetes-tools: ## Fetch helm and kubectl, which the tests of deploy/ run, where that is possible.
	@sh tools/kubernetes-tools.sh

demo: $(BIN)/.runs ## Run the exporter on the built-in simulated node: http://localhost:9844/
	$(BIN)/python -m exporter --demo

test: system-packages kubernetes-tools venv ## Run the whole suite.
	$(BIN)/python -m pytest

coverage: system-packages kubernetes-tools venv ## Run the whole suite and say which branches of exporter/ it takes; build/coverage/html shows them.
	$(BIN)/python -m pip install --quiet 'coverage>=7.10'
	rm -rf build/coverage && mkdir -p build/coverage
	$(BIN)/coverage run -m pytest; status=$$?; \
	  $(BIN)/coverage combine --quiet && $(BIN)/coverage html --quiet && $(BIN)/coverage report; exit $$status

MUTATION_PROCESSES ?= 1

mutation: venv ## Change the pure core in every small way and count the changes that its tests notice: half an hour with one process.
	$(BIN)/python -m pip install --quiet 'mutmut>=3.8,<4'
	rm -rf build/mutation && mkdir -p build/mutation && cp -r exporter tests docs pyproject.toml build/mutation
	cd build/mutation && $(CURDIR)/$(BIN)/mutmut run --max-children $(MUTATION_PROCESSES)
	$(BIN)/python tools/mutation_table.py build/mutation/mutants

FUZZ_SECONDS ?= 60

fuzz: venv ## Fuzz each parser, guided by coverage, for FUZZ_SECONDS (60) each; needs Python 3.11 to 3.13.
	$(BIN)/python -m pip install --quiet 'atheris>=3'
	@for target in fuzz/corpus/*; do \
	  echo "$$(basename $$target)" && $(BIN)/python fuzz/fuzz.py "$$(basename $$target)" -max_total_time=$(FUZZ_SECONDS) -rss_limit_mb=1024 -verbosity=0 || exit 1; \
	done

fuzz-long: venv ## Run the property tests of what is parsed and granted with 10,000 examples each: about half an hour.
	$(BIN)/python -m pytest --hypothesis-profile=nightly tests/claims tests/sources

reliability: venv ## Run the tests of faults and write what they measured into docs/reliability.md.
	$(BIN)/python -m pytest tests/test_faults.py -o junit_family=xunit1 --junitxml=build/faults.xml
	$(BIN)/python tools/write_reliability.py build/faults.xml

BENCH_MINUTES ?= 60

bench: venv system-packages ## Measure what the exporter costs, beside nvitop-exporter, and write docs/performance.md: BENCH_MINUTES (60) and ten more; root.
	$(BIN)/python bench/light.py --minutes $(BENCH_MINUTES) --write

bench-fleet: venv system-packages ## Have a real Prometheus scrape 200 nodes, and write docs/performance.md: twelve minutes.
	$(BIN)/python bench/fleet.py --write

bench-profile: venv system-packages ## Profile the processor time and the memory of both nodes into build/profiles.
	$(BIN)/python -m pip install --quiet py-spy memray
	$(BIN)/python bench/profile_nodes.py

day: venv ## Play a day with churn and faults on a simulated node and hold every number to the truth.
	$(BIN)/python bench/day.py

lint: venv ## Check style and types.
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

audit: venv ## Ask the package index whether it knows of vulnerabilities in what the image is made of.
	$(BIN)/python -m pip install --quiet pip-audit
	$(BIN)/pip-audit --requirement deploy/image-requirements.txt --require-hashes --disable-pip --strict

format: venv ## Write the code in the project's style.
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: venv ## Write the generated parts of the documentation, the boards and the operator's rules anew.
	$(BIN)/python tools/generate_docs.py
	$(BIN)/python tools/generate_prometheusrule.py
	$(BIN)/python -m dashboards.generate

captures: venv ## Write the captures of fgpu-top in docs/captures anew.
	$(BIN)/python tools/capture_top.py

screenshots: system-packages venv ## Take the pictures of the node page in docs/captures anew, with Chromium.
	$(BIN)/python tools/screenshots.py

manifests: kubernetes-tools venv ## Write the manifests that are made from the Helm chart anew.
	$(BIN)/python tools/render_manifests.py .tools/helm4

image: ## Build the container image without a daemon or a registry: root, buildah and debootstrap are needed.
	tools/build-image.sh

# What only the asyncio half of the kubernetes package needs, and rich where it shows Markdown or source text; the image has neither.
NOT_IN_IMAGE := aiohappyeyeballs aiohttp aiohttp-retry aiosignal attrs frozenlist multidict propcache yarl markdown-it-py mdurl pygments

image-requirements: venv ## Choose anew, by version and hash, what the image is made of.
	$(BIN)/python -m pip install --quiet pip-tools
	$(BIN)/pip-compile --quiet --upgrade --generate-hashes --no-emit-index-url --no-emit-find-links --no-emit-trusted-host --no-annotate \
	  --no-header --strip-extras $(NOT_IN_IMAGE:%=--unsafe-package %) --output-file deploy/image-requirements.txt pyproject.toml

clean: ## Remove everything that the other targets made.
	rm -rf $(VENV) .tools build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
