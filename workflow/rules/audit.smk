"""Judge every shard before anything expensive is done with it.

INPUTS   results/{run}/prompts/{shard}.parquet, generated/{shard}.parquet, tokenized/{shard}.parquet
OUTPUTS  results/{run}/audit/{shard}.json (evidence and verdict, always), audit/{shard}.approved (only on pass or waiver)
"""


rule audit_shard:
    """Write the evidence on one shard; bad data makes a bad verdict, never a failed job."""
    input:
        prompts="results/{run}/prompts/{shard}.parquet",
        generated="results/{run}/generated/{shard}.parquet",
        tokenized="results/{run}/tokenized/{shard}.parquet",
    output:
        evidence="results/{run}/audit/{shard}.json",
    log:
        "results/{run}/logs/audit_shard/{shard}.log",
    benchmark:
        "results/{run}/benchmarks/audit_shard/{shard}.tsv"
    retries: 0
    conda:
        "../../envs/cpu.yaml"
    params:
        limits=config["audit"]["limits"],
    message:
        "Auditing shard {wildcards.shard}"
    script:
        "../scripts/audit_shard.py"


rule approve_shard:
    """Let a shard pass, or stop with the worst reasons."""
    input:
        evidence="results/{run}/audit/{shard}.json",
    output:
        approved="results/{run}/audit/{shard}.approved",
    log:
        "results/{run}/logs/approve_shard/{shard}.log",
    benchmark:
        "results/{run}/benchmarks/approve_shard/{shard}.tsv"
    retries: 0
    conda:
        "../../envs/cpu.yaml"
    params:
        accept=config["audit"]["accept"],
        index="results/{run}/hidden_states/{shard}.parquet",
    message:
        "Approving shard {wildcards.shard}"
    script:
        "../scripts/approve_shard.py"


rule audited:
    input:
        PREPARED,
        expand("results/{run}/audit/{shard}.approved", run=RUN, shard=SHARDS),
    message:
        "All shards of run {config[run]} are approved"
