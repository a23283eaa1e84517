"""Record the target's hidden states of approved samples, in the trainer's own format.

INPUTS   results/{run}/tokenized/{shard}.parquet, model/manifest.json; audit/{shard}.approved must be there (with
         audit.gate: run, audit/run.approved too)
OUTPUTS  results/{run}/hidden_states/{shard}.parquet (index), hidden_states/{shard}/*.ckpt (SpecForge, offline DFlash)

Approval and tokens are ancient: judging the same data again, or copying it with other dates, is no reason to extract
it again. Tokens that are made anew because they were removed are one.
"""


rule extract_hidden_states:
    """Run the approved samples of one shard through the target model and keep the wanted layers."""
    input:
        approved=paid(
            "results/{run}/audit/{shard}.approved", "results/{run}/hidden_states/{shard}.parquet"
        ),
        run=(
            paid("results/{run}/audit/run.approved", "results/{run}/hidden_states/{shard}.parquet")
            if config["audit"]["gate"] == "run"
            else []
        ),
        tokenized=ancient("results/{run}/tokenized/{shard}.parquet"),
        model=paid(
            "results/{run}/model/manifest.json", "results/{run}/hidden_states/{shard}.parquet"
        ),
    output:
        index="results/{run}/hidden_states/{shard}.parquet",
    log:
        "results/{run}/logs/extract_hidden_states/{shard}.log",
    benchmark:
        "results/{run}/benchmarks/extract_hidden_states/{shard}.tsv"
    conda:
        "../../envs/gpu.yaml"
    resources:
        gpu=1,
    params:
        folder=untracked("results/{run}/hidden_states/{shard}"),
        layers=untracked(config["hidden_states"]["layers"]),
        compute_dtype=untracked(config["hidden_states"]["dtype"]),
        max_length=untracked(config["hidden_states"]["max_length"]),
        devices=untracked(config["devices"]),
        fingerprint=FINGERPRINTS["hidden_states"],
    message:
        "Extracting the hidden states of shard {wildcards.shard} (progress: {log})"
    script:
        "../scripts/extract_hidden_states.py"


rule extracted:
    input:
        rules.audited.input,
        (
            expand("results/{run}/hidden_states/{shard}.parquet", run=RUN, shard=SHARDS)
            if config["hidden_states"]["enabled"]
            else []
        ),
    message:
        "All hidden states of run {config[run]} are extracted"
