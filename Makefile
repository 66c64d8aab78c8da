# make demo   everything from an empty machine to a word error rate, in minutes
# make test   the tests without the slow ones; make test-all   all of them, as CI
# Both make .venv themselves. uv installs the packages in a fifth of pip's time; where it is not on the
# PATH it is installed into .venv first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN ?= runs/demo
export MPLBACKEND := Agg
# Where this is set every start of Python compiles torch again, which costs the tests a minute.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: .venv demo test test-all lint clean

.venv: $(VENV)/demo.stamp

$(BIN)/python:
	@if command -v uv >/dev/null; then uv venv --quiet --allow-existing --python $(PYTHON) $(VENV); \
	else { $(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip install --quiet uv; } \
	    || { rm -f $(BIN)/python; exit 1; }; fi

$(VENV)/%.stamp: setup.cfg pyproject.toml | $(BIN)/python
	@echo "installing .[$*] into $(VENV)"
	@PATH="$$PATH:$(CURDIR)/$(BIN)" uv pip install --quiet --python $(BIN)/python -e '.[$*]'
	@touch $@

demo: $(VENV)/demo.stamp
	$(BIN)/python -m asr.train recipes/demo.yaml --run $(RUN) --resume
	$(BIN)/python -m asr.transcribe $(RUN) data/spoken_numbers/example.flac
	$(BIN)/python -m asr.evaluate $(RUN) --split test
	@echo "run:         $(RUN)"
	@echo "TensorBoard: $(BIN)/tensorboard --logdir $(dir $(RUN:%/=%))"

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

test: $(VENV)/test.stamp
	$(PYTEST) -m "not slow"

test-all: $(VENV)/test.stamp
	$(PYTEST)

lint: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) build *.egg-info
