# Everything that is run in this repository. `make help` lists the targets.
# Needs: GNU make, /bin/sh, Python 3.11 or newer. Everything else is installed into .venv, in the versions of
# constraints.txt.

SHELL := /bin/sh
.DEFAULT_GOAL := help

# The interpreter that makes .venv; `make PYTHON=/path/to/python3.11 train` picks another one.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; exit; }; done; echo python3)
VENV ?= .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
INSTALLED := $(VENV)/.hf_hotspa-installed
PEERS_INSTALLED := $(VENV)/.peers-installed

# ---- make train: what is run, and on how many processes. `--multi_gpu` is what makes accelerate start several
# processes; with `--use_cpu` (an argument of the script) they are CPU processes.
PROCESSES ?= 4
TRAIN_SCRIPT ?= examples/demo.py
TRAIN_ARGS ?= --use_cpu
EXTRA_TRAIN_ARGS ?=
LAUNCH_ARGS ?= --multi_gpu --num_machines 1 --num_processes $(PROCESSES) --mixed_precision no --dynamo_backend no \
	--main_process_port 0

PYTEST_ARGS ?=
# Worlds of processes that are tested at a time. Ranks wait for each other a good deal: three fill two cores.
TEST_WORLDS ?= 3
OLDEST_ARGS ?=
FRONT_END_ARGS ?=
NODE_TRIALS ?= 21
BENCH_SCRIPTS ?= benchmarks/step.py benchmarks/switch.py benchmarks/slow_link.py benchmarks/planner.py
BENCH_ARGS ?=
DOCS_ARGS ?=

# One compute thread a process: the tests and the CPU example run several processes on few cores.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
# hundreds of processes start: without bytecode each would compile what it imports
unexport PYTHONDONTWRITEBYTECODE
# Without the first variable a restarted job can meet the dead attempt's addresses.
LAUNCH_ENV := TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1}

.PHONY: help
help:  ## This list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(firstword $(MAKEFILE_LIST)) | \
		while IFS='|' read -r name text; do printf '%-18s %s\n' "$$name" "$$text"; done

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "hf_hotspa needs Python 3.11 or newer, and '$(PYTHON)' is not: make PYTHON=/path/to/python3.11 ..." >&2; \
		exit 1; }
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

# The stamp is older than setup.cfg or constraints.txt when one of them changed: then pip is asked again, and leaves
# alone what is right already. setuptools comes first, so that the build needs no download of its own.
$(INSTALLED): setup.cfg constraints.txt | $(PY)
	@echo "installing hf_hotspa and the versions of constraints.txt into $(VENV) (minutes the first time) ..."
	@$(PY) -m pip install -qq --disable-pip-version-check -c constraints.txt setuptools
	@$(PY) -m pip install -qq --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[train,test,lint,docs]'
	@touch $@
	@echo "installed: $$($(PY) -c 'import hf_hotspa; print("hf_hotspa", hf_hotspa.__version__)')"

.PHONY: install
install: $(INSTALLED)  ## Make .venv and install everything into it (the other targets do it when needed)

.PHONY: train
train: $(INSTALLED)  ## Two minutes: train a small model on PROCESSES=4 CPU processes, and measure what switching gains
	@echo "starting $(PROCESSES) processes of $(TRAIN_SCRIPT) ..."
	@$(LAUNCH_ENV) $(BIN)/accelerate launch $(LAUNCH_ARGS) $(TRAIN_SCRIPT) $(TRAIN_ARGS) $(EXTRA_TRAIN_ARGS)

.PHONY: test
test: $(INSTALLED)  ## The fast tests, and a check that the multi-process ones really ran; both parts run, whatever the first says
	@failed=0; \
	$(ONE_THREAD) $(PY) -m pytest -m "not slow and not gpu" -n auto --maxprocesses 8 --dist worksteal --durations 10 \
		tests/contract tests/unit $(PYTEST_ARGS) || failed=1; \
	$(ONE_THREAD) HOTSPA_REQUIRE_GLOO=1 $(PY) -m pytest -m "not slow and not gpu" -n $(TEST_WORLDS) --dist worksteal \
		--durations 10 tests/gloo $(PYTEST_ARGS) || failed=1; \
	exit $$failed

# What gloo forgives and NCCL does not: see docs/wire.md. Five minutes on two cores.
.PHONY: check-wire
check-wire: $(INSTALLED)  ## What ranks say on process groups, recorded and proven by NCCL's rules; planted faults are found
	$(ONE_THREAD) $(PY) -m tests.wire_proofs
	$(ONE_THREAD) $(PY) -m tests.wire_faults

# torch then compares the collectives of all ranks before it runs them.
.PHONY: test-detail
test-detail: $(INSTALLED)  ## The fast tests of several processes, while torch checks every collective (slow)
	$(ONE_THREAD) HOTSPA_REQUIRE_GLOO=1 TORCH_DISTRIBUTED_DEBUG=DETAIL $(PY) -m pytest -m "not slow and not gpu" \
		-n $(TEST_WORLDS) --dist worksteal tests/gloo $(PYTEST_ARGS)

# Two nodes on this machine: in network namespaces where it allows them. With Ray: pip install 'ray[train]==2.60.0' into .venv.
.PHONY: test-nodes
test-nodes: $(INSTALLED)  ## The ways of starting on two nodes, and jobs that lose one (an hour). NODE_TRIALS=3 for fewer
	$(ONE_THREAD) HOTSPA_REQUIRE_GLOO=1 $(PY) -m pytest tests/gloo/test_nodes.py tests/gloo/test_node_files.py $(PYTEST_ARGS)
	$(ONE_THREAD) $(PY) -m tests.node_trials --trials $(NODE_TRIALS)

