"""ModelOpt's dumps for offline training: one `.pt` file per conversation, found by `rglob` and read with `weights_only`."""

from rebuild.formats.contents import Content, ids_and_mask, needed, side_by_side
from rebuild.formats.names import file_name
from rebuild.formats.needs import POST_NORM, PRE_NORM
from rebuild.states.captured import Captured
from rebuild.states.samples import Sample


def pt_path(sample_id: str, row: int) -> str:
    """Return the file's path in the shard's folder: the id's."""
    return file_name(sample_id, ".pt")


def conversation(sample: Sample, captured: Captured, include_last: str) -> Content:
    """Return ids and mask [S], `hidden_states` [S, H] after the final norm, `aux_hidden_states` [S, D·H], and the id.

    With `include_last: pre_norm` also `hidden_states_prenorm` [S, H].
    """
    content = ids_and_mask(sample) | {
        "conversation_id": sample.sample_id,
        "hidden_states": needed(captured.post_norm, POST_NORM),
        "aux_hidden_states": side_by_side(captured.taps),
    }
    if include_last == PRE_NORM:
        content["hidden_states_prenorm"] = needed(captured.pre_norm, PRE_NORM)
    return content
