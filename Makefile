# Two commands for a fresh clone: `make demo` and `make test`. Each sets up what it needs, once.
PYTHON ?= $(firstword $(foreach p,python3.11 python3.12 python3.13 python3,$(shell command -v $(p) 2>/dev/null)))
BIN := .venv/bin
JOBS ?= 2

.PHONY: demo test lint docs compare browser clean

demo: .venv/demo
	$(BIN)/tptopk train

test: .venv/test lint docs browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)

lint: .venv/test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

docs: .venv/test
	$(BIN)/python -m sphinx -W --keep-going -n -q docs build/docs

# The report's page is tested in Chromium. Where it is absent and cannot be installed those tests are skipped, but in CI they fail.
browser:
	@{ command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null || \
	{ [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null; } || \
	echo "Chromium is not here and could not be installed: the report's page is not tested in a browser"

compare: .venv/test
	$(BIN)/tptopk compare --plot docs/compare.png

.venv/demo: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || { echo "Python 3.11, 3.12 or 3.13 is needed: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	@echo "setting up .venv: one or two minutes, once"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[plots]'
	@touch $@

.venv/test: .venv/demo
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf .venv build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@[ ! -d runs ] || echo "runs/ holds your runs and is left as it is"
