# Every target installs what it needs. PYTHON may name another interpreter (3.11 or newer).
PYTHON ?= python3
VENV := .venv/bin
# Half of a start is compiling what is imported: it is kept, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=
# As in the image: what one thread frees, another uses.
export MALLOC_ARENA_MAX := 2

# pip and uv read different variables for a certificate authority and an index. A variable of one also serves the other.
CERTIFICATES := $(firstword $(PIP_CERT) $(SSL_CERT_FILE) $(REQUESTS_CA_BUNDLE))
INDEX := $(firstword $(PIP_INDEX_URL) $(UV_DEFAULT_INDEX))
ifneq ($(CERTIFICATES),)
export PIP_CERT := $(CERTIFICATES)
export SSL_CERT_FILE := $(CERTIFICATES)
endif
ifneq ($(INDEX),)
export PIP_INDEX_URL := $(INDEX)
export UV_DEFAULT_INDEX := $(INDEX)
endif

.PHONY: setup demo test quick debian-tests azurite browser prometheus slurm slurm-programs fault training kubernetes mutants screenshots check lint peers bench clean

# More workers than cores: many tests wait for processes, sockets and clocks.
PYTEST := $(VENV)/python -m pytest --dist worksteal -n 3

setup: .venv/.ready

.venv/.ready: requirements/setup.txt requirements/uv.txt pyproject.toml
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { apt-get update -q && apt-get install -qy --no-install-recommends python3-venv; }
	$(PYTHON) -m venv .venv
	$(VENV)/pip install -q --disable-pip-version-check --require-hashes -r requirements/uv.txt
	$(VENV)/uv pip install -q --python $(VENV)/python --require-hashes -r requirements/setup.txt
	$(VENV)/uv pip install -q --python $(VENV)/python --no-deps --no-build-isolation -e .
	@touch $@

# What only tests and linters need: not all of it can be had for each Python and processor that BDN runs on.
.venv/.tools: .venv/.ready requirements/dev.txt
	$(VENV)/uv pip install -q --python $(VENV)/python --require-hashes -r requirements/dev.txt
	@touch $@

# The AWS command line pins another botocore than aiobotocore does: it lives in an environment of its own, for tests.
.venv-aws/.ready: .venv/.ready requirements/aws.txt
	$(VENV)/uv venv -q --allow-existing --python $(VENV)/python .venv-aws
	$(VENV)/uv pip install -q --python .venv-aws/bin/python --require-hashes -r requirements/aws.txt
	@touch $@

# truss and the Python client of Baseten, whose pins are older than ours: tests run them against the job controller.
.venv-truss/.ready: .venv/.ready requirements/truss.txt
	$(VENV)/uv venv -q --allow-existing --python $(VENV)/python .venv-truss
	$(VENV)/uv pip install -q --compile-bytecode --python .venv-truss/bin/python --require-hashes -r requirements/truss.txt
	@touch $@

# The packages of the image alone: a test runs the wheel in this environment.
.venv-runtime/.ready: .venv/.ready requirements/runtime.txt
	$(VENV)/uv venv -q --allow-existing --python $(VENV)/python .venv-runtime
	$(VENV)/uv pip install -q --python .venv-runtime/bin/python --require-hashes -r requirements/runtime.txt
	@touch $@

# A real server of Azure's protocol, for tests, which are skipped where npm or its packages cannot be had. No script of a package runs.
azurite:
	@test -e .azurite/.ready -a .azurite/.ready -nt requirements/azurite/package-lock.json && exit; \
	mkdir -p .azurite && cp requirements/azurite/package*.json .azurite && \
	    timeout 300 npm ci --prefix .azurite --silent --ignore-scripts --no-audit --no-fund --fetch-retries=1 && \
	    node .azurite/node_modules/azurite/dist/src/blob/main.js --version >/dev/null && touch .azurite/.ready \
	        || echo "azurite cannot be installed here: its tests are skipped" >&2

