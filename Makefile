# Everything a person types. The virtual environment is made once and kept up to date by its stamp file.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
ARGS   ?=

.PHONY: demo test test-gpu test-frameworks bench-kube bench-slurm check fmt setup clean

demo: setup
	@$(BIN)/transom demo $(ARGS)

test: setup
	@$(BIN)/python -m pytest $(ARGS)

bench-slurm: setup
	@$(BIN)/python -m tests.run_in_slurm $(BIN)/transom bench recovery --only slurm $(ARGS)

bench-kube: setup
	@$(BIN)/python -m tests.kube_lab.bench $(ARGS)

test-gpu: setup
	@$(BIN)/python -c 'import sys, torch; sys.exit("make test-gpu needs a machine with a GPU" if not torch.cuda.is_available() else 0)'
	@$(BIN)/python -m pytest -o python_files='gpu_*.py' tests/gpu $(ARGS)

check: setup
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports && $(BIN)/python -m pytest -q tests/arch/test_licences.py

test-frameworks: setup
	@test -x $(VENV)-frameworks/bin/python || $(BIN)/uv venv --quiet --python $(BIN)/python $(VENV)-frameworks
	@VIRTUAL_ENV=$(CURDIR)/$(VENV)-frameworks $(BIN)/uv pip install --quiet -c constraints.txt -c tests/frameworks/constraints.txt \
		--editable '.[ckpt]' pytest pytest-timeout transformers accelerate lightning
	@$(VENV)-frameworks/bin/python -m pytest -o python_files='with_*.py' -o timeout=900 tests/frameworks $(ARGS)

fmt: setup
	@$(BIN)/ruff check --fix-only . && $(BIN)/ruff format .

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "transom: Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11")'
	@test -x $(BIN)/uv || ($(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt uv)
	@echo "Installing into $(VENV) (the first time takes a minute) ..."
	@VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/uv pip install --quiet -c constraints.txt --editable '.[all]' --group dev
	@touch $@

clean:
	rm -rf $(VENV) .transom
