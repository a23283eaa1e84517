"""Write to a file what Snakemake makes of the Snakefile in this folder: the rules, and the libraries it took to parse them."""

import json
import sys
from pathlib import Path
from typing import Any

from snakemake.api import SnakemakeApi
from snakemake.settings.types import OutputSettings, ResourceSettings


def describe(rule: Any) -> dict[str, Any]:
    """Return what a reader may expect of a rule."""
    return {
        "norun": rule.norun,
        "docstring": rule.docstring,
        "message": rule.message,
        "log": [str(path) for path in rule.log],
        "benchmark": str(rule.benchmark or ""),
        "conda": str(rule.conda_env or ""),
        "script": str(rule.script or ""),
        "shell": rule.shellcmd,
        "output": [str(path) for path in rule.output],
    }


with SnakemakeApi(OutputSettings(dryrun=True)) as api:
    parsed = api.workflow(ResourceSettings(cores=1), snakefile=Path("Snakefile").resolve())
    rules = {rule.name: describe(rule) for rule in parsed._workflow.rules}

facts = {"rules": rules, "modules": sorted({name.split(".")[0] for name in sys.modules})}
Path(sys.argv[1]).write_text(json.dumps(facts))
