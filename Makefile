.DEFAULT_GOAL := help
.PHONY: help setup demo demo-long test test-runs test-parts test-unit-processes test-unit style quality docs packages browser-install slurm-install slurm-up slurm-down slurm-shell slurm-test machines-install machines-up machines-down places-test gpu-day-toy places long chaos clean

PYTHON_BIN := .venv/bin/python
# A hundred processes of the tests would each compile what they import, for minutes in all.
unexport PYTHONDONTWRITEBYTECODE
NODES ?= 2
KIND ?= pods
SEED ?= 0
# What else `make test` does: in CI both of its cores have something to do until the end.
FIRST ?=
LAST ?=
# Unit tests that start processes, and wait for them.
PROCESSES := tests/unit/driver tests/unit/grading tests/unit/launch tests/unit/rewards tests/unit/run

help:            ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## */\t/' | expand -t 18

setup:           ## Make .venv and install hpc-grpo for CPU, with what the tests need
	@tools/setup.sh cpu,dev

demo:            ## Train SmolLM2-135M-Instruct by GRPO, and show what it has learned (SEED=0)
	@tools/setup.sh cpu,demo
	@$(PYTHON_BIN) -m hpc_grpo.cli demo --seed $(SEED)

demo-long:       ## The same on four harder tasks, which takes much longer
	@tools/setup.sh cpu,demo
	@$(PYTHON_BIN) -m hpc_grpo.cli demo --long --seed $(SEED)

# Two at a time, the longest first: with more at once, two cores miss the deadlines that tests are about.
test: setup      ## Unit and integration tests
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target $(FIRST) test-parts test-runs \
		test-unit test-unit-processes $(LAST)

test-runs:
	@$(PYTHON_BIN) -m pytest tests/integration -m 'cluster and not long' --durations=12

test-parts:
	@$(PYTHON_BIN) -m pytest tests/integration -m 'not cluster and not long' --durations=12

test-unit-processes:
	@$(PYTHON_BIN) -m pytest $(PROCESSES) --durations=12

test-unit:
	@$(PYTHON_BIN) -m pytest tests/unit $(PROCESSES:%=--ignore=%) --durations=12

style: setup     ## Format the code and mend what ruff can
	@$(PYTHON_BIN) -m ruff format .
	@$(PYTHON_BIN) -m ruff check --fix .

quality: setup   ## What CI checks besides the tests: format, lint, types
	@$(PYTHON_BIN) -m ruff format --check .
	@$(PYTHON_BIN) -m ruff check .
	@$(PYTHON_BIN) -m mypy

docs: setup      ## Build the docs as a site, in site/
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict

packages:        ## All Debian packages that tests need (root); one after the other, as apt wants it
	@for each in browser slurm machines; do $(MAKE) --no-print-directory $$each-install || exit 1; done

browser-install: ## Install Debian's Chromium and zsh, for the tests of the page and of completion (root)
	@python3 -c 'from tools.virtual_machines import host; print(host.install(("chromium", "zsh"), ("chromium", "zsh")))'

slurm-install:   ## Install the Debian packages of the virtual Slurm cluster (root)
	@python3 -m tools.virtual_slurm install

slurm-up:        ## Bring up a real Slurm cluster of NODES=2 on this machine (root)
	@python3 -m tools.virtual_slurm up --nodes $(NODES)

slurm-down:      ## Take it down, leaving nothing
	@python3 -m tools.virtual_slurm down

slurm-shell:     ## A shell on its login node
	@python3 -m tools.virtual_slurm exec -- bash

slurm-test: setup slurm-install ## The tests on real Slurm (root)
	@$(PYTHON_BIN) -m pytest tests/slurm -m 'slurm and not long' -rs --durations=12

machines-install: ## Install the Debian packages of virtual machines: sshd, nats-server, PostgreSQL, podman, Apptainer (root)
	@python3 -m tools.virtual_machines install

machines-up:     ## Bring up machines on this machine: KIND=pods, hosts or vms, NODES=2 (root)
	@python3 -m tools.virtual_machines up $(KIND) --nodes $(NODES)

machines-down:   ## Take them down, leaving nothing
	@python3 -m tools.virtual_machines down

places-test: setup machines-install ## The tests on pods, hosts, containers and VMs (root)
	@$(PYTHON_BIN) -m pytest tests/places -m 'places and not long' -rs --durations=12

# Without network, as on a compute node.
gpu-day-toy: setup ## The script for a day on GPUs, at a tiny size on CPU (root)
	@. .venv/bin/activate && unshare --net sh -c 'ip link set lo up && benchmarks/gpu_day.sh --toy "$$(mktemp -d)"'

places: setup machines-install ## What can happen to a run on pods and hosts, as a table; minutes a row (root)
	@$(PYTHON_BIN) -m pytest tests/places -m 'places and long' -v --timeout=0

long: setup      ## Tests that `make test` leaves out for their time, those of the demo among them
	@tools/setup.sh cpu,demo
	@$(PYTHON_BIN) -m pytest -m 'long and not slurm and not places' --timeout=0

chaos: setup slurm-install ## What can happen to a run on real Slurm, as a table; minutes a row (root)
	@$(PYTHON_BIN) -m pytest tests/slurm -m 'slurm and long' -v --timeout=0

clean:           ## Remove the demo and caches; .venv and runs/ stay
	@rm -rf demo .pytest_cache .mypy_cache .ruff_cache
