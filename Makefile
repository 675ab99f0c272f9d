# Sets everything up and runs it. `make` alone lists the targets; `make -n TARGET` shows what one would do.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.SUFFIXES:
.DEFAULT_GOAL := help

VENV := .venv
PY := $(VENV)/bin/python
# mkdocs has an environment of its own: building the pages changes nothing in what trains.
DOCS_VENV := .venv-docs
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/clipship
PINS := $(addprefix docker/,requirements.txt torch/$(shell sed -n 's/^default = "\(.*\)"/\1/p' docker/stacks.toml).txt \
	$(patsubst %,requirements-%.txt,mpi build launch text onnx)) tests/requirements.txt

PYTHON ?= $(shell tools/python.sh)
ALONE ?=
BENCH_ARGS ?=
DEMO_ARGS ?=
HOROVOD_ARGS ?=
JOB ?=
KIT_ARGS ?=
LOCK_ARGS ?=
MODELS ?=
# Of the command line alone: some systems have a variable of this name.
NAME :=
NULLGPU ?= tools/nullgpu/run
OPEN_CLIP ?=
PARITY_ARGS ?=
PYXIS_PREFIX ?= $(CACHE)/pyxis
ROOM ?=
SEED ?=
SEEDS ?= 500
STACK ?=
TEST_ARGS ?=
# Two processes, each of which takes whole files; those with real ranks come first and the short ones fill the end.
TEST_PROCESSES ?= 2
PARALLEL := -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder
# What a target leaves out whose name does not end in -full.
UNLESS_FULL = $(if $(filter %-full,$@),, and not full)
SLURM_OF_NEWER := slurmctld,slurmd,slurm-client,munge,libpmix-dev,openmpi-bin,iproute2,procps,automake
DOCKER_OF_NEWER := ca-certificates,docker-buildx,docker-cli,docker-registry,docker.io,iproute2,iptables

