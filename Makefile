# The few verbs a person types. Everything they fetch or build stays inside this checkout: .venv, target,
# build and .cache; `make clean` removes them.
#
#   PYTHON=python3.12   the interpreter to build for (3.11 or newer)
#   ARGS=...            what `make demo`, `make bench`, `make conformance` and the tests pass on
#   SECONDS=...         how long `make soak` goes on
#   SLICE=NAME          another slice of the Python tests than the commit's (`all` of them)
#   PROFILE=edit        an engine that compiles in seconds and runs slower (`make build PROFILE=edit`)

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
SECONDS ?= 300
PROFILE ?= release
# Another slice of the tests than the commit's; `all` is all but what takes longest.
ifdef SLICE
export TPURUN_TEST_SLICE := $(SLICE)
endif
VENV := $(CURDIR)/.venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
PACKAGES := torch numpy scikit-build-core cmake ninja pytest ruff clang-format expecttest
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)

# Stamps live in what they vouch for: who deletes .venv deletes them, too.
VENV_READY := $(VENV)/.tpurun-venv
PACKAGES_READY := $(VENV)/.tpurun-packages
INSTALLED := $(VENV)/.tpurun-installed-$(PROFILE)
LINKED := $(VENV)/.tpurun-linked
PLOTS_READY := $(VENV)/.tpurun-plots
# Apart, so that nothing else can come to need it.
RAY := $(CURDIR)/.cache/ray
RAY_READY := $(RAY)/.tpurun-ray

# What has to be compiled, and what an interpreter reads as it is.
SOURCES := Cargo.toml Cargo.lock pyproject.toml $(wildcard README.md) $(shell find topology collectives runtime launcher \
	python/csrc python/library python/CMakeLists.txt -type f -not -path '*/tests/*' -not -name '*.so')
MODULES := $(shell find python/tpurun -not -path '*/__pycache__*' -not -name '*.so')

export CARGO_HOME := $(CURDIR)/.cache/cargo
export PIP_NO_CACHE_DIR := 1
export PIP_REQUIRE_VIRTUALENV := 1
# Cargo's own place last: rustup puts it on the PATH of the next login only.
export PATH := $(VENV)/bin:$(PATH):$(HOME)/.cargo/bin
# What an activated environment of somebody else's would smuggle in.
unexport PYTHONHOME PYTHONPATH VIRTUAL_ENV CARGO_TARGET_DIR

# One compiler for all: scikit-build-core names one, and cargo builds again what another one has built.
ifeq ($(origin CC),default)
export CC := gcc
endif
ifeq ($(origin CXX),default)
export CXX := g++
endif

PARTS := $(PYTHON) .ci/parts.py
# With the time, as each of them takes minutes.
say = @printf "%(%T)T tpurun: %s\n" -1 "$(1)"

.PHONY: help
help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 26

.PHONY: build
build: $(LINKED) ## set up everything: .venv with torch and tpurun (.venv/bin/tpurun); PROFILE=edit: in seconds
	$(call say,ready: . .venv/bin/activate && tpurun -n 8 your_script.py)

.PHONY: demo
demo: $(LINKED) ## train a small GPT on 64 ranks
	$(call say,training on 64 ranks: tpurun -n 64 examples/train.py $(ARGS))
	@tpurun -n 64 examples/train.py $(ARGS)

.PHONY: bench
bench: $(INSTALLED) $(PLOTS_READY) bench-tools ## everything beside Gloo and MPI, and overhead; writes docs/performance.md (ARGS=--help)
	@$(PY) -m tests.performance --out docs $(ARGS)
	@$(MAKE) --no-print-directory overhead ARGS=

.PHONY: overhead
overhead: $(LINKED) ## what device tpu costs beside CPU tensors; writes docs/overhead.md
	@$(PY) tests/performance/overhead.py --out docs/overhead.md $(ARGS)

.PHONY: fault-matrix
fault-matrix: $(LINKED) ## every fault in every operation on 2, 8 and 64 ranks, and (as root) of the network; writes docs/fault-matrix.md
	@$(PY) -m tests.fault_matrix --backend both --out docs/fault-matrix.md $(ARGS)
	@$(PY) -m tests.fault_matrix.endings --out docs/fault-matrix.md
	@$(PY) -m tests.fault_matrix.network --out docs/fault-matrix.md

