# hexlm: `make serve` and `make test` are all that a fresh clone needs.
# PYTHON picks the interpreter, ARGS goes to `hexlm serve`, TESTS to pytest, CLIENTS is the folder
# of the client suites, which are no part of this repository.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL := smollm2-135m-instruct
EMBEDDER := all-minilm-l6-v2
ARGS ?=
TESTS ?=
CLIENTS ?= ../shared/clients

.PHONY: serve test test-clients check lint format clean

serve: $(VENV)/installed
	$(BIN)/hexlm serve $(ARGS)

test: $(VENV)/installed-test
	$(BIN)/hexlm pull $(MODEL)
	$(BIN)/hexlm pull $(EMBEDDER)
	$(BIN)/python -m pytest -m 'not device' $(TESTS)

test-clients: $(VENV)/installed-test
	$(BIN)/hexlm pull $(MODEL)
	$(BIN)/python -m tests.clients.run_suites --clients $(CLIENTS)

check: lint test

lint: $(VENV)/installed-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/installed-test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The markers are newer than pyproject.toml exactly when the installation is.
$(VENV)/installed: pyproject.toml | $(VENV)/created
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --editable .
	touch $@

$(VENV)/installed-test: pyproject.toml | $(VENV)/created
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --editable '.[test]'
	touch $@ $(VENV)/installed

$(VENV)/created:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	{ echo "hexlm needs Python 3.11 to 3.13; give one with: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV) || $(PYTHON) -m virtualenv --clear $(VENV) || \
	{ echo "cannot create $(VENV): install the venv module (Debian: apt install python3-venv)" >&2; exit 1; }
# Only a pip since 24.1 tells how far a download is; an older one works too.
	-@$(BIN)/python -m pip install --disable-pip-version-check --quiet --upgrade pip
	@touch $@
