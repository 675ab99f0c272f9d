# Sets everything up and runs it. `make` alone lists the targets; `make -n TARGET` shows what one would do.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.SUFFIXES:
.DEFAULT_GOAL := help

VENV := .venv
PY := $(VENV)/bin/python
WHEELS := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/clipship/wheels
PINS := docker/requirements.txt docker/torch/$(shell sed -n 's/^default = "\(.*\)"/\1/p' docker/stacks.toml).txt docker/requirements-mpi.txt docker/requirements-build.txt \
	docker/requirements-launch.txt docker/requirements-text.txt docker/requirements-onnx.txt tests/requirements.txt

# The first Python that can make an environment; the pins were made for 3.11.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)

ALONE ?=
BENCH_ARGS ?=
DEMO_ARGS ?=
JOB ?=
KIT_ARGS ?=
NULLGPU ?= ../shared/nullgpu/run
MODELS ?=
OPEN_CLIP ?=
OPEN_CLIP_TESTS := $(addprefix tests/unit/test_,anchor.py captioning.py compile.py ema.py export.py foreign_models.py from_open_clip.py fused_block.py import_weights.py initial_weights.py \
	kernels.py loading.py locking.py lora.py naflex.py step.py teacher.py text_size.py text_towers.py weight_names.py data_tokens.py open_clip_4.py models_page.py optimizer.py packages.py positives.py) tests/integration/test_trajectory.py
STACK ?=
PARITY_ARGS ?=
SLURM_OF_NEWER := slurmctld,slurmd,slurm-client,munge,libpmix-dev,openmpi-bin,iproute2,procps,automake
DOCKER_OF_NEWER := ca-certificates,docker-buildx,docker-cli,docker-registry,docker.io,iproute2,iptables
PYXIS_PREFIX ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/clipship/pyxis
# Two processes, each of which takes whole files; those with real ranks come first and the short ones fill the end.
TEST_PROCESSES ?= 2
PARALLEL := -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder
TEST_ARGS ?=
HOROVOD_ARGS ?=

# Named after the place and the content of what they install: a second `make venv` costs nothing, an interrupted one is done again.
PINNED := $(VENV)/pinned-$(shell { pwd; cat $(PINS); } | sha256sum | cut -c 1-16)
INSTALLED := $(VENV)/installed-$(shell sha256sum <pyproject.toml | cut -c 1-16)
# Which wheel is installed, or that none can be; without Horovod the tests marked `horovod` are skipped.
HOROVOD := $(VENV)/horovod-wheel
NO_HOROVOD := $(VENV)/horovod-missing
# mkdocs has an environment of its own: building the pages changes nothing in what trains.
DOCS_VENV := .venv-docs
DOCS := $(DOCS_VENV)/pinned-$(shell { pwd; cat docs/requirements.txt; } | sha256sum | cut -c 1-16)

.PHONY: help venv horovod check fmt fuzz test goldens test-packages test-slurm test-slurm-full test-pyxis bench-cli bench-gpu gpu-kit bench-start bench-step bench-learning test-faults test-faults-full bench-generations bench-goodput bench-hang bench-heartbeat bench-data bench-data-remote bench-install test-full test-nullgpu test-nullgpu-full test-gpu demo parity reference models-table docs lock clean check-stacks image test-image test-image-full test-torch test-open-clip test-kubernetes test-kubernetes-full

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r target text; do
	    printf '  make %-15s %s\n' "$$target" "$$text"
	done

venv: $(INSTALLED) ## make .venv from the pinned requirements (Python >= 3.11, no root)

$(PINNED):
	@if ! grep -qs '$(CURDIR)/$(VENV)/' $(VENV)/bin/pip; then # none, or one that was copied from another folder
	    [[ -n '$(PYTHON)' ]] || { echo 'No Python >= 3.11 with the module venv was found: install python3.11 and python3.11-venv,' \
	        'or name one with make PYTHON=/path/to/python3' >&2; exit 2; }
	    echo 'making $(VENV) with $(PYTHON)'
	    $(PYTHON) -m venv --clear $(VENV)
	fi
	echo 'installing the pinned packages into $(VENV): 6 GB, a minute or some the first time'
	install=(pip install --require-hashes $(PINS:%=-r %))
	export PIP_DISABLE_PIP_VERSION_CHECK=1
	$(PY) -m pip install --quiet --require-hashes -r docker/requirements-uv.txt
	if [[ $$($(PY) -m pip config list) == *index* ]] || ! $(VENV)/bin/uv "$${install[@]}" --python $(PY) --no-cache --compile-bytecode; then
	    echo 'pip installs them, since it is told of an index of its own or uv cannot: some minutes'
	    $(PY) -m "$${install[@]}"
	fi
	rm -f $(VENV)/pinned-*
	touch $@