.PHONY: many-ranks
many-ranks: $(LINKED) ## 64 to 512 ranks: how soon they are there, what they need, how they end; writes docs/many-ranks.md
	@$(PY) -m tests.performance.many_ranks --out docs/many-ranks.md $(ARGS)

LAUNCHER := tpurun
DEVICE := cpu
.PHONY: programs
programs: $(LINKED) ## DDP, FSDP2, DTensor, pipelines, .. against one process (LAUNCHER=tpurun|torchrun|spawn|hosts|nodes DEVICE=cpu|tpu|tpu:rank)
	@cd tests && $(PY) -m programs --launcher $(LAUNCHER) --device $(DEVICE) $(ARGS)

SEED ?= 0
PROGRAMS ?= 300
WAY ?= cpu
.PHONY: differential
differential: $(LINKED) ## PROGRAMS=300 random programs of collectives against numpy, from SEED=0 on (ARGS=--help)
	@$(PY) -m tests.differential --seed $(SEED) --programs $(PROGRAMS) $(ARGS)

# Others than the night before; what fails says how to repeat it.
.PHONY: op-programs
op-programs: $(LINKED) ## PROGRAMS=300 random programs of operations on device tpu against the CPU, from SEED=0 on (WAY=cpu|compiled|fused)
	@cd tests && TPURUN_DEVICE=1 $(PY) -m op_programs --way $(WAY) --programs $(PROGRAMS) --seed $(SEED) $(ARGS)

# Of what takes long, `make test` runs a slice.
.PHONY: full
full: $(LINKED) ## every test to its full extent, counted instructions, planted bugs, a busy machine; then make nightly
	@TPURUN_TEST_FULL=1 $(PARTS) test-rust test-loom test-python test-instructions planted-bugs test-under-load nightly

.PHONY: nightly
nightly: ## 10,000 random programs and networks, other ones every day; Slurm and Ray
	@PROGRAMS=10000 NETWORKS=10000 SEED=$$(date +%Y%m%d)0000 $(PARTS) differential op-programs simulation slurm ray

NETWORKS ?= 500
.PHONY: simulation
simulation: | tools ## NETWORKS=500 of several hosts in memory, with faults, from SEED=0 on
	@TPURUN_TEST_SEED=$(SEED) TPURUN_TEST_SEEDS=$(NETWORKS) cargo test --locked -p tpurun-engine --lib \
		network::tests::hosts::hosts_go -- --nocapture

# As root: it installs Debian's packages where they are missing.
.PHONY: slurm
slurm: $(LINKED) ## jobs under a real Slurm of four nodes on this machine
	@command -v slurmctld > /dev/null || apt-get install -y --no-install-recommends slurm-wlm slurmctld slurmd munge
	@$(PY) -m pytest tests/hosts/test_slurm.py $(ARGS)

# Two nodes need root, for network namespaces.
.PHONY: ray
ray: $(INSTALLED) $(RAY_READY) ## Ray Train on the backend, under a real Ray of one and of two nodes on this machine
	@PYTHONPATH=$(RAY) $(PY) -m pytest tests/hosts/test_ray.py $(ARGS)

# ARGS come last, so that they may choose other suites and start methods.
.PHONY: conformance
conformance: $(LINKED) ## PyTorch's own test suites on this backend; writes docs/conformance.md
	@$(PY) -m tests.conformance --starts all --out docs $(ARGS)
	@$(PY) -m tests.conformance --suites c10d,helpers --debug DETAIL --out docs

# One process, which takes half an hour; the page is of the same command.
.PHONY: conformance-ops
conformance-ops: $(LINKED) ## every operation, module and optimizer of device tpu against the CPU's; writes docs/conformance-ops.md
	@$(PY) -m tests.conformance.ops --out docs $(ARGS)

.PHONY: operations-in
operations-in: $(LINKED) ## every operation and module compiled, or fused with WAY=fused, against Strict
	@$(PY) -m tests.conformance.ops --way $(subst cpu,compiled,$(WAY)) --dtypes float32,int64,bfloat16 $(ARGS)

.PHONY: soak
soak: $(LINKED) ## SECONDS=300 of 64 ranks of random speed: no false alarm, every result right
	@tpurun -n 64 tests/faults/soak.py --seconds $(SECONDS) $(ARGS)

.PHONY: test
test: $(LINKED) ## Rust, models, Python and whole jobs: what is quick, and of the rest what the commit's hash chooses
	@$(PARTS) test-rust test-loom test-python

