"""Have the target model answer every prompt, on an SGLang server that each job starts for itself.

INPUTS   results/{run}/prompts/{shard}.parquet, results/{run}/model/manifest.json; audit/canary.approved must be there
OUTPUTS  results/{run}/generated/{shard}.parquet

Inputs are ancient: answers cost GPU-weeks, and no input's date or absence is a reason to make them again. What determines them is
in the recipe, which is checked when the Snakefile is read. No shard is begun before the canary, a sample of all prompts,
is approved (plan.canary); an approval that is given anew redoes nothing.
"""


rule generate_shard:
    """Answer the prompts of one shard; resumes at the sample where an earlier attempt ended."""
    input:
        prompts=paid(
            "results/{run}/prompts/{shard}.parquet", "results/{run}/generated/{shard}.parquet"
        ),
        model=paid("results/{run}/model/manifest.json", "results/{run}/generated/{shard}.parquet"),
        canary=ancient(canary_approval),
    output:
        generated="results/{run}/generated/{shard}.parquet",
    log:
        "results/{run}/logs/generate_shard/{shard}.log",
    benchmark:
        "results/{run}/benchmarks/generate_shard/{shard}.tsv"
    conda:
        "../../envs/gpu.yaml"
    resources:
        gpu=0 if config["server"]["external"] else config["server"]["tensor_parallel"],
    params:
        server=untracked(config["server"]),
        sampling=untracked(config["sampling"]),
        generate=untracked(config["generate"]),
        devices=untracked(config["devices"]),
        allow_template=untracked(config["tokenize"]["allow_template"]),
        partial=untracked("results/{run}/.partial/generate/{shard}"),
        server_logs=untracked("results/{run}/logs/server/{shard}"),
        stand_in=untracked(str(HOME / "envs" / "cpu" / "stand_in")),
        shard=shard_in_words,
        fingerprint=FINGERPRINTS["generate"],
    message:
        "Generating the answers of {params.shard} (progress: {log})"
    script:
        "../scripts/generate_shard.py"


rule generated:
    input:
        PREPARED,
        expand("results/{run}/generated/{shard}.parquet", run=RUN, shard=SHARDS),
    message:
        "All shards of run {config[run]} are generated"