$(INSTALLED): $(PINNED)
	@$(PY) -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation --editable .
	rm -f $(VENV)/installed-*
	touch $@

horovod: venv ## build Horovod against the torch in .venv, or take it from the cache
	@status=0
	wheel=$$(docker/build-horovod.sh --python $(PY) --cache '$(WHEELS)' $(HOROVOD_ARGS)) || status=$$?
	if ((status == 3)); then
	    echo 'Horovod cannot be built on this machine; `make horovod` says what it lacks' | tee $(NO_HOROVOD)
	elif ((status)); then
	    exit $$status
	elif [[ ! -e $(HOROVOD) || $$(<$(HOROVOD)) != "$$wheel" || ! -x $(VENV)/bin/horovodrun ]]; then
	    $(PY) -m pip install --disable-pip-version-check --quiet --no-deps --force-reinstall "$$wheel"
	    rm -f $(NO_HOROVOD)
	    echo "$$wheel" >$(HOROVOD)
	fi

check: venv ## format, lint, types, layers, and the rules of tests/lint for pages and code, as CI runs them
	@$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy & types=$$! # beside the others, as it is one process
	$(VENV)/bin/lint-imports --no-logo --no-cache
	$(PY) -m pytest tests/lint --quiet -rs
	wait $$types
	if command -v shellcheck >/dev/null; then
	    shellcheck benchmarks/*.sh docker/*.sh docker/plugins/*.sh tests/*.sh tests/cluster/*/*.sh .ci/run
	else
	    echo 'shellcheck is not installed: the shell scripts were not checked'
	fi

check-stacks: venv ## compare docker/stacks.toml with what the wheels on the package index declare
	@$(PY) -m tools.check_table

fmt: venv ## format the code and mend what the linter can
	@$(PY) -m ruff check --fix-only .
	$(PY) -m ruff format .

test: venv horovod ## every test but those of `make check` and the table of faults that needs no GPU and no cluster; TEST_ARGS='-k gather' picks some
	@status=0
	$(PY) -m pytest --ignore=tests/cluster --ignore=tests/lint --ignore-glob='*/test_ends_*' -m 'not gpu and not full' $(PARALLEL) $(TEST_ARGS) || status=$$?
	if [[ -e $(NO_HOROVOD) ]]; then echo "Horovod's tests were SKIPPED: $$(<$(NO_HOROVOD))"; fi
	exit $$status

image: venv ## build the container image of JOB=job.toml with Docker, podman or buildah
	@if [[ -z '$(JOB)' ]]; then echo 'which job? make image JOB=job.toml' >&2; exit 2; fi
	$(PY) -m trainer.cli.main image build '$(JOB)'

test-image: venv ## build the default stack's image for real, train in it, build a small image with podman and buildah (Debian, root; installs docker.io, podman, buildah, debootstrap)
	@tests/cluster/image/packages.sh
	$(PY) -m pytest tests/cluster/image -m 'docker and not full' $(TEST_ARGS)

test-image-full: venv ## the same, with BuildKit, Open MPI 5, an older stack, an offline build, a second build, Apptainer and a newer Docker
	@tests/cluster/image/packages.sh
	$(PY) -m pytest tests/cluster/image -m docker $(TEST_ARGS)
	tests/newer-debian.sh trixie $(DOCKER_OF_NEWER) $(PY) tests/cluster/image -m newer_docker $(TEST_ARGS)

test-torch: ## run the trainer's tests on another row of docker/stacks.toml; STACK=2.6.0
	@tests/stack.sh '$(STACK)' $(TEST_ARGS)

test-open-clip: venv ## the tests of models against a checkout of open_clip, such as its main; OPEN_CLIP=../open_clip
	@if [[ ! -d '$(OPEN_CLIP)/src/open_clip' ]]; then
	    echo "OPEN_CLIP='$(OPEN_CLIP)' is no checkout of open_clip: it has no src/open_clip" >&2
	    exit 2
	fi
	PYTHONPATH="$$(realpath '$(OPEN_CLIP)/src')" $(PY) -m pytest $(OPEN_CLIP_TESTS) -m 'not full' $(TEST_ARGS)

