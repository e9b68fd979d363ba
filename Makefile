# Everything a newcomer needs. Each target does its own set-up on a bare machine.
PYTHON      ?= python3
VENV        ?= .venv
# Instead of what images/locks/cpu.*.txt have, e.g. TORCH=torch==2.12.0.
TORCH       ?=
MCORE       ?=
# Tests are run by so many processes, a file by one; many of them start two to four ranks.
JOBS        ?= 2
# megatron-core from 0.18 imports triton even on a cpu; only the tests over several releases need it.
TRITON      ?= triton==3.9.0
# Another index for torch, e.g. the vendor's CPU or CUDA builds; empty: pip's own.
TORCH_INDEX ?=
RELEASES    ?= .cache/releases
# What was proven in which versions, for docs/compatibility.md, whose end says how it is added there.
RECORDS     ?= .cache/records
# torch-npu breaks `import torch` on a machine without CANN: it never goes into the environment above.
NPU_VENV    ?= .cache/npu
# What frameworks import, and want older than we do: an environment on top of the one above.
FOREIGN_VENV ?= .cache/foreign

# Python compiles what is imported; most of torch never is.
PIP     := $(VENV)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check
RUN     := $(VENV)/.run
DEVELOP := $(VENV)/.develop
FOREIGN := $(FOREIGN_VENV)/.run
NPU     := $(NPU_VENV)/.run
NPU_PIP := $(NPU_VENV)/bin/python -m pip install --quiet --disable-pip-version-check
# The tests that need neither other releases, nor every family, nor containers, nor torch-npu, nor a scheduler, nor minutes.
HERE    := not matrix and not releases and not journeys and not images and not npu and not clusters and not faults and not fuzz and not slow
export BUNDLE_RELEASES = $(abspath $(RELEASES))

.PHONY: demo grpo lint test slow golden matrix matrix-new releases journeys fuzz foreign clusters faults npu-contract bench images locks clean

# Exactly what is locked, with its hash; then torch, whose build, and what that needs, differs by machine.
$(RUN): pyproject.toml images/locks/cpu.demo.txt images/locks/cpu.torch.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --no-deps --require-hashes --requirement images/locks/cpu.demo.txt
	# By version alone: the lock's hashes are those of one index.
	$(PIP) $(or $(TORCH),$$(grep -oE '^torch==[^ ]+' images/locks/cpu.torch.txt)) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	# Releases from 0.17 declare Python 3.12 and run on 3.11; only this one package may ignore that.
	$(if $(MCORE),$(PIP) --no-deps --ignore-requires-python '$(MCORE)')
	$(PIP) --no-deps --editable .
	touch $@

$(DEVELOP): $(RUN)
	$(PIP) --editable '.[cpu,dev]' '$(TRITON)'
	touch $@

$(NPU): pyproject.toml Makefile
	test -x $(NPU_VENV)/bin/python || $(PYTHON) -m venv $(NPU_VENV)
	$(NPU_PIP) 'torch==2.13.0' $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	# protobuf, attrs, scipy, regex and six: of MindSpeed's requirements, and of its Megatron-LM 0.12's.
	# triton: what megatron-core imports from 0.18 on; on NPUs it is triton-ascend.
	$(NPU_PIP) 'torch-npu==2.13.0' '$(TRITON)' pytest hypothesis protobuf attrs scipy regex six --editable '.[ascend,data]'
	touch $@

