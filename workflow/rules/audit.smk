"""Judge every shard before anything expensive is done with it.

INPUTS   results/{run}/prompts/{shard}.parquet, generated/{shard}.parquet, tokenized/{shard}.parquet, model/manifest.json
OUTPUTS  results/{run}/audit/{shard}.json (evidence and verdict, always), audit/{shard}.parquet (its rows in numbers),
         audit/{shard}.approved (only on pass or waiver); the same of the whole run: audit/run.json, audit/run.approved
"""


rule audit_shard:
    """Write the evidence on one shard; bad data makes a bad verdict, never a failed job."""
    input:
        prompts="results/{run}/prompts/{shard}.parquet",
        generated="results/{run}/generated/{shard}.parquet",
        tokenized="results/{run}/tokenized/{shard}.parquet",
        model=ancient("results/{run}/model/manifest.json"),
        canary=canary_digest,
        held_out=config["audit"]["decontaminate"] or [],
    output:
        evidence="results/{run}/audit/{shard}.json",
        digest="results/{run}/audit/{shard}.parquet",
    log:
        "results/{run}/logs/audit_shard/{shard}.log",
    benchmark:
        "results/{run}/benchmarks/audit_shard/{shard}.tsv"
    retries: 0
    conda:
        "../../envs/cpu.yaml"
    params:
        limits=config["audit"]["limits"],
        chat_template_kwargs=config["sampling"]["chat_template_kwargs"],
        history_reasoning=config["generate"]["history_reasoning"],
        held_out=held_out,
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
        withdrawn=["results/{run}/audit/run.approved", "results/{run}/export/{shard}.jsonl"],
    message:
        "Approving shard {wildcards.shard}"
    script:
        "../scripts/approve_shard.py"


rule audit_run:
    """Write the evidence on all shards together: what repeats across shards, sources, totals."""
    input:
        evidence=expand("results/{{run}}/audit/{shard}.json", shard=SHARDS),
        digests=expand("results/{{run}}/audit/{shard}.parquet", shard=SHARDS),
    output:
        evidence="results/{run}/audit/run.json",
    log:
        "results/{run}/logs/audit_run.log",
    benchmark:
        "results/{run}/benchmarks/audit_run.tsv"
    retries: 0
    conda:
        "../../envs/cpu.yaml"
    params:
        limits=config["audit"]["limits"],
        accept=config["audit"]["accept"],
    message:
        "Auditing run {wildcards.run}, all shards together"
    script:
        "../scripts/audit_run.py"


rule approve_run:
    """Let the run pass, or stop with the worst reasons."""
    input:
        evidence="results/{run}/audit/run.json",
        shards=expand("results/{{run}}/audit/{shard}.approved", shard=SHARDS),
    output:
        approved="results/{run}/audit/run.approved",
    log:
        "results/{run}/logs/approve_run.log",
    benchmark:
        "results/{run}/benchmarks/approve_run.tsv"
    retries: 0
    conda:
        "../../envs/cpu.yaml"
    params:
        accept=config["audit"]["accept"],
    message:
        "Approving run {wildcards.run}"
    script:
        "../scripts/approve_run.py"


rule audited:
    input:
        PREPARED,
        expand("results/{run}/audit/{shard}.approved", run=RUN, shard=[*SHARDS, "run"]),
    message:
        "All shards of run {config[run]} are approved"


rule audit_dataset:
    """Judge any tokenized data set: snakemake --cores 2 audit_dataset --config dataset=PATH. It succeeds only on pass.

    It declares no output (a benchmark would be one), so that it runs whenever it is asked for, and its evidence is kept
    also when it fails.
    """
    log:
        "results/{run}/logs/audit_dataset.log".format(run=RUN),
    retries: 0
    conda:
        "../../envs/cpu.yaml"
    threads: workflow.cores or 1
    params:
        dataset=lambda wildcards: config["dataset"],
        model=lambda wildcards: config["dataset_model"],
        evidence="results/{run}/audit_dataset.json".format(run=RUN),
        limits=config["audit"]["limits"],
    message:
        "Auditing the data set {params.dataset}"
    script:
        "../scripts/audit_dataset.py"
