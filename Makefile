# unipar's commands. `make demo` and `make test` set up all they need in .venv, once.

ifndef PYTHON
PYTHON := $(shell for p in python3.11 python3 python3.12 python3.13; do \
    $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && echo $$p && break; done)
endif

# The first Python that has torch; .venv's only where no other has.
GPU_PYTHON ?= $(shell for p in python3 python3.12 python3.13 python3.11 $(CURDIR)/.venv/bin/python; do \
    $$p -c 'import sys, importlib.util as u; sys.exit(sys.version_info < (3, 11) or not u.find_spec("torch"))' \
    2>/dev/null && echo $$p && exit; done; echo python3)

VENV := .venv
BIN := $(VENV)/bin
DONE := $(VENV)/.done
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet install -c constraints.txt
# Modules are compiled once, not again in each of the hundreds of interpreters that tests start.
IN_VENV := PATH="$(CURDIR)/$(BIN):$$PATH" PYRIGHT_PYTHON_IGNORE_WARNINGS=1 PYTHONDONTWRITEBYTECODE=
# Few large collections of young objects instead of many small ones save a tenth of pyright's time.
PYRIGHT := $(IN_VENV) NODE_OPTIONS=--max-semi-space-size=128 $(BIN)/pyright
# Libraries compile into a folder of this run's own, which goes with it.
PYTEST := compiled=$$(mktemp -d) && trap 'rm -rf "$$compiled"' EXIT && trap 'exit 130' INT TERM && \
    $(IN_VENV) TORCH_EXTENSIONS_DIR="$$compiled" $(BIN)/python -m pytest

# Test files run in two processes where there are two cores; a world that a test starts uses both anyway.
WORKERS := $(shell [ "$$(nproc)" -gt 1 ] && echo 2 || echo 0)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo verify test lint style bench layout reference words route errors settings memory mesh recipes examples bubble pairs conformance chaos matrix machines ray sweeps emulated device-lines planted compiled versions fresh torchtune docs gpu gpu-wheels setup horovod clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 20

demo: setup ## the same training under every backend: one table, two minutes; then a plan for 7.5 billion parameters
	$(BIN)/unipar compare configs/quickstart.yaml --overwrite
	$(BIN)/unipar plan configs/gpt_7b.yaml --world 64 --machine h100-sxm

verify: setup ## every strategy compared with one process on two examples, bitwise where possible; about three minutes each
	$(BIN)/unipar verify configs/char_gpt.yaml --overwrite
	$(BIN)/unipar verify configs/digits.yaml --overwrite

# pyright runs on the second core while tests run; its errors are printed at once, its last line again at the end.
test: style ## lint, and every test that needs no GPU
	@typed=$$(mktemp); \
	( $(PYRIGHT) > "$$typed" 2>&1 || { cat "$$typed"; exit 1; } ) & types=$$!; \
	trap 'kill $$types 2> /dev/null; rm -f "$$typed"; exit 130' INT TERM; \
	( $(PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS) ); tests=$$?; \
	wait $$types || tests=1; \
	tail -n 1 "$$typed"; rm -f "$$typed"; exit $$tests

lint: style ## ruff and pyright
	$(PYRIGHT)

style: setup $(DONE)/tests ## ruff
	$(IN_VENV) $(BIN)/ruff check .
	$(IN_VENV) $(BIN)/ruff format --check .

bench: setup $(DONE)/bench ## what unipar costs a step, beside Accelerate, Fabric and loops written by hand
	$(IN_VENV) $(BIN)/python -m benchmarks.overhead $(ARGS)

words: setup ## patterns and words that docs, help, errors and pages of reports may not have: each place (ARGS: words of places)
	$(IN_VENV) $(BIN)/python -m tools.words $(ARGS)

route: setup ## the walk of a config through launch and compare: stays, rooms, climbs, returns
	$(IN_VENV) $(BIN)/python -m tools.route $(ARGS)

errors: setup ## each place that raises an error, with its text; --without-way-out, --sample N --seed S
	$(IN_VENV) $(BIN)/python -m tools.raises $(ARGS)

layout: setup ## the shape of unipar/: modules, packages, floors, import circles, largest folder, longest file
	$(IN_VENV) $(BIN)/python -m tools.layout $(ARGS)

reference: setup ## write the tables of docs/config.md and docs/cli.md from the schema and the commands (ARGS=--check)
	$(IN_VENV) $(BIN)/python -m tools.reference $(ARGS)

settings: setup $(DONE)/tests ## every key of the config, from every source, in every strategy: obeyed or refused, as a table
	$(IN_VENV) $(BIN)/python -m tests.support.every_setting

memory: setup ## whether every byte has a name, in every strategy: two models, three precisions, worlds of 1 and 2
	$(IN_VENV) $(BIN)/python -m benchmarks.memory $(ARGS)

mesh: setup $(DONE)/tests ## models that others wrote, split over tensor, pipeline and context: verified in each strategy
	$(IN_VENV) $(BIN)/python -m benchmarks.mesh $(ARGS)

examples: setup $(DONE)/tests ## every example, small, verified in every strategy that it can run in (ARGS: names of some): half an hour
	$(IN_VENV) $(BIN)/python -m benchmarks.examples $(ARGS)

recipes: setup ## plans of large models beside peaks that others measured: the tables of docs/recipes.md (ARGS: names of some)
	$(IN_VENV) $(BIN)/python -m benchmarks.recipes $(ARGS)

bubble: setup ## how long the ranks of a pipeline wait under each schedule, measured on blocks that sleep
	$(IN_VENV) $(BIN)/python -m benchmarks.bubble $(ARGS)