# Chromium and axe-core, for tests of the operator's page, which are skipped where they cannot be had. No script of a package runs.
browser:
	@command -v chromium >/dev/null || \
	    { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -q && apt-get install -qy --no-install-recommends chromium; } \
	        || echo "Chromium cannot be installed here: its tests are skipped" >&2
	@test -e .browser/.ready -a .browser/.ready -nt requirements/browser/package-lock.json && exit; \
	mkdir -p .browser && cp requirements/browser/package*.json .browser && \
	    timeout 300 npm ci --prefix .browser --silent --ignore-scripts --no-audit --no-fund --fetch-retries=1 && touch .browser/.ready \
	        || echo "axe-core cannot be installed here: its tests are skipped" >&2

# Pictures of each view of the page, in docs/screenshots: made when a view changes, not by the tests.
screenshots: .venv/.tools browser
	$(VENV)/python -m tests.browser.screenshots

# promtool and Prometheus, for tests. The package is unpacked, not installed: installed, it starts a server that stays.
prometheus:
	@test -x .prometheus/usr/bin/promtool || { command -v promtool && command -v prometheus; } >/dev/null && exit; \
	{ [ "$$(id -u)" != 0 ] || apt-get update -q; } && rm -rf .prometheus && mkdir -p .prometheus && cd .prometheus && \
	    apt-get download -q prometheus && dpkg -x prometheus_*.deb . && rm prometheus_*.deb \
	        || echo "Prometheus cannot be unpacked here: its tests are skipped" >&2

# slurmctld, slurmd and munge, for tests. The packages are unpacked, not installed: installed, they start servers that stay.
SLURM := slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge libmunge2

