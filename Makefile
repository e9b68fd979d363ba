# Everything a newcomer needs. Each target does its own set-up on a bare machine.
PYTHON      ?= python3
VENV        ?= .venv
TORCH       ?= torch==2.13.0
MCORE       ?= megatron-core==0.16.1
# Another index for torch, e.g. the vendor's CPU or CUDA builds; empty: pip's own index.
TORCH_INDEX ?=
PIP         := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check
READY       := $(VENV)/.ready

.PHONY: demo test lint matrix matrix-new bench clean

$(READY): pyproject.toml
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(PIP) --ignore-requires-python $(MCORE)
	$(PIP) -e '.[cpu,dev]'
	touch $(READY)

demo: $(READY)  ## train the demo recipe on this machine's CPU
	$(VENV)/bin/mcore-bundle train demo --fresh

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

test: $(READY)
	$(VENV)/bin/python -m pytest

clean:
	rm -rf $(VENV) .cache build