pairs: setup ## every engine goes on from what every other one has saved: an hour (ARGS=--help)
	$(IN_VENV) $(BIN)/python -m benchmarks.checkpoint_pairs $(ARGS)

conformance: setup $(DONE)/tests ## every case in every strategy, in worlds of 1, 2 and 4, and a few on 8 ranks
	@$(PYTEST) tests/conformance --whole -m "not gpu" $(ARGS)

chaos: setup $(DONE)/tests ## kill random ranks and parents, many times
	@$(PYTEST) -m chaos $(ARGS)

matrix: setup $(DONE)/tests ## every launcher with every backend, really started: one table
	$(IN_VENV) $(BIN)/python -m tests.support.matrix $(ARGS)
	@$(PYTEST) -m slow tests/launcher/test_slurm.py

machines: setup $(DONE)/tests ## every launcher with every backend over two machines that share nothing (ARGS=--help); root
	$(IN_VENV) $(BIN)/python -m tests.support.machine_matrix $(ARGS)

ray: setup $(DONE)/tests ## Ray jobs of every backend over two machines, and a restart: 0.6 GB in build/, once; root
	$(IN_VENV) $(BIN)/python -m tests.support.ray_matrix $(ARGS)

sweeps: setup $(DONE)/tests ## what `make test` plays examples of: launchers, scripts, tasks, pages
	@$(PYTEST) -m sweep $(ARGS)

emulated: setup $(DONE)/tests ## tests on an emulated CUDA device, and every strategy and precision there (ARGS: words of rows)
	@$(PYTEST) tests/emulated -m ""
	$(IN_VENV) $(BIN)/python -m tests.support.softcuda.trainings.table $(ARGS)

device-lines: setup $(DONE)/tests ## lines of unipar for devices that tests on the emulated device execute, by file (ARGS: pytest's words): an hour
	$(IN_VENV) $(BIN)/python -m tests.support.softcuda.coverage $(ARGS)

planted: setup $(DONE)/tests ## silent errors of our own, planted one by one in a copy of the code, and the test that finds each (ARGS=emulated: those of code for devices)
	$(IN_VENV) $(BIN)/python -m tests.corpus.planted $(ARGS)

compiled: setup $(DONE)/tests ## what DeepSpeed compiles on first use, its CPU Adam and its disk: some minutes
	@$(PYTEST) -m slow tests/backends/test_deepspeed.py

versions: setup $(DONE)/tests ## a part of the suite under the oldest and the newest torch: gigabytes, once
	$(IN_VENV) $(BIN)/python -m tests.support.versions $(ARGS)

# Not .venv: the machine that is made has none.
fresh: ## README's commands on a bare Debian that is made on the spot, as root and as a user (ARGS=--help); root
	@.ci/needs "$(PYTHON)"
	@$(PYTHON) -m tests.support.bare_machine $(ARGS)

torchtune: $(DONE)/tests build/torchtune ## both scripts of docs/migrate.md's section on torchtune on two ranks; torchtune in build/, 0.2 GB, once
	@$(PYTEST) -m slow tests/repository/test_coming_from.py $(ARGS)

build/torchtune: pyproject.toml
	@mkdir -p $@ && grep -v '^torchao==' constraints.txt > $@/constraints.txt
	@$(BIN)/python -m pip --disable-pip-version-check --quiet install -c $@/constraints.txt \
	    --no-deps --upgrade --target $@ --group torchtune && touch $@

docs: $(DONE)/docs ## these docs as a site in build/site, with search and the API; links are checked
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS) && echo "the docs: build/site/index.html"

# Not .venv: a machine with a GPU has a torch of its own, and often no network.
gpu: ## everything that needs a GPU, on torch of this machine: one table and runs/gpu/gpu.json; without one it says so
	@$(GPU_PYTHON) -m benchmarks.gpu $(ARGS)

gpu-wheels: ## fetch what `make gpu` needs besides torch into .gpu-wheels, to be copied to a machine without network
	@$(GPU_PYTHON) -m benchmarks.gpu.wheels

setup: $(DONE)/horovod ## .venv with all that demo needs

horovod: $(DONE)/packages ## try Horovod's wheel again, where set-up went on without it
	$(BIN)/unipar install horovod
	@touch $(DONE)/horovod

clean: ## remove .venv and caches; runs/ stays
	rm -rf $(VENV) .pytest_cache .ruff_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(DONE)/torch: constraints.txt .ci/needs
	@.ci/needs "$(PYTHON)"
	@echo "set-up: torch, into $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) pip
	@$(PIP) torch setuptools wheel
	@mkdir -p $(DONE) && touch $@

$(DONE)/packages: pyproject.toml $(DONE)/torch
	@echo "set-up: unipar and what it uses"
	@$(PIP) --group build
	@$(PIP) --no-build-isolation -e '.[deepspeed,accelerate,horovod,tensorboard,weights,examples,report]'
	@touch $@

$(DONE)/horovod: $(DONE)/packages
	@echo "set-up: Horovod, compiled for this torch (some minutes, once)"
	@$(BIN)/unipar install horovod || echo "set-up goes on without Horovod; 'make horovod' tries again"
	@touch $@

$(DONE)/tests: $(DONE)/packages
	@echo "set-up: tools for tests and lint, and the other trackers"
	@$(PIP) --group test --group lint --no-build-isolation -e '.[wandb,mlflow,remote]'
	@touch $@

$(DONE)/docs: $(DONE)/packages
	@echo "set-up: what the docs are made with"
	@$(PIP) --group docs
	@touch $@

$(DONE)/bench: $(DONE)/packages
	@echo "set-up: what benchmarks compare with"
	@$(PIP) --group bench
	@touch $@
