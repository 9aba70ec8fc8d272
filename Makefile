# Two commands do all the set-up on a fresh machine: `make demo` and `make test`.
PY := .venv/bin/python

.PHONY: setup demo test lint format docs bench soak sim clean

setup:
	@sh deploy/setup.sh

demo: setup
	@$(PY) -m dynamo_elastic.cli.main demo

test: setup lint
	@$(PY) -m pytest

lint: setup
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy
	@.venv/bin/lint-imports

format: setup
	@.venv/bin/ruff check --fix .
	@.venv/bin/ruff format .

docs: setup
	@$(PY) -m dynamo_elastic.cli.reference

bench: setup
	@$(PY) benchmarks/cpu_scale.py

soak: setup
	@$(PY) benchmarks/protocol_soak.py

sim: setup
	@$(PY) benchmarks/protocol_sim.py

clean:
	rm -rf .venv .demo build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
