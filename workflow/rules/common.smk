"""The names that every rules file uses: the checked configuration, the shards, fingerprints, the default device limit.

INPUTS   config/config.yaml with --configfile and --config on top; results/{run}/recipe.json of an earlier start
OUTPUTS  results/{run}/recipe.json, written before the first job of every start
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(workflow.basedir) / "workflow" / "scripts"))

from rebuild.start.config import complete_config, load_schema
from rebuild.serving.devices import device_limit
from rebuild.start.driver_lock import DriverLock
from rebuild.errors import StepError
from rebuild.files import sha256_file
from rebuild.start.recipe import check_recipe, fingerprints, make_recipe, record_recipe
from rebuild.shards import CANARY, awaits_canary, needed, shard_names
from rebuild.start.checks import check_start
from rebuild.start.states import settle_states
from rebuild.step import DRIVER_PID
from snakemake.io import apply_wildcards

HOME = Path(workflow.basedir)
os.environ[DRIVER_PID] = str(os.getpid())
DRIVER_LOCK = DriverLock(Path(".snakemake"))

try:
    config = complete_config(
        config, load_schema(HOME / "workflow" / "schemas" / "config.schema.yaml")
    )
    RESULTS, PROMPTS = Path("results", config["run"]), Path(config["prompts"]["path"])
    config["hidden_states"] = settle_states(
        config["hidden_states"], RESULTS / "model" / "manifest.json"
    )
    SHARDS = shard_names(config)
    RECIPE = make_recipe(config)
    if workflow.is_main_process:
        if not workflow.output_settings.dryrun and (other := DRIVER_LOCK.take_over()):
            logger.warning(
                f"Another Snakemake is at work here: {other}. Wait for it; --unlock is never needed."
            )
        check_recipe(RESULTS, RECIPE, PROMPTS)
        workflow.global_resources.setdefault("gpu", device_limit(config["devices"]))
        check_start(config, SHARDS, workflow.global_resources["gpu"].value, RESULTS)
except StepError as error:
    raise WorkflowError(error.describe()) from None

RUN = config["run"]
FINGERPRINTS = fingerprints(RECIPE)

# Every target asks for these by date: behind a job that is redone, Snakemake looks for missing files only along
# paths that are not wholly ancient.
PREPARED = expand(
    "results/{run}/{file}", run=RUN, file=["prompts/manifest.json", "model/manifest.json"]
)


def untracked(value):
    """Return a parameter whose change redoes nothing: Snakemake does not compare what a function of `input` returns.

    For expensive rules all that determines their data is in the parameter `fingerprint`; every other one is untracked.
    """

    def parameter(wildcards, input):
        return apply_wildcards(value, wildcards) if isinstance(value, str) else value

    return parameter


def paid(path, result):
    """Return an input of an expensive job: its date is no reason to make the result again, nor is its absence."""

    def paths(wildcards):
        return needed(*(apply_wildcards(pattern, wildcards) for pattern in (path, result)))

    return ancient(paths)


def canary_approval(wildcards):
    """Return the approval of the canary for a shard that waits for it."""
    if not awaits_canary(wildcards.shard, SHARDS):
        return []
    audit, generated = f"results/{wildcards.run}/audit", f"results/{wildcards.run}/generated"
    return needed(f"{audit}/{CANARY}.approved", f"{generated}/{wildcards.shard}.parquet")


def canary_states(wildcards):
    """Return the index of the canary's hidden states, whose ranges every other shard's are held against."""
    if not awaits_canary(wildcards.shard, SHARDS):
        return []
    folder = f"results/{wildcards.run}/hidden_states"
    return needed(f"{folder}/{CANARY}.parquet", f"{folder}/{wildcards.shard}.parquet")


def shard_in_words(wildcards, input):
    """Return how the message of a job names its shard; as a function of `input` it is not compared."""
    if wildcards.shard == CANARY:
        return "the canary, which all other shards wait for"
    return f"shard {wildcards.shard}"


def held_out(wildcards):
    """Return the list that no prompt may share, and its content: another one has every shard audited again."""
    path = config["audit"]["decontaminate"]
    return [path, sha256_file(Path(path))] if path and Path(path).is_file() else [path]


def canary_digest(wildcards):
    """Return the digest of the canary, which every other shard is compared with."""
    if CANARY not in SHARDS or wildcards.shard == CANARY:
        return []
    return f"results/{wildcards.run}/audit/{CANARY}.parquet"


wildcard_constraints:
    run=RUN.replace(".", "[.]"),
    shard="[0-9]{5}|canary",


onstart:
    DRIVER_LOCK.require()
    check_recipe(RESULTS, RECIPE, PROMPTS)  # again, for what a driver made that ended only now
    record_recipe(RESULTS, RECIPE)
