"""Record the target's hidden states of approved samples, in the trainers' own formats.

INPUTS   results/{run}/tokenized/{shard}.parquet, model/manifest.json; audit/{shard}.approved must be there (with
         audit.gate: run, audit/run.approved too); the index of the canary's states; beside them, where they are there,
         generated/{shard}.parquet and the canary's tables
OUTPUTS  results/{run}/hidden_states/{shard}.parquet (index) and hidden_states/{shard}/ (files for trainers); for
         speculators, which takes one data path, hidden_states/speculators/ (links to the files of all shards)

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
        canary=ancient(canary_states),
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
        gpu=config["server"]["tensor_parallel"],
    params:
        folder=untracked("results/{run}/hidden_states/{shard}"),
        run=untracked("results/{run}"),
        settings=untracked(config["hidden_states"]),
        server=untracked(config["server"]),
        sampling=untracked(config["sampling"]),
        devices=untracked(config["devices"]),
        server_logs=untracked("results/{run}/logs/server/{shard}-states"),
        stand_in=untracked(str(HOME / "envs" / "cpu" / "stand_in")),
        scratch=untracked("results/{run}/.partial/hidden_states/{shard}"),
        fingerprint=FINGERPRINTS["hidden_states"],
    message:
        "Extracting the hidden states of shard {wildcards.shard} (progress: {log})"
    script:
        "../scripts/extract_hidden_states.py"


rule join_speculators:
    """Join the shards' data sets of speculators' format into one, with links to their states."""
    input:
        indexes=expand("results/{run}/hidden_states/{shard}.parquet", run=RUN, shard=SHARDS),
    output:
        state="results/{run}/hidden_states/speculators/state.json",
    log:
        "results/{run}/logs/join_speculators.log",
    benchmark:
        "results/{run}/benchmarks/join_speculators.tsv"
    conda:
        "../../envs/cpu.yaml"
    message:
        "Joining the shards for speculators: {output.state}"
    script:
        "../scripts/join_speculators.py"


rule extracted:
    input:
        rules.audited.input,
        (
            expand("results/{run}/hidden_states/{shard}.parquet", run=RUN, shard=SHARDS)
            if config["hidden_states"]["enabled"]
            else []
        ),
        (
            expand(rules.join_speculators.output, run=RUN)
            if config["hidden_states"]["enabled"]
            and {"speculators", "speculators_fp8"}.intersection(config["hidden_states"]["formats"])
            else []
        ),
    message:
        "All hidden states of run {config[run]} are extracted"
