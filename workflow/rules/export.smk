"""Write approved samples as JSONL that online trainers read as it is.

INPUTS   results/{run}/tokenized/{shard}.parquet; audit/{shard}.approved must be there (with audit.gate: run,
         audit/run.approved too)
OUTPUTS  results/{run}/export/{shard}.jsonl (SpecForge's online trainer, speculators' prepare-data)

Cheap, so dates decide: what is made or judged anew is exported anew. Were the shard's approval ancient, tokens that an
earlier start had made anew would not be: behind the audit that is then redone, Snakemake does not compare dates.
"""


rule export_shard:
    """Write one line per sample of one approved shard: its ids and its loss mask."""
    input:
        approved="results/{run}/audit/{shard}.approved",
        run=ancient("results/{run}/audit/run.approved") if config["audit"]["gate"] == "run" else [],
        tokenized="results/{run}/tokenized/{shard}.parquet",
    output:
        exported="results/{run}/export/{shard}.jsonl",
    log:
        "results/{run}/logs/export_shard/{shard}.log",
    benchmark:
        "results/{run}/benchmarks/export_shard/{shard}.tsv"
    retries: 0
    conda:
        "../../envs/cpu.yaml"
    message:
        "Exporting shard {wildcards.shard}"
    script:
        "../scripts/export_shard.py"


rule exported:
    input:
        rules.audited.input,
        expand("results/{run}/export/{shard}.jsonl", run=RUN, shard=SHARDS),
    message:
        "All shards of run {config[run]} are exported"