$(FOREIGN): $(DEVELOP) Makefile
	test -x $(FOREIGN_VENV)/bin/python || $(VENV)/bin/python -m venv $(FOREIGN_VENV)
	$(FOREIGN_VENV)/bin/python -c 'import sys, sysconfig; from pathlib import Path; \
	  Path(sysconfig.get_path("purelib"), "develop.pth").write_text(f"import site; site.addsitedir({sys.argv[1]!r})\n")' \
	  "$$($(VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	# What Megatron-LM, verl, ms-swift and mcore-bridge were seen to stop at; built here is but a parser of hydra-core.
	$(FOREIGN_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
	  --only-binary=:all: --no-binary antlr4-python3-runtime six 'transformers>=4.57,<5' 'datasets<5' ray tensordict \
	  codetiming 'hydra-core>=1.3' peft modelscope json_repair mbridge torchdata pyzmq orjson msgspec dacite 'trl<1'
	touch $@

demo: $(RUN)  ## train the demo recipe on this machine's CPU
	$(VENV)/bin/mcore-bundle train demo --fresh

grpo: $(DEVELOP)  ## GRPO on this machine's CPU, four seeds, each held against the bounds of benchmarks/grpo.py
	$(VENV)/bin/python -m benchmarks.grpo

lint: $(DEVELOP)  ## formatting, lint, types, names, sentences of pages, and who may import whom
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/python -m tools.names
	$(VENV)/bin/python -m tools.sentences

test: $(DEVELOP)  ## the default release in full, the oldest and the newest minor in four layouts; ROOM=recipe: one room in a minute
	$(if $(ROOM),,$(VENV)/bin/python -m tests.matrix.fetch $(RELEASES) oldest newest)
	$(VENV)/bin/python -m pytest -m '$(HERE)$(if $(ROOM), and not world and not processes)' -n $(JOBS) --dist loadfile $(if $(ROOM),tests/$(ROOM))

slow: $(DEVELOP)  ## what `make test` leaves out for its time: runs that are killed or filled up, more layouts, flops of all families
	$(VENV)/bin/python -m pytest -m 'slow and not matrix and not releases and not journeys and not images' -n $(JOBS) --dist loadfile

golden: $(DEVELOP)  ## rewrites tests/*/messages.golden, the messages of each room: read the diff
	$(VENV)/bin/python -m pytest -q -m '$(HERE)' -n $(JOBS) --dist loadfile --golden $(if $(ROOM),tests/$(ROOM))

matrix: $(DEVELOP)  ## every supported minor: all layouts, every patch proven, every trap still there
	$(VENV)/bin/python -m tests.matrix.fetch $(RELEASES)
	$(VENV)/bin/python -m pytest -m matrix --record $(RECORDS)/matrix.json --record-command 'make $@'

matrix-new: $(DEVELOP)  ## the same for releases that nobody has reviewed yet
	$(VENV)/bin/python -m tests.matrix.fetch $(RELEASES)-later later
	test ! -d $(RELEASES)-later || \
	  BUNDLE_RELEASES=$(abspath $(RELEASES)-later) $(VENV)/bin/python -m pytest -m matrix

releases: $(DEVELOP)  ## every supported minor: packing, MTP, replay, FP8, checkpoints, seeds/ and upstream/ (long)
	$(VENV)/bin/python -m tests.matrix.fetch $(RELEASES)
	$(VENV)/bin/python -m pytest -m releases -n $(JOBS) --dist loadfile

journeys: $(DEVELOP)  ## one command from a checkpoint to a trained model, for every family; losses by transformers
	$(VENV)/bin/python -m pytest -m journeys

fuzz: $(DEVELOP)  ## 1,500 wrong commands: no traceback, a documented exit code, nothing written elsewhere
	$(VENV)/bin/python -m pytest tests/fuzz -n $(JOBS)

foreign: $(FOREIGN)  ## frameworks and Megatron-LM as they are: audits, training on the CPU; TREE=FOLDER of clones
	TREE='$(abspath $(TREE))' $(FOREIGN_VENV)/bin/python -m pytest -m releases -rs \
	  tests/history/test_foreign.py tests/history/test_pretraining.py tests/history/test_imports.py

# Its API server: tests/targets/kubernetes/apiserver.py says where from; without one, its tests are skipped by name.
clusters: $(DEVELOP)  ## a real Slurm of three nodes, a real Ray of two, an API server; as root, after apt-get install slurmctld slurmd slurm-client
	$(PIP) --editable '.[ray]'
	$(VENV)/bin/python -m pytest -m clusters -rs

faults: $(DEVELOP)  ## real faults on this machine, Slurm and Ray: verdicts, codes, processes left, losses; needs what `clusters` needs
	$(PIP) --editable '.[ray]'
	$(VENV)/bin/python -m pytest -m faults -rs --record $(RECORDS)/faults.json --record-command 'make $@'

npu-contract: $(NPU)  ## the real torch-npu over stand-ins for CANN; MINDSPEED=CLONE, MEGATRON_HISTORY=CLONE: through MindSpeed
	$(NPU_VENV)/bin/python -m tests.matrix.fetch $(RELEASES) oldest newest
	$(NPU_VENV)/bin/python -m tests.npu --record $(RECORDS)/npu.json --record-command 'make $@'

bench: $(DEVELOP)  ## the verbs' start, patching, packing, weights against a copy, training against a bare megatron-core loop
	$(VENV)/bin/python -m benchmarks.cli
	$(VENV)/bin/python -m benchmarks.patching
	$(VENV)/bin/python -m benchmarks.sequences
	$(VENV)/bin/python -m benchmarks.weights
	$(VENV)/bin/python -m benchmarks.training

images: $(DEVELOP)  ## builds the images with BuildKit, as far as this machine can, and runs the CPU image
	$(VENV)/bin/python -m pytest -m images -rs --capture=tee-sys tests/images tests/tools

locks: $(DEVELOP)  ## resolves images/locks anew from docker-bake.json; STACK=cpu: one of them
	$(PIP) uv
	PATH=$(abspath $(VENV))/bin:$$PATH python -m tools.images lock $(STACK)
	$(VENV)/bin/python -m tools.images page

clean:
	rm -rf $(VENV) .cache build