slurm-programs:
	@test -e .slurm/.ready && exit; \
	{ [ "$$(id -u)" != 0 ] || apt-get update -q; } && rm -rf .slurm && mkdir -p .slurm/packages/partial && \
	    apt-get install -qy --download-only --reinstall --no-install-recommends -o Debug::NoLocking=1 -o Dir::Cache::archives=$$PWD/.slurm/packages $(SLURM) && \
	    for one in .slurm/packages/*.deb; do dpkg -x $$one .slurm || exit; done && rm -r .slurm/packages && touch .slurm/.ready \
	        || echo "Slurm cannot be unpacked here: its tests are skipped" >&2

# What we are measured against and with, as program:package. One that cannot be had is a row of the report that says so.
MEASURED := nginx:nginx-light fio:fio aria2c:aria2 ip:iproute2 tc:iproute2

peers: .venv/.ready
	@PATH="$$PATH:/usr/sbin:/sbin"; for one in $(MEASURED); do \
	    command -v $${one%:*} >/dev/null || { apt-get update -q && apt-get install -qy --no-install-recommends $${one#*:}; } \
	        || echo "$${one%:*} cannot be installed here" >&2; \
	done
	@$(MAKE) -s .venv-peers/.ready || echo "not all programs that we are measured against can be installed here" >&2

.venv-peers/.ready: .venv/.ready requirements/peers.txt
	$(VENV)/uv venv -q --allow-existing --python $(VENV)/python .venv-peers
	$(VENV)/uv pip install -q --python .venv-peers/bin/python --require-hashes -r requirements/peers.txt
	@touch $@

# Frameworks that write checkpoints, 1 GB of them: only `make training` installs them, and without them its tests are skipped.
# PyTorch stands in no lock: what an index has of it is the build for CUDA, with 4 GB of libraries. Where PIP_FIND_LINKS names a folder
# or a page that has a build for the CPU of that version (2.13.0+cpu), that one is taken.
.venv-training/.ready: .venv/.ready requirements/training.txt requirements/torch.in
	$(VENV)/uv venv -q --allow-existing --python $(VENV)/python .venv-training
	$(VENV)/uv pip install -q --compile-bytecode --python .venv-training/bin/python --require-hashes --no-deps -r requirements/training.txt
	$(VENV)/uv pip install -q --compile-bytecode --python .venv-training/bin/python \
	    $(addprefix --find-links ,$(PIP_FIND_LINKS)) -r requirements/torch.in
	@touch $@

demo: setup
	$(VENV)/python examples/demo.py $(DEMO)

# What tests need of Debian, as program:package: other file systems, a pooler in front of PostgreSQL, and a launcher of jobs.
TESTED := mkfs.xfs:xfsprogs mkfs.btrfs:btrfs-progs pgbouncer:pgbouncer bwrap:bubblewrap

debian-tests:
	@PATH="$$PATH:/usr/sbin:/sbin"; for one in $(TESTED); do \
	    command -v $${one%:*} >/dev/null && continue; \
	    [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -q && apt-get install -qy --no-install-recommends $${one#*:} \
	        || echo "$${one%:*} cannot be installed here: its tests are skipped" >&2; \
	done

test: .venv/.tools .venv-aws/.ready .venv-truss/.ready .venv-runtime/.ready debian-tests azurite browser prometheus
	$(PYTEST)

# What needs no service of its own: seconds after a change, it says whether the parts still do what they promise each other.
quick: .venv/.tools
	$(PYTEST) tests/unit tests/property tests/architecture tests/contract

# Every test of a promise, at full size: 10,000 restarts of the state machine, 300 kills of real processes, and the table of it all.
# Those of a mirror, and all journeys, also on PostgreSQL and a bucket.
fault: .venv/.tools debian-tests
	BDN_FAULT=full $(PYTEST) -m "promise or production" -o faulthandler_timeout=900

# Jobs of users on a real Slurm cluster of two nodes, in namespaces of its own: two minutes, root and Debian's packages.
slurm: .venv/.tools slurm-programs
	$(VENV)/python -m pytest tests/slurm

# Changes of one file that no test notices: make mutants FILE=node_agent/trust.py [OPTIONS='--count 40 --seed 1 --seconds 600'].
mutants: .venv/.tools
	@test -n "$(FILE)" || { echo "say which file: make mutants FILE=node_agent/trust.py" >&2; exit 2; }
	$(VENV)/python -m tests.mutation $(FILE) $(OPTIONS)

# Checkpoints as real frameworks write them, and a training that is killed with its node and resumed on another.
training: .venv/.tools .venv-training/.ready
	$(VENV)/python -m pytest -m training -s tests/e2e

# BDN on a real cluster of two nodes, with the programs that BDN_KUBERNETES_BIN names: tests/kubernetes/README.md.
kubernetes: .venv/.tools .venv-truss/.ready
	$(VENV)/python -m pytest -o faulthandler_timeout=1000 tests/kubernetes

lint: .venv/.tools
	sh requirements/lock.sh --check
	$(VENV)/ruff format --check -q .
	$(VENV)/ruff check -q .
	$(VENV)/mypy
	$(VENV)/lint-imports

# Lint and the demo, with 100 MB, run beside the tests. What they say is shown if they fail, so that the tests' summary comes last.
check: .venv/.tools .venv-aws/.ready .venv-truss/.ready .venv-runtime/.ready debian-tests azurite browser prometheus
	@said=$$(mktemp); { $(MAKE) -s lint && $(MAKE) -s demo DEMO=--shard-mib=6; } >$$said 2>&1 & beside=$$!; \
	$(PYTEST); tests=$$?; \
	wait $$beside || { cat $$said; echo "lint or demo failed: see above"; tests=1; }; \
	rm -f $$said; exit $$tests

bench: .venv/.tools peers
	$(VENV)/python -m bench

clean:
	rm -rf .azurite .browser .prometheus .slurm .venv .venv-aws .venv-truss .venv-runtime .venv-peers .venv-training .pytest_cache .mypy_cache .ruff_cache .hypothesis