.PHONY: test-slow
test-slow: $(INSTALLED)  ## The slow tests, the tests with the oldest releases, and coverage; all run, whatever the first says
	@failed=0; \
	$(ONE_THREAD) $(PY) -m pytest -m "slow and not gpu" $(PYTEST_ARGS) || failed=1; \
	$(PY) -m tests.oldest $(OLDEST_ARGS) || failed=1; \
	$(MAKE) --no-print-directory coverage || failed=1; \
	exit $$failed

# Of one process: what ranks run is judged by the exactness of their results, and tracing would slow them past their time limits.
.PHONY: coverage
coverage: $(INSTALLED)  ## Which lines the one-process tests run: a table, and out/coverage/index.html
	$(ONE_THREAD) $(PY) -m pytest -q -m "not slow and not gpu" -n auto --maxprocesses 8 --dist worksteal tests/contract tests/unit \
		--cov=hf_hotspa --cov=trainer --cov=callbacks --cov-report=term:skip-covered --cov-report=html:out/coverage $(PYTEST_ARGS)

# An environment of its own, in .cache/oldest: gigabytes, where torch comes with its CUDA libraries.
.PHONY: test-oldest
test-oldest: $(INSTALLED)  ## What must hold on every release, with the oldest torch, transformers, ... that setup.cfg allows
	$(PY) -m tests.oldest $(OLDEST_ARGS)

# Environments of their own, in .cache/front_ends: gigabytes.
.PHONY: test-front-ends
test-front-ends: $(INSTALLED)  ## axolotl and ms-swift as published, with and without `hf-hotspa run` (half an hour)
	$(PY) -m tests.front_ends $(FRONT_END_ARGS)

.PHONY: test-gpu
test-gpu: $(INSTALLED)  ## The tests that need an NVIDIA GPU; one is enough. HOTSPA_NCCL_LIBRARY=FILE runs them with that NCCL
	@$(ONE_THREAD) HOTSPA_TEST_GPU=1 $(PY) -m tests.gpu $(PYTEST_ARGS)

.PHONY: gpu-all
gpu-all: $(INSTALLED)  ## All that a machine with an NVIDIA GPU can show, in 25 minutes: tests, NCCL's rules, benchmarks; call again to go on
	@$(PY) -m tests.gpu_all $(GPU_ALL_ARGS)

# mypy resolves no package_dir mapping, so it is shown the tree as it is installed: a folder of links.
TREE := .cache/merged-tree
.PHONY: lint
lint: $(INSTALLED)  ## ruff (rules and format), mypy on the merged package, codespell
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@rm -rf $(TREE) && mkdir -p $(TREE)/hf_hotspa
	@ln -s "$(CURDIR)"/hf_hotspa/* "$(CURDIR)/trainer" "$(CURDIR)/callbacks" $(TREE)/hf_hotspa/
	@ln -s "$(CURDIR)/tests" $(TREE)/tests
	cd $(TREE) && "$(abspath $(BIN))/mypy" --config-file "$(CURDIR)/pyproject.toml" \
		--cache-dir "$(CURDIR)/.mypy_cache" -p hf_hotspa -p tests
	$(BIN)/codespell

.PHONY: format
format: $(INSTALLED)  ## Let ruff repair what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Warnings are errors. No network: `make docs` and then open out/site/index.html.
.PHONY: docs
docs: $(INSTALLED)  ## The documentation as a site in out/site
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet $(DOCS_ARGS)

.PHONY: bench
bench: $(INSTALLED)  ## The benchmarks, one after the other
	@set -e; for script in $(BENCH_SCRIPTS); do \
		echo "== $$script"; $(LAUNCH_ENV) $(PY) $$script $(BENCH_ARGS); done

# The peers are no part of the normal install. DeepSpeed compiles what it needs when it is first used (g++).
$(PEERS_INSTALLED): benchmarks/requirements.txt $(INSTALLED)
	DS_BUILD_OPS=0 $(PY) -m pip install -qq --disable-pip-version-check -c constraints.txt --no-build-isolation \
		-r benchmarks/requirements.txt
	@touch $@

.PHONY: bench-peers
bench-peers: $(PEERS_INSTALLED)  ## Side by side with Trainer + DDP, TRL, FSDP2, DeepSpeed (an hour on 2 cores)
	$(LAUNCH_ENV) $(PY) benchmarks/side_by_side.py --png out/peers.png $(BENCH_ARGS)

# The wheel is tried in an environment of its own, which has the light installation, and away from the tree.
TRIAL := .cache/wheel
.PHONY: dist
dist: $(INSTALLED)  ## dist/: the package and its sources, ready to publish, checked, and tried away from the tree
	@$(PY) -m pip install -qq --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[release]'
	rm -rf dist build $(TRIAL)
	$(PY) -m build --no-isolation --outdir dist
	$(PY) -m twine check --strict dist/*
	$(PY) -m venv $(TRIAL)
	$(TRIAL)/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt dist/*.whl
	cd / && "$(abspath $(TRIAL))/bin/hf-hotspa" plan --model llama2-7b --gpus 8xh100-80g --lengths chat --longest 4096 | head -4

.PHONY: clean
clean:  ## Remove caches and build products; .venv and results in out/ stay
	rm -rf build dist *.egg-info .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