# Named after the place and the content of what they install: a second `make venv` costs nothing, and one that was
# interrupted is done again.
pinned = $1/pinned-$(shell { pwd; cat $2; } | sha256sum | cut -c 1-16)
PINNED := $(call pinned,$(VENV),$(PINS))
DOCS := $(call pinned,$(DOCS_VENV),docs/requirements.txt)
INSTALLED := $(VENV)/installed-$(shell sha256sum <pyproject.toml | cut -c 1-16)
# Says why Horovod is not installed; the tests marked `horovod` are skipped then.
NO_HOROVOD := $(VENV)/horovod-missing
# Those whose first line names their target.
BENCHMARKS := $(shell sed -sn '1s/.*: `make \(bench-[a-z-]*\)`\.$$/\1/p' benchmarks/*.py)

TARGETS := $(shell sed -n 's/^\([a-z][a-z -]*\):\( .*\)\?$$/\1/p' Makefile)
IN_COLUMNS := while IFS='|' read -r name text; do printf '  make %-17s %s\n' "$$name" "$$text"; done

.PHONY: $(TARGETS) $(BENCHMARKS)

help: ## list the targets
	@sed -n 's/^\([a-z][a-z-]*\)[a-z -]*:.* ## \(.*\)/\1|\2/p' Makefile | $(IN_COLUMNS)
	$(IN_COLUMNS) <<<'NAME-full|all that NAME leaves out as well: $(patsubst %-full,%,$(filter test-%-full,$(TARGETS)))'

venv: $(INSTALLED) ## make .venv from the pinned requirements (Python >= 3.11, no root)

$(PINNED):
	@echo 'the packages of $(VENV) take 6 GB, and a minute or some the first time'
	tools/venv.sh '$(PYTHON)' $(VENV) $@ $(PINS)

$(DOCS):
	@tools/venv.sh '$(PYTHON)' $(DOCS_VENV) $@ docs/requirements.txt

$(INSTALLED): $(PINNED)
	@$(PY) -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation --editable .
	rm -f $(VENV)/installed-*
	touch $@

horovod: venv
	@tools/horovod.sh $(VENV) '$(CACHE)/wheels' $(HOROVOD_ARGS)

check: venv ## format, lint, types, layers, and the rules of tests/lint for pages and code, as CI runs them
	@$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy & types=$$! # beside the others, as it is one process
	$(VENV)/bin/lint-imports --no-logo --no-cache
	$(PY) -m pytest tests/lint --quiet -rs
	wait $$types
	if command -v shellcheck >/dev/null; then
	    shellcheck {benchmarks,docker,docker/plugins,tests,tests/integration,tests/cluster/*,tools}/*.sh \
	        tools/nullgpu/run tools/kube/cluster .ci/run
	else
	    echo 'shellcheck is not installed: the shell scripts were not checked'
	fi

check-stacks: venv # what docker/stacks.toml says, against what the wheels on the package index declare
	@$(PY) -m tools.check_table

fmt: venv ## format the code and mend what the linter can
	@$(PY) -m ruff check --fix-only .
	$(PY) -m ruff format .

test: venv horovod ## all tests that need no GPU and no cluster but check and test-faults; TEST_ARGS='-k gather' picks
	@status=0
	$(PY) -m pytest --ignore=tests/cluster --ignore=tests/lint --ignore-glob='*/test_ends_*' \
	    -m 'not gpu and not full' $(PARALLEL) $(TEST_ARGS) || status=$$?
	if [[ -e $(NO_HOROVOD) ]]; then echo "Horovod's tests were SKIPPED: $$(<$(NO_HOROVOD))"; fi
	exit $$status

simulate: venv ## faults in a simulated world, one schedule a seed; the last line is JSON; SEEDS=10000, or SEED=7 alone
	@$(PY) -m tests.simulated $(if $(SEED),--seed $(SEED),--seeds $(SEEDS)) $(TEST_ARGS)

mutants: venv # of a room of trainer/, and which tests kill them: ROOM=supervise
	@$(PY) -m tools.mutants $(ROOM) $(TEST_ARGS)

test-full: venv horovod ## the whole matrix of backends, launchers, worlds and faults; takes its time
	@$(PY) -m pytest --ignore=tests/cluster -m full $(TEST_ARGS)

test-faults test-faults-full: venv horovod ## the table of faults with real processes; the full one takes an hour
	@tests/integration/packages.sh
	$(PY) -m pytest --ignore=tests/cluster -p tests.support.faults -m 'fault$(UNLESS_FULL)' $(PARALLEL) $(TEST_ARGS)

test-slurm: venv horovod ## runs on a real Slurm of three nodes on this machine (Debian, root; installs Slurm)
	@tests/cluster/slurm/packages.sh
	$(PY) -m pytest tests/cluster/slurm -m 'slurm and not full' $(TEST_ARGS)

test-slurm-full: venv horovod # also preemption, the Slurm of a newer Debian, apptainer and pyxis
	@tests/cluster/slurm/packages.sh
	$(PY) -m pytest tests/cluster/slurm -m slurm $(TEST_ARGS)
	tests/newer-debian.sh trixie '$(SLURM_OF_NEWER)' $(PY) tests/cluster/slurm -m slurm $(TEST_ARGS)
	tests/newer-debian.sh sid '$(SLURM_OF_NEWER),apptainer' $(PY) tests/cluster/slurm -m 'apptainer or site' $(TEST_ARGS)
	$(in_pyxis)

test-pyxis: venv horovod ## on that Slurm in a real pyxis, from its forge or from PYXIS_SOURCE and ENROOT_SOURCE
	@tests/cluster/slurm/packages.sh
	$(in_pyxis)

define in_pyxis
tests/cluster/slurm/pyxis.sh '$(PYXIS_PREFIX)'
CLIPSHIP_PYXIS='$(PYXIS_PREFIX)' $(PY) -m pytest tests/cluster/slurm -m pyxis $(TEST_ARGS)
endef

test-kubernetes test-kubernetes-full: venv ## real jobs on a cluster made here (Debian, root, Go), or on KUBECONFIG's
	@tests/cluster/kubernetes/packages.sh
	tests/cluster/kubernetes/with-cluster.sh \
	    $(PY) -m pytest tests/cluster/kubernetes -m 'kubernetes$(UNLESS_FULL)' $(TEST_ARGS)

test-image test-image-full: venv ## build the default image for real and train in it (Debian, root; installs builders)
	@tests/cluster/image/packages.sh
	$(PY) -m pytest tests/cluster/image -m 'docker$(UNLESS_FULL)' $(TEST_ARGS)
	if [[ $@ == *-full ]]; then
	    tests/newer-debian.sh trixie $(DOCKER_OF_NEWER) $(PY) tests/cluster/image -m newer_docker $(TEST_ARGS)
	fi

test-packages: ## programs find what they open with a target's own packages alone (Debian, root); ALONE='ci faults'
	@tests/alone.sh $(ALONE)

test-nullgpu: venv ## what a step asks of a GPU, on a stand-in for its driver that counts (needs gcc); NULLGPU=PATH
	@'$(NULLGPU)' $(PY) -m pytest tests/nullgpu -m 'not full' $(PARALLEL) $(TEST_ARGS)
	'$(NULLGPU)' $(PY) -m pytest tests/gpu -m 'not computes' $(TEST_ARGS) # as far as a null GPU can

test-nullgpu-full: venv # also `make bench-gpu` as far as a null GPU can
	@'$(NULLGPU)' $(PY) -m pytest tests/nullgpu $(TEST_ARGS)

test-gpu: venv horovod ## the tests that need a GPU
	@if ! $(PY) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
	    echo 'torch sees no GPU on this machine: the GPU tests were not run'
	    exit 0
	fi
	$(PY) -m pytest -m gpu $(TEST_ARGS)

test-torch: ## the trainer's tests on another row of docker/stacks.toml: STACK=2.6.0
	@tests/stack.sh '$(STACK)' $(TEST_ARGS)

test-open-clip: venv ## the tests of models against a checkout of open_clip, such as its main: OPEN_CLIP=../open_clip
	@tests/open-clip.sh $(PY) '$(OPEN_CLIP)' $(TEST_ARGS)

fuzz: venv ## 10,000 hostile job files through check, all renderers and submit without a cluster; test tries 300
	@$(PY) -m pytest tests/unit/test_fuzz_jobs.py -m full -s $(TEST_ARGS)

parity: venv horovod ## the gradient on 1, 2 and 4 ranks, each backend, against one process
	@$(PY) -m tests.parity $(PARITY_ARGS)

demo: venv ## train a small CLIP on real images, show what it learned; DEMO_ARGS='--help'
	@$(PY) -m trainer.demo $(DEMO_ARGS)

image: venv ## build the container image of JOB=job.toml with Docker, podman or buildah
	@if [[ -z '$(JOB)' ]]; then echo 'which job? make image JOB=job.toml' >&2; exit 2; fi
	$(PY) -m trainer.cli.main image build '$(JOB)'

bench: $(addprefix bench-,$(subst _,-,$(NAME))) ## run a benchmark: NAME=data, BENCH_ARGS='--help'; without it, list all
	@$(if $(NAME),,sed -sn '1s/"""\(.*\): `make \(bench-.*\)`\.$$/\2|\1/p' benchmarks/*.py | $(IN_COLUMNS))

bench-goodput bench-step: horovod
$(BENCHMARKS): bench-%: venv
	@$(PY) -m benchmarks.$(subst -,_,$*) $(BENCH_ARGS)

gpu-kit: venv ## a folder that measures this project on a GPU machine without network; KIT_ARGS='--help'
	@$(PY) -m benchmarks.gpu_kit $(KIT_ARGS)

goldens: venv ## write what is rendered now over tests/unit/golden/; read the diff before you commit it
	@$(PY) -m pytest tests/unit -k golden --rewrite-goldens --quiet
	git status --short tests/unit/golden

reference: venv ## write docs/job-file.md, docs/cli.md and the JSON Schema from the code
	@$(PY) -m tools.reference

models-table: venv # of docs/models.md: builds and trains each model of open_clip, or MODELS, on no memory
	@PYTHONPATH="$(if $(OPEN_CLIP),$(realpath $(OPEN_CLIP)/src):)$$PWD" $(PY) -m tools.models_page $(MODELS)

docs: $(DOCS) ## build the pages of docs/ into site/; a broken link or a page that no menu names fails
	@NO_MKDOCS_2_WARNING=true $(DOCS_VENV)/bin/mkdocs build --strict --clean

lock: ## pin the requirements anew: names, versions, hashes; LOCK_ARGS=--upgrade takes the newest
	@PYTHON='$(PYTHON)' docker/lock.sh $(LOCK_ARGS)

clean: ## remove .venv and the tools' caches; built wheels stay in the cache outside the checkout
	@rm -rf $(VENV) $(DOCS_VENV) site build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
