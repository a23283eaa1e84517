"""Cut the prompts into shards, once and the same on any machine.

INPUTS   prompts.path: a .jsonl, .jsonl.gz or .parquet file, or a directory of them
OUTPUTS  results/{run}/prompts/{shard}.parquet, manifest.json (counts, hashes), rejected.parquet (file, line, reason)
"""


rule shard_prompts:
    """Check every prompt, set bad ones aside with their reason, choose the canary, and write the shards."""
    input:
        source=ancient(config["prompts"]["path"]),
    output:
        shards=expand("results/{{run}}/prompts/{shard}.parquet", shard=SHARDS),
        manifest="results/{run}/prompts/manifest.json",
        rejected="results/{run}/prompts/rejected.parquet",
    log:
        "results/{run}/logs/shard_prompts.log",
    benchmark:
        "results/{run}/benchmarks/shard_prompts.tsv"
    retries: 0
    conda:
        "../../envs/cpu.yaml"
    params:
        shards=[shard for shard in SHARDS if shard != CANARY],
        canary=config["plan"]["canary"],
        assign=config["prompts"]["assign"],
        max_rejected=config["prompts"]["max_rejected"],
        limit=config["prompts"]["limit"],
        fingerprint=FINGERPRINTS["prompts"],
    message:
        "Cutting {input.source} into {config[prompts][shards]} shards, after {config[plan][canary]} prompts for the canary"
    script:
        "../scripts/shard_prompts.py"
