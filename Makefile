# Everything that is typed with make. `make` alone lists it.

KIND ?= $(shell if [ -e /dev/nvidiactl ] || nvidia-smi -L >/dev/null 2>&1; then echo gpu; else echo cpu; fi)
VENV := .venv
RUN := . $(VENV)/bin/activate && HF_HUB_OFFLINE=1
INSTALLED := $(VENV)/installed-$(KIND)
PIP := $(VENV)/bin/python -m pip install -qq --disable-pip-version-check
LOCKS := $(wildcard envs/$(KIND)/requirements*.txt)
CODE := workflow/scripts/rebuild
SCHEMA := workflow/schemas/config.schema.yaml
SMK := Snakefile $(wildcard workflow/rules/*.smk)

.PHONY: help venv demo test test-slow test-packages check config-docs dev clean

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 22

venv: $(INSTALLED) ## make .venv from the lock of envs/cpu, or of envs/gpu where there is an NVIDIA GPU

demo: venv ## run the whole workflow on the default configuration: real server, small model, no GPU needed
	@$(RUN) snakemake --cores all --resources gpu=4
	@echo "The demo run is complete. Its files, with the audit's evidence, are in results/demo/ (see README.md)."

test: dev test-packages ## run all tests but the slow ones
	@$(RUN) python -m pytest tests/unit tests/docs tests/workflow tests/faults tests/peers

test-slow: dev ## run the tests that download or take long
	@$(RUN) python -m pytest tests/slow

check: dev ## formats, lints, types, and the tests of documentation and schema
	@$(RUN) ruff check
	@$(RUN) ruff format --check
	@$(RUN) mypy --strict $(CODE)
	@$(RUN) snakefmt --check $(SMK)
	@$(RUN) snakemake --lint
	@$(RUN) python -m pytest -q tests/docs

config-docs: venv ## write config/README.md anew from the schema
	@$(RUN) PYTHONPATH=workflow/scripts python -m rebuild.config_reference $(SCHEMA) config/README.md

dev: $(VENV)/installed-dev ## add the tools for developing to .venv

test-packages: .cache/test-packages/installed .cache/peers/installed ## fetch the packages that only tests read

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

.cache/peers/installed: tests/peers/requirements.txt $(INSTALLED)
	@$(PIP) --no-deps --upgrade --target $(@D) -r $<
	@touch $@