test-full: venv horovod ## the whole matrix of backends, launchers, worlds and faults; takes its time
	@$(PY) -m pytest --ignore=tests/cluster -m full $(TEST_ARGS)

goldens: venv ## write what is rendered now over tests/unit/golden/; read the diff before you commit it
	@$(PY) -m pytest tests/unit -k golden --rewrite-goldens --quiet
	git status --short tests/unit/golden

test-packages: ## in a minimal Debian, with nothing but a target's own packages, its programs open what they open in its tests (Debian, root); ALONE='ci pyxis' tries CI's own list and pyxis
	@tests/alone.sh $(ALONE)

test-slurm: venv horovod ## runs on a real Slurm of three nodes on this machine (Debian, root; installs slurm-wlm and munge)
	@tests/cluster/slurm/packages.sh
	$(PY) -m pytest tests/cluster/slurm -m 'slurm and not full' $(TEST_ARGS)

test-slurm-full: venv horovod ## the same, with preemption; once more with the Slurm of a newer Debian; in apptainer and in pyxis
	@tests/cluster/slurm/packages.sh
	$(PY) -m pytest tests/cluster/slurm -m slurm $(TEST_ARGS)
	tests/newer-debian.sh trixie '$(SLURM_OF_NEWER)' $(PY) tests/cluster/slurm -m slurm $(TEST_ARGS)
	tests/newer-debian.sh sid '$(SLURM_OF_NEWER),apptainer' $(PY) tests/cluster/slurm -m 'apptainer or site' $(TEST_ARGS)
	$(MAKE) test-pyxis

test-pyxis: venv horovod ## on that Slurm in containers of a real pyxis, built from its forge or from the checkouts PYXIS_SOURCE and ENROOT_SOURCE
	@tests/cluster/slurm/packages.sh
	tests/cluster/slurm/pyxis.sh '$(PYXIS_PREFIX)'
	CLIPSHIP_PYXIS='$(PYXIS_PREFIX)' $(PY) -m pytest tests/cluster/slurm -m pyxis $(TEST_ARGS)

test-kubernetes: venv ## real MPIJobs, Jobs and TrainJobs on the cluster of KUBECONFIG, this machine a node of it; CLIPSHIP_IMAGE_OPENMPI4, _OPENMPI5 name images
	@tests/cluster/kubernetes/packages.sh
	$(PY) -m pytest tests/cluster/kubernetes -m 'kubernetes and not full' $(TEST_ARGS)

test-kubernetes-full: venv ## the same with every backend, Open MPI and user
	@tests/cluster/kubernetes/packages.sh
	$(PY) -m pytest tests/cluster/kubernetes -m kubernetes $(TEST_ARGS)

bench-cli: venv ## rendering a batch script, against TorchX (installed in an environment of its own); the last line is JSON
	@$(PY) -m benchmarks.cli

test-faults: venv horovod ## the table of faults with real processes: each fault, and each launcher, place and deed with another
	@$(PY) -m pytest --ignore=tests/cluster -p tests.support.faults -m 'fault and not full' $(PARALLEL) $(TEST_ARGS)

test-faults-full: venv horovod ## the same for every launcher, place and deed: an hour
	@$(PY) -m pytest --ignore=tests/cluster -p tests.support.faults -m fault $(PARALLEL) $(TEST_ARGS)

fuzz: venv ## 10,000 hostile job files through check, all renderers and submit without a cluster; `make test` tries 300
	@$(PY) -m pytest tests/unit/test_fuzz_jobs.py -m full -s $(TEST_ARGS)

bench-goodput: venv horovod ## runs with a fault in each minute, ours and open_clip_train's under torchrun, and their limits; an hour; the last line is JSON; BENCH_ARGS='--help'
	@$(PY) -m benchmarks.goodput $(BENCH_ARGS)

bench-install: venv ## install what a login node needs from a wheel, into a new environment: megabytes and seconds; the last line is JSON
	@$(PY) -m benchmarks.install $(BENCH_ARGS)

bench-start: venv ## seconds to the first line, the first step, the end and the answer to Ctrl-C, against open_clip_train's; the last line is JSON
	@$(PY) -m benchmarks.start $(BENCH_ARGS)

bench-step: venv ## a step on one CPU core against open_clip_train's, and Horovod's against DDP's on two ranks; the last line is JSON; BENCH_ARGS='--help'
	@$(PY) -m benchmarks.step $(BENCH_ARGS)

bench-learning: venv ## what a small CLIP learns of emoji in a style that it has not seen, against open_clip_train (needs npm); the last line is JSON; BENCH_ARGS='--help'
	@$(PY) -m benchmarks.learning $(BENCH_ARGS)

bench-hang: venv ## limits that ranks learn from their steps: false alarms, seconds until a stopped rank is named; the last line is JSON
	@$(PY) -m benchmarks.hang $(BENCH_ARGS)

bench-heartbeat: venv ## what the supervisors cost, with 125 and 1,250 nodes simulated here
	@$(PY) -m benchmarks.heartbeat

bench-generations: venv ## loses a node of 1,250 with 8 supervisors each, simulated here, and holds limits; what a run of that size writes and exchanges; the last line is JSON
	@$(PY) -m benchmarks.generations $(BENCH_ARGS)

bench-data: venv ## our loader against open_clip_train's on one core, and an index of 100 million samples; BENCH_ARGS='--help'
	@$(PY) -m benchmarks.data $(BENCH_ARGS)

bench-data-remote: venv ## our loader against open_clip_train's on shards behind a slow web server, and ours on a slow disk; the last line is JSON; BENCH_ARGS='--help'
	@$(PY) -m benchmarks.data_remote $(BENCH_ARGS)

gpu-kit: venv ## one folder that measures this project on a GPU machine without network: bash gpu-kit/check SECONDS; KIT_ARGS='--help'
	@$(PY) -m benchmarks.gpu_kit $(KIT_ARGS)

bench-gpu: venv ## a step of ours against open_clip_train's on one GPU, in turns, with MFU; the last line is JSON; BENCH_ARGS='--help'
	@$(PY) -m benchmarks.gpu $(BENCH_ARGS)

test-nullgpu: venv ## what a step asks of a GPU, on a stand-in for its driver that counts (needs gcc); NULLGPU=PATH names it
	@export PYTHON='$(PY)'
	'$(NULLGPU)' $(PY) -m pytest tests/nullgpu -m 'not full' $(PARALLEL) $(TEST_ARGS)
	'$(NULLGPU)' $(PY) -m pytest tests/gpu -m 'not computes' $(TEST_ARGS) # as far as a null GPU can

test-nullgpu-full: venv ## the same, and `make bench-gpu` as far as a null GPU can
	@export PYTHON='$(PY)'
	'$(NULLGPU)' $(PY) -m pytest tests/nullgpu $(TEST_ARGS)

test-gpu: venv horovod ## the tests that need a GPU
	@if ! $(PY) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
	    echo 'torch sees no GPU on this machine: the GPU tests were not run'
	    exit 0
	fi
	$(PY) -m pytest -m gpu $(TEST_ARGS)

demo: venv ## train a small CLIP on real images, show what it learned; DEMO_ARGS='--help'
	@$(PY) -m trainer.demo $(DEMO_ARGS)

parity: venv horovod ## the gradient on 1, 2 and 4 ranks, each backend, against one process
	@$(PY) -m tests.parity $(PARITY_ARGS)

reference: venv ## write docs/job-file.md, docs/cli.md and the JSON Schema from the code
	@$(PY) -m tools.reference

models-table: venv ## build and train each model of open_clip, or MODELS, on no memory; write the table of docs/models.md
	@PYTHONPATH="$(if $(OPEN_CLIP),$(realpath $(OPEN_CLIP)/src):)$$PWD" $(PY) -m tools.models_page $(MODELS)

docs: $(DOCS) ## build the pages of docs/ into site/; a broken link or a page that no menu names fails
	@NO_MKDOCS_2_WARNING=true $(DOCS_VENV)/bin/mkdocs build --strict --clean

$(DOCS): docs/requirements.txt
	@[[ -n '$(PYTHON)' ]] || { echo 'No Python >= 3.11 with the module venv was found' >&2; exit 2; }
	$(PYTHON) -m venv --clear $(DOCS_VENV)
	$(DOCS_VENV)/bin/pip install --disable-pip-version-check --quiet --require-hashes -r docs/requirements.txt
	touch $@

lock: ## pin the requirements anew: names, versions, hashes; LOCK_ARGS=--upgrade takes the newest
	@PYTHON='$(PYTHON)' docker/lock.sh $(LOCK_ARGS)

clean: ## remove .venv and the tools' caches; built wheels stay in the cache outside the checkout
	@rm -rf $(VENV) $(DOCS_VENV) site build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