.PHONY: quick
quick: $(LINKED) ## lints, the launcher's and the planner's tests, and a minute of Python: before each commit
	@TPURUN_TEST_BUDGET_S=60 $(PARTS) check-python check-cpp test-units test-python

.PHONY: durations
durations: $(LINKED) ## measure how long each Python test takes, which `make test` chooses by; writes tests/durations.json
	@TPURUN_TEST_SLICE=all TPURUN_TEST_DURATIONS=tests/durations.json $(PY) -m pytest

TIMES ?= 10
.PHONY: test-under-load
test-under-load: $(LINKED) ## the tests TIMES=10 times beside eight busy processes: none of them may fail
	@$(PY) .ci/under_load.py $(TIMES)

.PHONY: check
check: ## format, lints, documentation, licences
	@$(PARTS) check-rust check-python check-cpp

.PHONY: clean
clean: ## remove everything that was built or fetched
	rm -rf .venv .cache build target
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- setting up -------------------------------------------------------------------------------------------

.PHONY: tools
tools:
	@missing=""; \
	command -v cargo > /dev/null || missing+=" cargo (https://rustup.rs);"; \
	command -v g++ > /dev/null || missing+=" g++ (apt-get install g++);"; \
	if ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; then \
		missing+=" Python 3.11 or newer as $(PYTHON) (or make PYTHON=...);"; \
	elif ! test -e "$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h"; then \
		missing+=" Python.h of $(PYTHON) (apt-get install python3-dev);"; \
	fi; \
	if [ -n "$$missing" ]; then echo "tpurun: missing:$${missing%;}" >&2; exit 1; fi

$(VENV_READY): | tools
	$(call say,creating .venv with $$($(PYTHON) --version))
	@$(PYTHON) -m venv --clear --without-pip $(VENV)
	@if $(PY) -c 'import ensurepip' 2> /dev/null; then $(PY) -m ensurepip --default-pip > /dev/null; \
	else $(PY) .ci/bootstrap_pip.py; fi
	@touch $@

$(PACKAGES_READY): constraints.txt $(VENV_READY)
	$(call say,installing torch $(TORCH) and the build tools into .venv (about 3 GB$(,) once))
	@$(PIP) install --constraint constraints.txt $(PACKAGES)
	@touch $@

$(PLOTS_READY): constraints.txt $(PACKAGES_READY)
	$(call say,installing matplotlib into .venv)
	@$(PIP) install --quiet --constraint constraints.txt matplotlib
	@touch $@

$(RAY_READY): constraints.txt $(PACKAGES_READY)
	$(call say,installing Ray into .cache/ray (about 600 MB))
	@rm -rf $(RAY)
	@$(PIP) install --quiet --constraint constraints.txt --target $(RAY) "ray[train]"
	@touch $@

# Without them the page says what was not measured.
BENCH_COMMANDS := mpicc.openmpi mpirun.openmpi mpicc.mpich mpirun.mpich valgrind
BENCH_PACKAGES := openmpi-bin libopenmpi-dev mpich libmpich-dev valgrind
.PHONY: bench-tools
bench-tools:
	@missing=""; \
	for name in $(BENCH_COMMANDS); do command -v $$name > /dev/null || missing+=" $$name"; done; \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
		echo "tpurun: installing $(BENCH_PACKAGES)"; \
		if apt-get -qq update && apt-get -qq install -y $(BENCH_PACKAGES) > /dev/null; then exit 0; fi; \
	fi; \
	echo "tpurun: going on without$$missing (apt-get install $(BENCH_PACKAGES))" >&2

, := ,

$(INSTALLED): $(SOURCES) $(PACKAGES_READY) | tools
	$(call say,compiling the engine and the launcher)
	@cargo build --profile $(if $(filter release,$(PROFILE)),library,$(PROFILE)) --locked --package tpurun-library
	@cargo build --profile $(PROFILE) --locked --package tpurun-launcher
	$(call say,compiling the torch extension and installing tpurun into .venv (about 2 minutes the first time))
	@SKBUILD_CMAKE_DEFINE=PROFILE=$(PROFILE) $(PIP) install --quiet --no-build-isolation --no-deps --force-reinstall .
	@rm -f $(VENV)/.tpurun-installed-* $(LINKED)
	@touch $@

$(LINKED): $(INSTALLED) $(MODULES)
	@$(PY) .ci/link_package.py
	@touch $@

