"""Make the page for people who would rather look.

INPUTS   results/{run}/audit/{shard}.json, audit/run.json; approvals, manifests, recipe and benchmarks are read if they are there
OUTPUTS  results/{run}/report.html, one self-contained file, also when shards failed their audit
"""

from functools import partial

from rebuild.report.inputs import evidence_to_report


rule make_report:
    """Write what the audit found as one page: verdict, checks, distributions, examples, times.

    It asks for all cores at the lowest priority, so that of the jobs of one start it is the last: the times of all
    phases are on it, and it is made also when other jobs failed.
    """
    input:
        evidence=partial(
            evidence_to_report, results=RESULTS, shards=SHARDS, accept=config["audit"]["accept"]
        ),
    output:
        report=report(
            "results/{run}/report.html",
            caption="../report/run_report.rst",
            category="Audit",
            labels={"run": "{run}"},
        ),
    log:
        "results/{run}/logs/make_report.log",
    benchmark:
        "results/{run}/benchmarks/make_report.tsv"
    priority: -1
    retries: 0
    conda:
        "../../envs/cpu.yaml"
    threads: workflow.cores or 1
    params:
        accept=config["audit"]["accept"],
        results=untracked("results/{run}"),
    message:
        "Making the report {output.report}"
    script:
        "../scripts/make_report.py"


rule report:
    input:
        expand("results/{run}/report.html", run=RUN),
    message:
        "The report of run {config[run]} is results/{config[run]}/report.html"
