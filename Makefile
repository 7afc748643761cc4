# Everything runs in .venv, which the first target that needs it creates.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo install check lint types imports unit test suite coverage docs bench torture clean

help:            ## this list
	@grep -hE '^[a-z]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 12

# torch goes first and by its exact version: a range would take the CUDA build.
$(VENV)/.torch: constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing torch ..."
	@$(PIP) torch==2.13.0
	@touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	@echo "installing dovetail[demo] ..."
	@$(PIP) -e '.[demo]'
	@touch $@

# litdata, timm and streaming ask for torchvision, whose wheel fits only torch's CUDA build: transformers and torchmetrics
# then fail to import. So it has a folder of its own, which only tests/vision.py puts on the path.
$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	@echo "installing dovetail[dev] ..."
	@$(PIP) -e '.[dev]'
	@$(PIP) --no-deps litdata
	@$(PIP) --no-deps --upgrade --target $(VENV)/vision torchvision timm mosaicml-streaming python-snappy cramjam zstd catalogue
	@touch $@ $(VENV)/.demo

$(VENV)/.bench: $(VENV)/.dev
	@echo "installing the peers that benchmarks compare with ..."
	@$(PIP) -e '.[dev,bench]'
	@touch $@

demo: $(VENV)/.demo            ## train a digit classifier, with something to look at
	@$(BIN)/dovetail demo classify

install: $(VENV)/.dev          ## only the environment, with every extra that the tests use

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

imports: $(VENV)/.dev
	$(BIN)/lint-imports

unit: $(VENV)/.dev
	$(BIN)/python -m pytest -q -n 2 -m 'not slow'

check: lint types imports unit ## the fast part: ruff, mypy, import contracts, unit tests

# Tests of reports and of the site need a browser. Root on Debian gets one; elsewhere, or without a network, these tests
# are skipped, which the last line of the tests repeats.
BROWSER := command -v chromium || command -v chromium-browser || command -v google-chrome
APT     := DEBIAN_FRONTEND=noninteractive apt-get -qq -o Acquire::Retries=0 -o Acquire::http::Timeout=20

$(VENV)/.browser: | $(VENV)/.dev
	@{ $(BROWSER) || { test "$$(id -u)" = 0 && command -v apt-get && echo "installing chromium ..." >&2 \
	    && $(APT) update && $(APT) install -y --no-install-recommends chromium; }; } >/dev/null || true
	@if { $(BROWSER); } >/dev/null; then touch $@; else echo "browser tests are skipped: chromium is not installed"; fi

# mypy uses one core for a minute, so it runs beside the tests.
test: lint $(VENV)/.browser    ## everything: check, slow and integration tests, doctests, examples
	@$(MAKE) --no-print-directory -j 2 suite types imports

# Without MAKEFLAGS, because the tests do not get the files of make's job server.
suite: $(VENV)/.dev
	MAKEFLAGS= $(BIN)/python -m pytest -n 4 tests

# Only packages whose tests take a few minutes; the list is also `include` in pyproject.toml, which has the floor.
coverage: $(VENV)/.dev         ## branch coverage of callbacks, checkpoint, data, history and tracking, with a floor
	$(BIN)/python -m pytest -q -n 2 -m 'not slow' --cov=dovetail tests/callbacks tests/checkpoint tests/data tests/tracking tests/test_history.py

docs: $(VENV)/.dev             ## the guide and the reference as a site, in build/docs
	OMP_NUM_THREADS=1 $(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --jobs 2 docs build/docs
	@echo "build/docs/index.html"

torture: $(VENV)/.dev          ## kills, damages, full disks, large graphs and every combination, at length: about 30 minutes
	DOVETAIL_TORTURE=1 $(BIN)/python -m pytest -n 2 -m 'torture or full_size' tests

# BENCH='--only loop' runs one of them; pfl and Flower's simulation: BENCH='--pfl-python ... --flower-python ...'
bench: $(VENV)/.bench          ## side-by-side benchmarks, written to benchmarks/RESULTS.md: about 30 minutes
	$(BIN)/python benchmarks/run.py $(BENCH)

clean:                         ## remove the environment and every cache
	rm -rf $(VENV) build dist docs/project docs/api/*.rst .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage
