# `make demo` and `make test` set themselves up: they need only Python 3.11 to 3.13 and a package index.
#
#   make demo       run a job through failures and verify that the result is bit-identical
#   make test       run what every change waits for, in at most 8 minutes: lint, types, import contracts, generated code, pure
#                   tests, and one test with real processes for each promise to users
#   make check      run what must hold besides before a merge: all other tests, of matrices a few cases
#   make times      print the slowest tests of the last `make test` and `make check`; ARGS=--files sums them by file
#   make simulate   run more of the simulation: make simulate SEEDS=20000, or SEED=17 to replay one
#   make faults     run the cases that make test and make check leave out, then real jobs under mixed faults for 50 minutes; each must
#                   end with the undisturbed bits
#   make cells      run every shape of cells with contexts or stages in 1 to 3 cells and stages 0 to 2, whatever befalls them
#   make outages    run jobs while etcd or the leading controller dies, freezes or is cut off, at every phase of a change
#   make fuzz       send 5,000 requests of schemathesis and 1,000 fuzzed sessions to a controller whose job trains on
#   make cluster    run the tests of pods and resources against the cluster that KUBECONFIG names, in namespaces of theirs;
#                   with NODES=fake also those that need nodes, which the tests bring; without KUBECONFIG those alone, in a cluster
#                   of the tests
#   make charts     render the chart with both helms over all files of values, and check every manifest
#   make models     train six models of Hugging Face with sharded parameters, and compare bits and generated tokens
#   make trainer    test the door for the Trainer of Hugging Face (make check does it too)
#   make trainer-upstream  run transformers' own tests of its Trainer with Shoal's in its place: FOLDER=a checkout of transformers
#   make scripts    run ten scripts before and after they were ported, in worlds of 1 to 3 and through a kill
#   make eight-bit  install bitsandbytes and torchao beside, and train by their 8-bit optimizers in every stage
#   make optimizers install CAME, pytorch_optimizer, timm and torch_optimizer beside, and train by those of whole tensors
#   make trackers   install Weights & Biases and MLflow beside, and keep one run in each through a worker's death
#   make test-gpu   run what needs a GPU, and measure a step there; says so where there is none
#   make quickstart type what the quick start says, in a fresh clone, up to a killed worker, and time it
#   make images     build both images and run the demo's job from them (root, Debian): buildah in a chroot, over a base by debootstrap
#   make versions   run the tests of make test with pairs of Python and PyTorch, from the oldest allowed to the newest tried, each in an
#                   environment of its own; VERSIONS="3.12-2.14" takes some. With CUDA builds of PyTorch they take 6 GB each
#   make same-as    compare fingerprints, transcripts and frozen lists with those of an older commit: COMMIT=…; ARGS=--measure
#                   compares steps and recoveries too
#   make mutants    break every rule of docs/rules.md in a copy, and report what no test notices; ARGS="--part 1/8"
#   make bench      measure for half an hour on a quiet machine, and write the tables of benchmarks/README.md; ARGS="--only
#                   memory" prints some
#   make goodput    compare Shoal, torchrun with DCP and torchft (installed beside) on traces of spot machines, 25 minutes on a quiet
#                   machine; ARGS="--rounds 3" takes three rounds, FOLDER=… keeps figures (JSON) and a picture
#   make protos     regenerate the code of protos/shoal_protos/session.proto
#   make formats    list what the formats of the wire, store and checkpoints are, in tests/unit/frozen/formats; RELEASE=0.1.0 notes that
#                   a release has them
#   make docs       regenerate pages of docs/ (phases, events, rules, controller, REST, command, configuration, chart) and what the chart
#                   has from the code: its values, the resource ElasticJob, the dashboards
#   make page       run all tests of the controller's page, and measure it with 100 jobs of 100 simulated workers
#   make page-pictures  take docs/pictures/page-*.png of a real run with a kill in it; needs chromium
#   make page-library  fetch the chart library of the controller's page from npm: VERSION=1.6.33 for another one
#   make site       build the documentation as a site, in .site
#   make pictures   draw docs/pictures/*.png of a real run; needs npm and chromium, and 650 MB of packages
#   make format     format all files as `make lint` expects them

PYTHON ?= $(shell for v in python3.11 python3.12 python3.13 python3; do $$v -c "" 2>/dev/null && echo $$v && exit; done)
VENV := .venv
CONSTRAINTS := constraints.txt
BIN := $(VENV)/bin
READY := $(VENV)/.ready
MODELS := $(VENV)/models/.ready
PACKAGES := nftables iproute2 chromium
PROMETHEUS := $(VENV)/prometheus/usr/bin/promtool

# The tests start hundreds of processes, each with two hundred of Shoal's modules: they are compiled once, whatever the
# machine's environment says.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup packages demo test check times static lint types imports generated unit whole pytest simulate faults cells outages fuzz cluster charts models trainer trainer-upstream scripts trackers eight-bit optimizers quickstart images versions test-gpu same-as mutants bench goodput protos formats docs site page page-pictures page-library pictures format clean

help:
	@sed -n 's/^#   //p' Makefile

setup: $(READY)

$(READY): pyproject.toml constraints.txt tests/charts/binaries.py
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 11) <= v <= (3, 13) or sys.exit(f"Shoal needs Python 3.11 to 3.13; {sys.executable} is {v[0]}.{v[1]}. Name another one: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[all]' --group dev
	$(BIN)/python tests/charts/binaries.py
	@touch $@

demo: $(READY)
	$(BIN)/shoal demo $(ARGS)

# Two at a time: types take one core, all else the other.
static: $(READY)
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target types lint imports generated

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python tests/mutants/check.py
	$(BIN)/python tests/commits.py

types: $(READY)
	$(BIN)/mypy
	$(BIN)/mypy --config-file benchmarks/mypy.ini benchmarks

imports: $(READY)
	$(BIN)/lint-imports

generated: $(READY)
	$(BIN)/python protos/generate.py --check

# Network namespaces and the browser of the tests; only root can install them, and only root can use the first. Prometheus is unpacked, not
# installed: its package would start a server.
packages: $(READY)
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! { command -v nft && command -v ip && command -v chromium; } >/dev/null; then \
		apt-get update -qq && apt-get install -y -qq --no-install-recommends $(PACKAGES) >/dev/null; \
	fi
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! [ -x $(PROMETHEUS) ] && ! command -v promtool >/dev/null; then \
		folder=$$(mktemp -d) && chmod 755 "$$folder" && apt-get update -qq \
		&& (cd "$$folder" && apt-get download -qq -o APT::Sandbox::User=root prometheus) \
		&& dpkg-deb --extract "$$folder"/prometheus_*.deb $(VENV)/prometheus && rm -r "$$folder"; \
	fi

# What each of the two runs: tests/tiers.py. Of many cases of one kind they run a few, `make faults` has the others:
# tests/matrices.py. Of unit tests what those of one group share, a site say, is made once. Of the others whole files go to a
# process, so that what a file's tests share, a cluster of etcd say, is started once; in the order of their names, as two
# long tests alone in a file would come last and leave a core idle; what is long and late by name is put first
# (tests/integration/conftest.py).
UNIT := -n 3 --dist loadgroup tests/unit
WHOLE := -n 3 --dist loadfile --no-loadscope-reorder tests/simulation tests/integration
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest
MADE = --junitxml=$(VENV)/times/$@-$(1).xml

test: $(READY) packages static
	$(PYTEST) -m 'not check and not matrix' $(call MADE,unit) $(UNIT) $(ARGS)
	$(PYTEST) -m 'not check and not matrix' $(call MADE,whole) $(WHOLE) $(ARGS)

check: $(READY) packages $(MODELS)
	$(PYTEST) -m 'check and not matrix' $(call MADE,unit) $(UNIT) tests/charts $(ARGS)
	$(PYTEST) -m 'check and not matrix' $(call MADE,whole) $(WHOLE) $(ARGS)
	$(WITH_MODELS) $(call MADE,trainer) tests/models/test_trainer*.py tests/models/test_trl.py $(ARGS)

times: $(READY)
	PYTHONPATH=tests $(BIN)/python -m times $(ARGS) $(wildcard $(VENV)/times/*.xml)

unit: $(READY) packages
	$(PYTEST) $(UNIT) tests/charts $(ARGS)

whole: $(READY) packages
	$(PYTEST) $(WHOLE) $(ARGS)

pytest: $(READY) packages
	OMP_NUM_THREADS=1 $(BIN)/pytest $(ARGS)

simulate: $(READY)
	$(BIN)/python -m tests.simulation.run $(if $(SEED),--replay $(SEED),--seeds $(or $(SEEDS),20000)) $(ARGS)

# Who repeats a round (ARGS) wants that round alone.
faults: $(READY) packages
	$(if $(ARGS),,SHOAL_EXAMPLES=all $(PYTEST) -m 'matrix or hypothesis' $(WHOLE) tests/unit)
	$(BIN)/python -m tests.faults.run --minutes $(or $(MINUTES),50) $(ARGS)

cells: $(READY)
	$(PYTEST) -m '' -n 3 tests/unit/test_matrix_of_cells.py $(ARGS)

outages: $(READY) packages
	SHOAL_OUTAGES=1 OMP_NUM_THREADS=1 $(BIN)/pytest tests/integration/test_etcd_faults.py tests/integration/test_etcd_links.py $(ARGS)

fuzz: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz.run $(if $(SEED),--seed $(SEED)) $(ARGS)

# What the tests' own API server does to these tests a proxy before the cluster does: tests/cluster_proxy.py.
CLUSTER := tests/charts/test_cluster.py tests/unit/test_elastic_jobs.py tests/unit/test_resource_storms.py
NAMESPACE ?= shoal-test-$(shell date +%s)
NAMESPACE := $(NAMESPACE)
KUBECTL = $(VENV)/kubernetes/helm4/kubectl --kubeconfig "$(abspath $(KUBECONFIG))"
WITH_NODES := tests/integration/test_kubernetes_job.py
ifeq ($(NODES),fake)
CLUSTER += $(WITH_NODES)
export SHOAL_CLUSTER_NODES := fake
endif
ifeq ($(KUBECONFIG)$(NODES),fake)
cluster: $(READY)
	SHOAL_CLUSTER_NAMESPACE=$(NAMESPACE) PYTHONPATH=tests $(BIN)/python -m served_cluster \
		$(MAKE) --no-print-directory cluster NODES=fake NAMESPACE=$(NAMESPACE) TESTS="$(or $(TESTS),$(WITH_NODES))"
else
cluster: $(READY)
	@[ -n "$(KUBECONFIG)" ] || { echo "make cluster needs a cluster in which it may make a namespace and the definition of ElasticJobs. Name it: make cluster KUBECONFIG=$$HOME/.kube/config" >&2; exit 2; }
	$(KUBECTL) apply --filename helm/shoal/crd/elasticjobs.yaml
	$(KUBECTL) get namespace $(NAMESPACE) --output name 2>/dev/null || $(KUBECTL) create namespace $(NAMESPACE)
	trap '$(KUBECTL) delete namespace $(NAMESPACE) --wait=false' EXIT; SHOAL_CLUSTER="$(abspath $(KUBECONFIG))" \
		SHOAL_CLUSTER_NAMESPACE=$(NAMESPACE) OMP_NUM_THREADS=1 $(BIN)/pytest $(or $(TESTS),$(CLUSTER)) $(ARGS)
endif

charts: $(READY) packages
	SHOAL_CHARTS=1 OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 tests/charts $(ARGS)

trackers: $(READY)
	$(BIN)/pip install --quiet --upgrade --target $(VENV)/trackers "wandb>=0.20,<1" "mlflow-skinny>=3,<4"
	PYTHONPATH=$(VENV)/trackers $(BIN)/pytest tests/trackers $(ARGS)

# Without what they need: torch is here, and may be no other.
eight-bit: $(READY)
	$(BIN)/pip install --quiet --upgrade --target $(VENV)/eight_bit --no-deps "bitsandbytes>=0.50,<1" "torchao>=0.18,<1"
	PYTHONPATH=$(VENV)/eight_bit OMP_NUM_THREADS=1 $(BIN)/pytest tests/eight_bit $(ARGS)

# As they are most often found; none but pytorch_ranger is needed by another.
optimizers: $(READY)
	$(BIN)/pip install --quiet --upgrade --target $(VENV)/optimizers --no-deps "came-pytorch>=0.1,<1" "pytorch-optimizer>=4,<5" \
		"pytorch-ranger>=0.1,<1" "timm>=1,<2" "torch-optimizer>=0.3,<1"
	PYTHONPATH=$(VENV)/optimizers:$(abspath tests/scripts/torchvision_without_cuda) OMP_NUM_THREADS=1 $(BIN)/pytest tests/real_optimizers $(ARGS)

# Apart from all else: what transformers needs starts threads when it is imported, and the other tests fork.
$(MODELS): $(READY)
	$(BIN)/pip install --quiet --upgrade --target $(VENV)/models "transformers>=5.20,<6"
	$(BIN)/pip install --quiet --upgrade --target $(VENV)/models --no-deps "accelerate>=1.10,<2" "peft>=0.17,<1" "diffusers>=0.40,<0.50" "trl>=1.16,<2"
	@touch $@

WITH_MODELS := PYTHONPATH=$(VENV)/models:$(abspath tests/scripts/torchvision_without_cuda) OMP_NUM_THREADS=1 $(BIN)/pytest -n 2
models: $(MODELS)
	$(WITH_MODELS) tests/models $(ARGS)

trainer: $(MODELS)
	$(WITH_MODELS) tests/models/test_trainer*.py $(ARGS)

# One of these tests' files wants a package that nothing else does.
trainer-upstream: $(MODELS)
	@[ -d $(VENV)/upstream/parameterized ] || $(BIN)/pip install --quiet --target $(VENV)/upstream "parameterized>=0.9,<1"
	@PYTHONPATH=$(abspath $(VENV)/models):$(abspath $(VENV)/upstream):$(abspath tests/scripts/torchvision_without_cuda):$(abspath tests) \
		OMP_NUM_THREADS=1 $(BIN)/python -m models.upstream "$(FOLDER)" $(ARGS)

# DeepSpeed is built without its kernels; the original of its script compiles one when it runs, and needs a C++ compiler.
scripts: $(READY) $(MODELS)
	@[ -d $(VENV)/deepspeed/deepspeed ] || { DS_BUILD_OPS=0 $(BIN)/pip install --quiet --no-build-isolation --no-deps --target $(VENV)/deepspeed "deepspeed>=0.18,<0.20" \
		&& $(BIN)/pip install --quiet --upgrade --no-deps --target $(VENV)/deepspeed hjson py-cpuinfo einops msgpack ninja tqdm; }
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m scripts.run $(ARGS)
	$(BIN)/python docs/generate/script_table.py

quickstart: $(READY)
	$(BIN)/python tests/quick_start.py $(ARGS)

images: $(READY)
	$(BIN)/python -m tests.images.run $(ARGS)

# An environment is removed once its tests have passed; its log stays beside it.
VERSIONS ?= 3.11-2.13 3.11-2.15 3.12-2.14 3.13-2.13 3.13-2.15
versions:
	@failed=0; for pair in $(VERSIONS); do \
		place=$(VENV)/versions/$$pair; mkdir -p $$place; \
		sed "s/^torch==.*/torch==$${pair#*-}.*/; /^torchvision==/d" constraints.txt > $$place/constraints.txt; \
		if $(MAKE) --keep-going unit whole VENV=$$place CONSTRAINTS=$$place/constraints.txt PYTHON=python$${pair%-*} \
			ARGS="-m 'not check and not matrix'" > $$place.log 2>&1; then verdict=passed; rm -r $$place; else verdict=FAILED; failed=1; fi; \
		echo "Python $${pair%-*}, PyTorch $${pair#*-}: $$verdict; $$(grep -E '^[0-9]+ (passed|failed)' $$place.log | tr '\n' ';') $$place.log"; \
	done; exit $$failed

test-gpu: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest -rs tests/gpu $(ARGS)
	$(BIN)/python benchmarks/gpu.py

same-as: $(READY)
	$(BIN)/python tests/same_as.py $(COMMIT) $(ARGS)

mutants: $(MODELS)
	$(BIN)/python -m tests.mutants.run $(if $(RULE),--rule "$(RULE)") $(ARGS)

bench: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/bench.py $(ARGS)

# torchft's telemetry wants another protobuf than the environment's: only torchft's processes see that folder. What cannot be installed
# leaves a line in place of its row.
PEERS = $(VENV)/peers
goodput: $(READY)
	@[ -d $(PEERS)/torchft ] || { $(BIN)/pip install --quiet --target $(PEERS) "opentelemetry-exporter-otlp-proto-http>=1.39,<2" \
		&& $(BIN)/pip install --quiet --target $(PEERS) --no-deps "torchft>=0.2,<0.3"; } || true
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/goodput.py $(if $(FOLDER),--json $(FOLDER)/goodput.json --picture $(FOLDER)/goodput.png) $(ARGS)

protos: $(READY)
	$(BIN)/python protos/generate.py

formats: $(READY)
	PYTHONPATH=tests $(BIN)/python tests/formats.py $(if $(RELEASE),--release $(RELEASE))

docs: $(READY)
	$(BIN)/python docs/generate/phases.py
	$(BIN)/python docs/generate/events.py
	$(BIN)/python docs/generate/controller.py
	$(BIN)/python docs/generate/rest.py
	$(BIN)/python docs/generate/rules.py
	$(BIN)/python docs/generate/script_table.py
	$(BIN)/python docs/generate/command.py
	$(BIN)/python docs/generate/chart.py
	$(BIN)/python docs/generate/elasticjob.py
	$(BIN)/python docs/generate/dashboards.py
	$(BIN)/python -m docs.generate.configuration > docs/configuration.md
	$(BIN)/python -m docs.generate.deepspeed > docs/deepspeed.md

page: $(READY) packages
	OMP_NUM_THREADS=1 $(BIN)/pytest -m '' tests/unit/test_page_files.py tests/integration/test_page*.py $(ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/page.py

page-pictures: $(READY) packages
	OMP_NUM_THREADS=1 $(BIN)/python docs/pictures/page_screens.py

page-library: $(READY)
	$(BIN)/python controller/page_library.py $(if $(VERSION),--version $(VERSION))

site: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

pictures: $(READY) packages
	OMP_NUM_THREADS=1 $(BIN)/python docs/pictures/draw.py

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf $(VENV) .site .mypy_cache .ruff_cache .hypothesis .import_linter_cache
