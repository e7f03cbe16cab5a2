# make demo   set up, then run the whole chain once and say where the report is
# make test   set up, then check (format, lint, import contracts, types), run the unit tests and the
#             end-to-end tests that a change needs most: five minutes on two cores
# make test-all  `make test`, then the rest: browser, README, API fuzzing, controls, long runs
# make snapshots  write the texts under tests/snapshots again; look at the diff
# make bench  set up, then compare with what others use; BENCH=NAME takes one benchmark of them
# make bench-gpu  the decode step of an 8B model on a CUDA device, against the bytes that it reads
# make gpu    on a CUDA device: its tests, benchmarks and workloads in stages, in under 8 minutes, into
#             results/gpu/CARD with a table as README.md; STAGE="demo tests" takes some, STAGE=rest the
#             stages that are not good yet, STAGE=table writes the table again; REHEARSE=1: on the CPU, in 3
#             minutes; PYTHON=python3 takes that Python as it is, without installing anything
# make engines  install vLLM, llama.cpp, Dynamo, Triton and transformers, each into its own folder
#             (WALKAWAY_ENGINES, else ~/.cache/walkaway/engines), to be measured: docs/engines.md
# make matrix  measure each of them, its conformance and four runs, into results/engines: keep the
#             machine free for two hours; ENGINE="vllm triton" takes some, QUICK=1 the quick cases
# make gateways  install each gateway from its recipe, judge it twice with `walkaway conform
#             --upstream`, and write results/gateways/ with its matrix: an hour; GATEWAY="nginx
#             litellm" takes some
# make truth  set up, then measure servers whose truth is known; a table, exit status 1 on a miss
# make virtual  fit the simulation's lags to this machine, then measure live against simulated settings;
#             a table in results/virtual.md, exit status 1 on a miss: keep the machine free for
#             three quarters of an hour; TORCH=4 adds four settings with a model on the CPU
# make faults-table  measure what each fault of the engine moves, and write docs/faults.md
# make conform-faults  try each fault of the engine against the cases that it must turn red
# make conform-kinds  run `walkaway conform` on kinds of servers, clean and defective, of 4, 64 and 256
#             slots, and write docs/conform/kinds.md: keep the machine free for an hour; KIND="B1 B3"
#             takes some, SLOTS=4,64 other numbers, RUNS=20 BUSY=2 clean runs while processes are busy
# make conform-gateways  run `walkaway conform --upstream` on a scripted gateway with each of its
#             faults, and write docs/conform/gateways.md: a quarter of an hour
# make conform-docs  write docs/conform/*.md from the declarations of the cases
# make stream-docs  write the table in docs/streams.md from the streams that the tests send
# make gate-trials  try the gate on good builds and on bad ones, and write the table in docs/gate.md
# make docs   the pages of docs/ as a site, into site/
# make schemas  write docs/schemas from the records
# make pictures  take the pictures of the documents again; PICTURE=NAME takes one kind of them
# make clean  remove the virtual environment and the tools' caches (results stay)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/pip --disable-pip-version-check --quiet install --constraint constraints.txt
TORCH_VERSION := $(shell sed -n 's/^torch==//p' constraints.txt)
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
HAS_GPU := $(shell nvidia-smi -L 2>/dev/null | grep -c GPU)
SOURCES := harness reference_engine dashboards workloads tests tools

.PHONY: demo test test-all snapshots check unit bench bench-gpu engines gpu matrix gateways truth virtual faults-table conform-faults conform-kinds conform-gateways conform-docs stream-docs gate-trials docs schemas pictures clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed-demo
	$(BIN)/walkaway demo

test: $(VENV)/.installed-dev
	$(MAKE) --no-print-directory --jobs=2 check unit
	$(BIN)/pytest --numprocesses=auto --dist=loadfile -m "e2e and not (slow or alone or browser or table)"

test-all: test
	$(BIN)/pytest --numprocesses=auto --dist=loadfile -m "(slow or browser) and not table"
	$(BIN)/pytest -m alone tests/e2e tests/truth

snapshots: $(VENV)/.installed-dev
	SNAPSHOTS=write $(BIN)/pytest

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/lint-imports
	$(BIN)/mypy

unit: $(VENV)/.installed-dev
	$(BIN)/pytest --numprocesses=auto -m "not (e2e or slow or alone or browser or table)"

bench: $(VENV)/.installed-bench
	$(BIN)/python -m tools.bench $(BENCH)

