# make demo    the whole pipeline on the tiny world: window, atoms, rollouts, training, judgement
# make test    the default test suite
PYTHON ?= python3
RUN ?= runs/demo
SEED ?= 0
PY := .venv/bin/python
export HF_HUB_OFFLINE ?= 1

.PHONY: demo test bench lint tiny

demo: .venv/installed
	$(PY) 01_find_window.py --preset tiny --run $(RUN) --seed $(SEED)
	$(PY) 02_build_csg.py --preset tiny --run $(RUN) --seed $(SEED) --sample 400
	$(PY) 03_score_atoms.py --preset tiny --run $(RUN) --seed $(SEED)
	$(PY) 04_train_cast.py --preset tiny --run $(RUN) --seed $(SEED)
	$(PY) 05_eval.py --preset tiny --run $(RUN) --seed $(SEED)
	@echo "open $(RUN)/eval/report.html"

test: .venv/installed
	$(PY) -m pytest

bench: .venv/installed
	$(PY) tests/bench_pipeline.py

lint: .venv/installed
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

# Rebuilds the tiny world's models from nothing (tests/tiny/README.md says how long).
tiny: .venv/installed
	$(PY) tests/tiny/build.py --work runs/tiny

.venv/installed: requirements.txt
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@