# --- tests ------------------------------------------------------------------------------------------------

.PHONY: test-units
test-units: | tools ## the tests of the launcher and the planner, without the engine's
	@if cargo nextest --version > /dev/null 2>&1; then runner="nextest run"; else runner=test; fi; \
	cargo $$runner --locked -p tpurun-topology -p tpurun-launcher --lib --bins

.PHONY: test-rust
test-rust: | tools ## the crates
	$(call say,testing the crates)
	@if cargo nextest --version > /dev/null 2>&1; then \
		cargo nextest run --workspace --locked --no-fail-fast && cargo test --workspace --locked --doc; \
	else cargo test --workspace --locked; fi

# Optimised, because a model is run for every interleaving, but not for the last tenth, which takes minutes to compile;
# apart, because its flags would rebuild the rest.
.PHONY: test-loom
test-loom: | tools ## the models of the concurrent parts, in every order of their steps
	$(call say,checking the models of the concurrent parts)
	@RUSTFLAGS="--cfg tpurun_loom" LOOM_MAX_PREEMPTIONS=2 CARGO_TARGET_DIR=target/loom \
		CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 CARGO_PROFILE_RELEASE_DEBUG=0 \
		cargo test --package tpurun-memory --release --locked --lib loom

# The same on a busy machine, where times are not.
.PHONY: test-instructions
test-instructions: | tools ## count instructions of the hot paths, and compare them with those that are known
	$(call say,counting instructions)
	@$(PYTHON) .ci/instructions.py

# What a model has never caught it may not look at.
.PHONY: planted-bugs
planted-bugs: | tools ## plant bugs in the concurrent parts, one at a time: the models catch each (ARGS=FILE.rs)
	@$(PYTHON) .ci/planted_bugs.py $(ARGS)

.PHONY: test-python
test-python: $(LINKED) ## the backend, the device and whole jobs
	$(call say,testing the backend and whole programs)
	@$(PY) -m pytest $(ARGS)

# Ordinary tests run the same functions over the seeds, so that the targets can not rot.
SECONDS_EACH := 600
.PHONY: fuzz
fuzz: | tools ## feed hostile bytes to every parser, ten minutes each (SECONDS_EACH=, ARGS="TARGET ..")
	@.ci/fuzz $(SECONDS_EACH) $(ARGS)

# The flags would rebuild the rest, hence a target directory of its own.
.PHONY: bench-matching
bench-matching: | tools ## what comparing the operations of all ranks costs (ARGS="TURNS BLOCK_MS")
	$(call say,building the engine with and without match keys)
	@binary() { cargo bench --package tpurun-engine --locked --bench matching --no-run --message-format=json \
		| $(PYTHON) -c 'import json, sys; print([e for e in map(json.loads, sys.stdin) if e.get("executable")][-1]["executable"])'; }; \
	matched=$$(binary); \
	unmatched=$$(RUSTFLAGS="--cfg tpurun_unmatched" CARGO_TARGET_DIR=target/unmatched binary); \
	$(PYTHON) collectives/engine/benches/matching.py "$$matched" "$$unmatched" $(ARGS)

# --- checks -----------------------------------------------------------------------------------------------

.PHONY: check-rust
check-rust: | tools ## format, clippy, rustdoc, licences
	$(call say,checking Rust)
	@cargo fmt --all --check
	@cargo clippy --workspace --all-targets --locked -- -D warnings
	@RUSTDOCFLAGS="-D warnings" cargo doc --workspace --locked --no-deps --document-private-items
	@if cargo deny --version > /dev/null 2>&1; then cargo deny --locked check; \
	else $(PYTHON) .ci/check_crates.py; fi

.PHONY: floors
floors: ## what imports what: floors, circles, the most methods, long functions and files (ARGS=--check)
	@TIMEFORMAT="tpurun: read in %1R s"; time $(PYTHON) .ci/floors.py $(ARGS)

.PHONY: check-python
check-python: $(PACKAGES_READY) ## ruff, and what imports what
	$(call say,checking Python and imports)
	@$(PYTHON) .ci/floors.py --check
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .

.PHONY: check-cpp
check-cpp: $(PACKAGES_READY) ## clang-format
	$(call say,checking C++)
	@find python/csrc tests/performance -name "*.cpp" -o -name "*.[ch]" | xargs $(VENV)/bin/clang-format --dry-run -Werror