bench-gpu: $(VENV)/.installed-demo
	$(BIN)/python -m tools.bench model_speed_gpu

ifeq ($(origin PYTHON),command line)
gpu:
	$(PYTHON) -m tools.gpu $(STAGE) $(if $(REHEARSE),--rehearse)
else
gpu: $(VENV)/.installed-gpu
	$(BIN)/python -m tools.gpu $(STAGE) $(if $(REHEARSE),--rehearse)
endif

engines: $(VENV)/.installed-demo
	@for engine in vllm llamacpp dynamo triton transformers; do $(BIN)/walkaway targets install $$engine || exit; done

matrix: $(VENV)/.installed-dev
	$(BIN)/python -m tools.engines_matrix $(ENGINE) $(if $(QUICK),--quick)

gateways: $(VENV)/.installed-dev
	$(BIN)/python -m tools.gateways_matrix $(GATEWAY) $(if $(QUICK),--quick)

truth: $(VENV)/.installed-dev
	$(BIN)/python -m tools.truth

virtual: $(VENV)/.installed-dev
	$(BIN)/python -m tools.truth.virtual --fit --twice --torch $(or $(TORCH),0) --markdown results/virtual.md

faults-table: $(VENV)/.installed-dev
	$(BIN)/python -m tools.truth.fault_cases

conform-faults: $(VENV)/.installed-dev
	$(BIN)/python -m tools.truth.conform_cases
	$(BIN)/pytest -m table

conform-kinds: $(VENV)/.installed-dev
	$(BIN)/python -m tools.truth.conform_kinds $(KIND) $(if $(SLOTS),--slots $(SLOTS)) --runs $(or $(RUNS),0) --busy $(or $(BUSY),0)

conform-gateways: $(VENV)/.installed-dev
	$(BIN)/python -m tools.truth.conform_gateways

conform-docs: $(VENV)/.installed-dev
	$(BIN)/python -m tools.truth.conform_docs

stream-docs: $(VENV)/.installed-dev
	$(BIN)/python -m tools.truth.stream_docs

gate-trials: $(VENV)/.installed-dev
	$(BIN)/python -m tools.gate_trials

pictures: $(VENV)/.installed-dev
	$(BIN)/python -m tools.pictures $(PICTURE)

docs: $(VENV)/.python
	@$(INSTALL) 'mkdocs-material>=9.5'
	$(BIN)/mkdocs build --quiet

schemas: $(VENV)/.installed-dev
	$(BIN)/python -m tools.schemas

clean:
	rm -rf site $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "walkaway needs Python 3.11 or newer; name one with: make $(MAKECMDGOALS) PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	touch $@

# Plain `torch` from the default index brings gigabytes of CUDA packages. Without a GPU the CPU build
# is taken: from wherever pip already looks, else from PyTorch's own index. What torch needs comes with
# walkaway, in the pinned versions, which that index may lack. (macOS has one build.)
$(VENV)/.torch: $(VENV)/.python constraints.txt
ifeq ($(shell uname -s)-$(HAS_GPU),Linux-0)
	@echo "installing torch $(TORCH_VERSION), CPU build"
	@$(INSTALL) --no-deps "torch==$(TORCH_VERSION)+cpu" 2>$(VENV)/torch.log || \
	  $(INSTALL) --no-deps torch --index-url $(TORCH_CPU_INDEX) || \
	  { cat $(VENV)/torch.log; exit 1; }
else
	@echo "installing torch $(TORCH_VERSION)$(if $(filter-out 0,$(HAS_GPU)), with CUDA: gigabytes)"
	@$(INSTALL) torch
endif
	@touch $@

$(VENV)/.installed-demo: $(VENV)/.torch pyproject.toml constraints.txt
	@echo "installing walkaway into $(VENV)"
	@$(INSTALL) --editable '.[load,engine,gpu,grpc,gguf]'
	@touch $@

$(VENV)/.installed-gpu: $(VENV)/.installed-demo
	@$(INSTALL) pytest pytest-timeout hypothesis
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.torch pyproject.toml constraints.txt
	@echo "installing walkaway and its checkers into $(VENV)"
	@$(INSTALL) --editable '.[load,engine,gpu,grpc,gguf,scale,dev]'
	@touch $@

$(VENV)/.installed-bench: $(VENV)/.torch pyproject.toml constraints.txt
	@echo "installing walkaway and what it is compared with into $(VENV)"
	@$(INSTALL) --editable '.[load,engine,gpu,grpc,bench]'
	@touch $@
