"""Training data for a speculative-decoding drafter, as its target model really answers.

prompts → generate → tokenize → audit → hidden states, one job per prompt shard; no expensive phase runs on data that
a cheap one could have condemned. Settings: config/README.md. How to run: README.md.
"""

from snakemake.utils import min_version

min_version("9.0")


configfile: "config/config.yaml"


include: "workflow/rules/common.smk"
include: "workflow/rules/model.smk"
include: "workflow/rules/prompts.smk"
include: "workflow/rules/generate.smk"
include: "workflow/rules/tokenize.smk"
include: "workflow/rules/audit.smk"
include: "workflow/rules/export.smk"
include: "workflow/rules/hidden_states.smk"
include: "workflow/rules/report.smk"


localrules:
    all,
    generated,
    tokenized,
    audited,
    exported,
    extracted,
    join_speculators,
    make_report,
    report,


rule all:
    default_target: True
    input:
        rules.extracted.input,
        rules.report.input,
    message:
        "Run {config[run]} is complete: results/{config[run]}/"
