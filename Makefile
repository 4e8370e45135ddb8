# Two commands for a fresh machine: `make demo` and `make test`. Both need Python 3.11, make and a C++ compiler.

PYTHON ?= $(shell command -v /usr/bin/python3.11 || command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SIM := $(VENV)/.neuron-sim
SIM_SOURCES := $(wildcard neuron-sim/setup.py neuron-sim/pyproject.toml neuron-sim/neuron_sim.pth neuron-sim/src/neuron_sim/csrc/*)

.PHONY: demo test check format install clean

install: $(SIM)

$(STAMP): pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: vitrail needs Python 3.11 or newer; set PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test]"
	@touch $(STAMP)

# Its core is compiled against the torch that is installed, so it comes second.
$(SIM): $(STAMP) $(SIM_SOURCES)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e "./neuron-sim[test]"
	@touch $(SIM)

demo: $(SIM)
	@$(BIN)/vitrail generate -p "a red apple" --tp 2 --device cpu -o vitrail.png
	@echo "and on two simulated Neuron cores:" >&2
	@$(BIN)/vitrail generate -p "a red apple" --tp 2 --device neuron -o vitrail-neuron.png

test: $(SIM) check
	cd neuron-sim && ../$(BIN)/python -m pytest
	$(BIN)/python -m pytest

check: $(SIM)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	cd neuron-sim && ../$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -rf neuron-sim/build neuron-sim/src/neuron_sim/_core*.so neuron-sim/src/neuron_sim/_core_built_for.json
