"""Turn recorded answers into training rows: ids and loss mask, from the engine's own ids.

INPUTS   results/{run}/generated/{shard}.parquet; results/{run}/model/manifest.json with tokenize.allow_template
OUTPUTS  results/{run}/tokenized/{shard}.parquet
"""


rule tokenize_shard:
    """Write input ids (prompt + response) and the loss mask (0 + 1) of every answer of one shard.

    The generate job's work in progress goes when its result has been read: until then a kill at the last moment loses
    nothing.
    """
    input:
        generated="results/{run}/generated/{shard}.parquet",
        model=(
            ancient("results/{run}/model/manifest.json")
            if config["tokenize"]["allow_template"]
            else []
        ),
    output:
        tokenized="results/{run}/tokenized/{shard}.parquet",
    log:
        "results/{run}/logs/tokenize_shard/{shard}.log",
    benchmark:
        "results/{run}/benchmarks/tokenize_shard/{shard}.tsv"
    retries: 0
    conda:
        "../../envs/cpu.yaml"
    threads: 2 if config["tokenize"]["allow_template"] else 1
    params:
        answered="results/{run}/.partial/generate/{shard}",
        max_length=config["tokenize"]["max_length"],
        min_loss_tokens=config["tokenize"]["min_loss_tokens"],
        truncated=config["generate"]["truncated"],
        allow_template=untracked(config["tokenize"]["allow_template"]),
        chat_template_kwargs=untracked(config["sampling"]["chat_template_kwargs"]),
        history_reasoning=untracked(config["generate"]["history_reasoning"]),
        fingerprint=FINGERPRINTS["tokenize"],
    message:
        "Tokenizing shard {wildcards.shard}"
    script:
        "../scripts/tokenize_shard.py"


rule tokenized:
    input:
        PREPARED,
        expand("results/{run}/tokenized/{shard}.parquet", run=RUN, shard=SHARDS),
    message:
        "All shards of run {config[run]} are tokenized"
