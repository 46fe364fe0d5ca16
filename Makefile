# Two commands are enough on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export TOKENIZERS_PARALLELISM := false

.PHONY: help demo test docs notebooks lint format clean

help:  ## Show the targets.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet 'torch>=2.11' torchvision
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $(STAMP)

demo: $(STAMP)  ## Set up, then make a short video with sound from the embedded model.
	$(BIN)/diffusers-h3 demo --output outputs/demo.mp4 --contact-sheet outputs/demo.png --overwrite

test: $(STAMP)  ## Set up, then run the tests.
	$(BIN)/python -m pytest -n 2 --dist loadfile

docs: $(STAMP)  ## Set up, then build the documentation into outputs/site.
	$(BIN)/python -m pip install --quiet -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

notebooks: $(STAMP)  ## Set up, then execute the notebooks.
	$(BIN)/python scripts/docs/notebooks.py

lint: $(STAMP)  ## Check style and formatting.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)  ## Fix style and formatting.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## Remove the environment and everything built.
	rm -rf $(VENV) outputs dist build .pytest_cache .ruff_cache
