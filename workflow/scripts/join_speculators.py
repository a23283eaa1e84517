"""Join the shards of a run into the one data path that speculators' trainer takes."""

from collections.abc import Sequence
from pathlib import Path

from rebuild.formats.joined import join_shards
from rebuild.step import begin_step, say
from rebuild.tables import open_parquet


def join_speculators(indexes: Sequence[Path], joined: Path) -> None:
    """Make `joined` one data set of all rows, with the states `hs_<row>.safetensors` in its folder `hidden_states`.

    `indexes` are those of the shards' hidden states, in the order in which the rows are to come; each shard's files are
    in the folder of its index's name. The new data path holds links to them: it needs no room, and is of no use
    without them.

    Raises:
        StepError: a shard lacks its data set, or states of its rows, or its index cannot be read.
    """
    for index in indexes:
        open_parquet(index)  # one that is cut short is of a shard that is not whole
    rows = join_shards([index.with_suffix("") for index in indexes], joined)
    say(f"{joined}: {rows} rows of {len(indexes)} shards; give it to speculators as --data-path")


if __name__ == "__main__":
    begin_step(snakemake.log[0])
    join_speculators(
        indexes=[Path(index) for index in snakemake.input.indexes],
        joined=Path(snakemake.output.state).parent,
    )
