# Everything that is typed with make. `make` alone lists it.

KIND ?= $(shell if [ -e /dev/nvidiactl ] || nvidia-smi -L >/dev/null 2>&1; then echo gpu; else echo cpu; fi)
VENV := .venv
RUN := . $(VENV)/bin/activate && HF_HUB_OFFLINE=1
INSTALLED := $(VENV)/installed-$(KIND)
PIP := $(VENV)/bin/python -m pip install -qq --disable-pip-version-check
LOCKS := $(wildcard envs/$(KIND)/requirements*.txt)
CODE := workflow/scripts/rebuild
SCHEMA := workflow/schemas/config.schema.yaml
BENCHMARKS := measuring serving_rate client_ceiling startup_overlap tokenize_rate audit_rate capture_rate write_rate
SERVERS := tests/workflow/test_engine_states.py tests/workflow/test_production_config.py tests/workflow/test_devices_in_jobs.py \
	tests/workflow/test_server_process.py tests/workflow/test_server_rendering.py \
	tests/faults/test_server_faults.py tests/faults/test_external_servers.py tests/faults/test_kills.py \
	tests/faults/test_extraction_faults.py
TRAINING := tests/peers/test_drafter_training.py
BROWSER := $(shell command -v chromium || command -v chromium-browser || command -v google-chrome)
SMK := Snakefile $(wildcard workflow/rules/*.smk)
MASKS = $(or $(FILE),results/demo/tokenized/00000.parquet) $(if $(SAMPLES),--sample $(SAMPLES)) $(if $(HTML),--html $(HTML))

.PHONY: help venv demo masks verify test test-browser test-servers test-training test-slow test-packages check bench bench-faults config-docs dev clean

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 22

venv: $(INSTALLED) ## make .venv from the lock of envs/cpu, or of envs/gpu where there is an NVIDIA GPU

demo: venv ## run the whole workflow on the default configuration: real server, small model, no GPU needed
	@$(RUN) snakemake --cores all
	@echo "The demo run is complete. Open results/demo/report.html; all files are in results/demo/ (see README.md)."

masks: venv ## show what of a sample is trained on: FILE=results/…/00000.parquet SAMPLES="id …" HTML=page.html
	@$(RUN) python workflow/scripts/show_masks.py $(MASKS)

verify: venv ## compare every file of a run's hidden states with its checksum: RUN_FOLDER=results/demo
	@$(RUN) python workflow/scripts/verify_states.py $(or $(RUN_FOLDER),results/demo)

test: dev test-packages ## run all tests but the slow ones
	@$(if $(BROWSER),,echo "No Chromium here: tests/browser is left out. On Debian: apt-get install chromium")
	@$(RUN) python -m pytest tests/unit tests/docs tests/workflow tests/faults tests/peers \
		$(if $(BROWSER),tests/browser) $(addprefix --ignore=,$(SERVERS) $(TRAINING))

test-browser: dev ## run the tests that look at pages in headless Chromium
	@$(RUN) python -m pytest tests/browser

test-servers: dev test-packages ## run the tests of servers, faults, devices and the production example: many real servers, half an hour
	@$(RUN) python -m pytest $(SERVERS)

test-training: dev test-packages ## train drafters on the workflow's output and let them draft for the real model: 3 minutes
	@$(RUN) python -m pytest $(TRAINING)

test-slow: dev ## run the tests that download much
	@$(RUN) python -m pytest tests/slow

check: dev ## formats, lints, types, and the tests of documentation and schema
	@$(RUN) ruff check
	@$(RUN) ruff format --check
	@$(RUN) mypy --strict $(CODE)
	@$(RUN) snakefmt --check $(SMK)
	@$(RUN) snakemake --lint
	@$(RUN) python -m pytest -q tests/docs

bench: dev test-packages ## measure speed beside others' programs and write benchmarks/RESULTS.md (about 50 minutes)
	@$(RUN) sh -ec 'for part in $(BENCHMARKS); do python benchmarks/$$part.py; done' > .cache/RESULTS.md
	@mv .cache/RESULTS.md benchmarks/RESULTS.md

bench-faults: dev test-packages ## kill a real run a hundred times and compare its answers (an hour or more)
	@rm -rf .cache/kills
	@$(RUN) PYTHONPATH=workflow/scripts python -m tests.faults.kill_matrix .cache/kills 100

config-docs: venv ## write config/README.md anew from the schema
	@$(RUN) PYTHONPATH=workflow/scripts python -m rebuild.start.config_reference $(SCHEMA) config/README.md

dev: $(VENV)/installed-dev ## add the tools for developing to .venv

test-packages: .cache/test-packages/installed .cache/peers/installed .cache/bench-peers/installed ## fetch the packages that only tests read

clean: ## remove what these targets installed; results stay
	rm -rf $(VENV) .cache

$(INSTALLED): envs/make_venv.sh $(LOCKS)
	@sh envs/make_venv.sh $(VENV) $(KIND)
	@touch $@

$(VENV)/installed-dev: $(INSTALLED) envs/dev/requirements.txt
	@$(PIP) -r envs/dev/requirements.txt
	@touch $@

.cache/test-packages/installed: tests/support/requirements.txt $(INSTALLED)
	@$(PIP) --no-deps --upgrade --target $(@D) -r $<
	@touch $@

.cache/bench-peers/installed: benchmarks/requirements.txt $(INSTALLED)
	@$(PIP) --no-deps --upgrade --target $(@D) -r $<
	@touch $@

.cache/peers/installed: tests/peers/requirements.txt $(INSTALLED)
	@$(PIP) --no-deps --upgrade --target $(@D) -r $<
	@touch $@
