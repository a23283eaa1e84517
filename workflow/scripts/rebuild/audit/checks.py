"""The checks of the audit: each looks at the facts about a set of rows and says what it found.

Not the judge: limits are applied in `rebuild.audit.verdict`. Nothing here reads or writes a file, so the
same checks serve a shard, a whole run, or a data set from elsewhere.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import pandas as pd

from rebuild.audit.balance import Case, contradictions
from rebuild.audit.facts import HANDFUL, Facts, answered_rows

CASES = 10  # named as evidence
CASE_CHARS = 200
TWO_BLOCKS = (
    32  # tokens: DFlash's blocks are 16, and some trainers leave out rows with fewer than two
)
MOST_REPEATED = 0.5  # share of 8-grams; prose, code and tables stay under 0.3
MOST_COMPRESSED = 8.0  # times; the ids of prose are compressed about 1.5 times, of tables up to 4
UNREACHED = "conversation_ended"


@dataclass(frozen=True)
class Finding:
    """What a check found: `count` of `of` rows are affected, `what` says how, `cases` are the first ones.

    A check on a value has it as `value`, and as `bound` what chance allows it to be in the favour of the rows.
    """

    count: int
    of: int
    what: str
    cases: list[Case]
    value: float = math.nan
    bound: float = math.inf

    @property
    def seen(self) -> str:
        """The finding as a sentence."""
        return (
            f"{self.count} of {self.of} rows {self.what}" if math.isnan(self.value) else self.what
        )


@dataclass(frozen=True)
class Check:
    """One check of rows: its name in `audit.limits`, what is limited, the limit by default, and why it matters.

    "rows" and "share" are upper limits on the affected rows. What is found in parts of a set adds up. `find` returns
    None where the set lacks what it needs.
    """

    name: str
    kind: Literal["rows", "share"]
    default: float
    why: str
    find: Callable[[Facts], Finding | None]


def add_findings(findings: list[Finding]) -> Finding:
    """Return the finding on a set from those on its parts."""
    cases = [case for finding in findings for case in finding.cases]
    most = max(findings, key=lambda finding: finding.count)
    return Finding(
        sum(finding.count for finding in findings),
        sum(finding.of for finding in findings),
        most.what,
        cases[:CASES],
    )


def affected(rows: pd.DataFrame, of: int, what: str, template: str) -> Finding:
    """Return the finding that `rows` are `what`; `template` says of each, from its columns, what was seen."""
    records = rows.head(CASES).to_dict("records")
    texts = [template.format_map({str(k): v for k, v in row.items()}) for row in records]
    names = [str(row["sample_id"]) for row in records]
    cases = list(zip(names, (text[:CASE_CHARS] for text in texts), strict=True))
    return Finding(len(rows), of, what, cases)


def find_unbalanced(facts: Facts) -> Finding | None:
    """Every turn of every prompt has one row, in order, and every row is tokenized or accounted for."""
    if "user_turn" not in facts.answers:
        return None
    cases = contradictions(facts)
    prompts, answers, samples = len(facts.prompts), len(facts.answers), len(facts.samples)
    what = f"contradict each other ({prompts} prompts, {answers} answers, {samples} training rows)"
    return Finding(len(cases), max(prompts, answers, samples), what, cases[:CASES])


def find_errors(facts: Facts) -> Finding | None:
    """Rows that generation gave up."""
    if "error" not in facts.answers:
        return None
    rows = facts.answers[facts.answers["status"] == "error"]
    return affected(rows, len(facts.answers), "were given up", "{error}")


def find_skipped(facts: Facts) -> Finding | None:
    """Rows that could not be asked, being too long or invalid."""
    if "error" not in facts.answers:
        return None
    asked = facts.answers[~is_unreached(facts.answers)]
    rows = asked[asked["status"] == "skipped"]
    return affected(rows, len(asked), "were skipped", "{error}")


def find_unreached(facts: Facts) -> Finding | None:
    """Rows that were never asked because their conversation had ended before."""
    if "error" not in facts.answers:
        return None
    rows = facts.answers[is_unreached(facts.answers)]
    return affected(rows, len(facts.answers), "were out of reach", "{error}")


def is_unreached(answers: pd.DataFrame) -> "pd.Series[bool]":
    """Return for each row whether an earlier turn of its conversation put it out of reach."""
    ended = answers["error"].fillna("").str.startswith(UNREACHED)
    return (answers["status"] == "skipped") & ended.astype(bool)


def find_truncated(facts: Facts) -> Finding | None:
    """Answers that reached the token limit, or stopped without closing their thought."""
    if "finish_reason" not in facts.answers:
        return None
    answered = answered_rows(facts)
    rows = answered[(answered["status"] == "truncated") | (answered["finish_reason"] == "length")]
    counted = "{completion_tokens} tokens, " if "completion_tokens" in rows else ""
    template = counted + "finish_reason {finish_reason}"
    return affected(rows, len(answered), "are cut or never end their thought", template)


def find_dropped(facts: Facts) -> Finding | None:
    """Answers without a training row (truncated ones that the config leaves out are not counted)."""
    if "completion_tokens" not in facts.answers:
        return None
    answered = answered_rows(facts)
    if facts.counts.get("dropped", {}).get("truncated"):
        answered = answered[answered["status"] != "truncated"]
    rows = answered[~answered["sample_id"].isin(facts.samples["sample_id"])]
    template = "{prompt_tokens} prompt + {completion_tokens} answer tokens"
    return affected(rows, len(answered), "left no training row", template)


def find_empty_answers(facts: Facts) -> Finding | None:
    """Finished answers that say nothing."""
    if "kind" not in facts.answers:
        return None
    judged = facts.answers[facts.answers["kind"] != ""]
    rows = judged[judged["kind"] == "empty"]
    return affected(rows, len(judged), "have an empty answer", "answer {excerpt}")


def find_trivial_answers(facts: Facts) -> Finding | None:
    """Finished answers of a handful of tokens, without a thought."""
    if "kind" not in facts.answers:
        return None
    judged = facts.answers[facts.answers["kind"] != ""]
    rows = judged[judged["kind"] == "trivial"]
    what = f"have an answer of at most {HANDFUL} tokens and no thought"
    return affected(rows, len(judged), what, "answer {excerpt}")


def find_usage_mismatch(facts: Facts) -> Finding | None:
    """Ids and masks that are not, token for token, what the engine says that it was given and sampled.

    The ones begin right after the engine's prompt tokens, are as many as its completion tokens less
    what `max_length` cut off, and reach to the end of the row. The ids of the prompt, and those of an
    answer that was not cut off, are the engine's own.
    """
    if "completion_tokens" not in facts.answers:
        return None
    usage = facts.answers.drop_duplicates("sample_id")
    usage = usage[["sample_id", "prompt_tokens", "completion_tokens", "prompt_key", "response_key"]]
    samples = facts.samples[facts.samples["mask_origin"] == "engine"]
    rows = samples.merge(usage, on="sample_id", how="inner")
    whole = rows["prompt_tokens"] + rows["completion_tokens"]
    end = whole.clip(upper=facts.max_length)
    rows["same_prompt"] = rows["context_key"] == rows["prompt_key"]
    rows["same_answer"] = (rows["answer_key"] == rows["response_key"]) | (end < whole)
    wrong = rows[
        (rows["mask_first"] != rows["prompt_tokens"])
        | (rows["mask_sum"] != end - rows["prompt_tokens"])
        | (rows["seq_len"] != end)
        | ~(rows["same_prompt"] & rows["same_answer"])
    ]
    template = (
        "{mask_sum} supervised tokens from place {mask_first} on, {seq_len} in all; "
        "the engine counts {prompt_tokens} prompt + {completion_tokens} answer tokens "
        "(same prompt ids: {same_prompt}, same answer ids: {same_answer})"
    )
    return affected(wrong, len(rows), "have another mask or other ids than the engine's", template)


def find_malformed(facts: Facts) -> Finding:
    """Rows whose lengths contradict each other, or whose ids or mask hold impossible values."""
    rows = facts.samples
    longest = math.inf if facts.max_length is None else facts.max_length
    wrong = rows[
        (rows["seq_len"] < 1)
        | (rows["seq_len"] != rows["ids_len"])
        | (rows["seq_len"] != rows["mask_len"])
        | (rows["loss_tokens"] != rows["mask_sum"])
        | (rows["seq_len"] > longest)
        | (rows["mask_odd"] > 0)
        | (rows["ids_bad"] > 0)
    ]
    template = (
        "seq_len {seq_len}, {ids_len} ids ({ids_bad} of them negative), {mask_len} mask entries "
        "({mask_odd} neither 0 nor 1), loss_tokens {loss_tokens}, mask sum {mask_sum}"
    )
    return affected(wrong, len(rows), "contradict themselves", template)


def find_beyond_vocabulary(facts: Facts) -> Finding | None:
    """Training rows with ids that the model does not have."""
    if "ids_high" not in facts.samples:
        return None
    rows = facts.samples[facts.samples["ids_high"] > 0]
    what = "have ids beyond the model's vocabulary"
    return affected(rows, len(facts.samples), what, "{ids_high} of {ids_len} ids")


def find_scattered_masks(facts: Facts) -> Finding | None:
    """Rows that are one generation each, and have none or several runs of supervised tokens."""
    if "turn" not in facts.samples:
        return None
    rows = facts.samples[facts.samples["turn"] >= 0]
    wrong = rows[rows["mask_runs"] != 1]
    what = "have not exactly one run of supervised tokens"
    return affected(wrong, len(rows), what, "{mask_runs} runs, {mask_sum} supervised tokens in all")


def find_unpaired_masks(facts: Facts) -> Finding:
    """Rows without two neighbouring supervised tokens."""
    wrong = facts.samples[facts.samples["mask_longest"] < 2]
    what = "have no two neighbouring supervised tokens"
    return affected(wrong, len(facts.samples), what, "{mask_sum} supervised tokens of {seq_len}")


def find_wrong_ends(facts: Facts) -> Finding | None:
    """Rows that end with a stop token though the answer was cut, or without one though it stopped by itself.

    Also those whose stop token stands right behind the supervised tokens instead of being the last of them.
    """
    if facts.stop_ids is None:
        return None
    rows = facts.samples
    left_out = rows["after_id"].isin(facts.stop_ids) & ~rows["end_id"].isin(facts.stop_ids)
    if "finish_reason" in rows:
        told = rows["finish_reason"].isin(["stop", "tool_calls", "length"])
        whole = rows["seq_len"] < (math.inf if facts.max_length is None else facts.max_length)
        stopped = (rows["finish_reason"] != "length").fillna(False).astype(bool)
        wrong = told & whole & (stopped != rows["last_id"].isin(facts.stop_ids))
        left_out = left_out | wrong.astype(bool)
    else:
        rows = rows.assign(finish_reason="unknown")
    what = "end otherwise than their finish_reason says, or leave the stop token out"
    template = "finish_reason {finish_reason}, last supervised id {end_id}, then {after_id}"
    return affected(rows[left_out], len(rows), what, template)


def find_unprompted(facts: Facts) -> Finding:
    """Rows that are supervised from their very first token on."""
    rows = facts.samples
    wrong = rows[(rows["mask_first"] == 0) & (rows["mask_sum"] > 0)]
    template = "{mask_sum} of {seq_len} tokens are supervised, the first one among them"
    return affected(wrong, len(rows), "are supervised from their first token on", template)


def find_short_answers(facts: Facts) -> Finding:
    """Rows with fewer supervised tokens than two of DFlash's blocks."""
    rows = facts.samples[facts.samples["mask_sum"] < TWO_BLOCKS]
    what = f"have fewer than {TWO_BLOCKS} supervised tokens"
    return affected(rows, len(facts.samples), what, "{mask_sum} supervised tokens of {seq_len}")


def find_loops(facts: Facts) -> Finding:
    """Answers that repeat themselves: most of their 8-grams were said before, or they compress as only lists do."""
    rows = facts.samples
    wrong = rows[(rows["repetition"] > MOST_REPEATED) | (rows["compression"] > MOST_COMPRESSED)]
    if "excerpt" in facts.answers:
        excerpts = facts.answers.drop_duplicates("sample_id")[["sample_id", "excerpt"]]
        wrong = wrong.merge(excerpts, on="sample_id", how="left")
    else:
        wrong = wrong.assign(excerpt="")
    template = (
        "{repetition:.0%} of its 8-grams said before, compressed {compression:.1f} times; {excerpt}"
    )
    return affected(wrong, len(rows), "repeat themselves", template)


def find_asked_otherwise(facts: Facts) -> Finding | None:
    """Rows whose history holds other questions than their prompt asks."""
    return judged_by(
        facts, "asked_otherwise", "hold other questions than their prompt", "{excerpt}"
    )


def find_rendered_otherwise(facts: Facts) -> Finding | None:
    """Answers to a prompt that the chat template does not render from their messages."""
    return judged_by(
        facts, "difference", "have other prompt ids than the template renders", "{difference}"
    )


def find_says_otherwise(facts: Facts) -> Finding | None:
    """Answers whose ids decode to another text than was served."""
    what = "have ids that decode to another text than was served"
    return judged_by(facts, "says_otherwise", what, "served {excerpt}")


def find_stray_markers(facts: Facts) -> Finding | None:
    """Answers with a chat or thinking marker inside."""
    what = "have a marker of the conversation inside the answer"
    return judged_by(facts, "stray_marker", what, "{stray_marker} in {excerpt}")


def find_missing_thoughts(facts: Facts) -> Finding | None:
    """Finished answers without a thought, or with a blank one, where thinking is on."""
    if "thinks" not in facts.answers:
        return None
    rows = facts.answers[facts.answers["thinks"] & (facts.answers["status"] == "ok")]
    missing = rows[rows["thought_missing"]]
    return affected(missing, len(rows), "have no thought though thinking is on", "answer {excerpt}")


def find_other_scripts(facts: Facts) -> Finding | None:
    """Answers in another script than their question."""
    what = "are written in another script than their question"
    return judged_by(facts, "other_script", what, "{other_script}: {excerpt}")


def judged_by(facts: Facts, column: str, what: str, template: str) -> Finding | None:
    """Return the finding on answered rows by a column of flags or of words; None where nobody could judge it."""
    if column not in facts.answers:
        return None
    rows = answered_rows(facts)
    return affected(rows[rows[column].astype(bool)], len(rows), what, template)


def find_contaminated(facts: Facts) -> Finding | None:
    """Prompts that share a long run of words with the held-out list."""
    if "held_out" not in facts.answers:
        return None
    last = facts.answers.drop_duplicates("prompt_id", keep="last")  # has all that its prompt asks
    rows = last[last["held_out"] != ""]
    return affected(rows, len(last), "ask what the held-out list holds", "shared: {held_out}")


CHECKS = (
    Check(
        "unbalanced_rows",
        "rows",
        0,
        "A prompt that is lost, repeated or answered in another's place makes every later count wrong, "
        "and nothing downstream would notice.",
        find_unbalanced,
    ),
    Check(
        "malformed_rows",
        "rows",
        0,
        "Trainers read ids and mask side by side: lengths that differ or values that cannot be "
        "stop the training, or shift what is learnt.",
        find_malformed,
    ),
    Check(
        "usage_mismatch_rows",
        "rows",
        0,
        "The engine says what it was given and what it sampled: a mask or ids that differ supervise "
        "tokens that the model never said, or leave out some that it did.",
        find_usage_mismatch,
    ),
    Check(
        "empty_answer_share",
        "share",
        0.01,
        "An answer that says nothing teaches the drafter to draft nothing; more than a stray one "
        "means that template, parser and sampling do not fit the model.",
        find_empty_answers,
    ),
    Check(
        "trivial_answer_share",
        "share",
        0.1,
        "An answer of a handful of tokens without a thought fills less than one block of a drafter; "
        "many of them are how a model looks that refuses, or skips its thinking.",
        find_trivial_answers,
    ),
    Check(
        "truncated_share",
        "share",
        0.3,
        "A truncated answer never shows its end, and a truncated thought no answer at all: a high rate "
        "means that sampling.max_tokens is too small, or that the model loops.",
        find_truncated,
    ),
    Check(
        "error_share",
        "share",
        0.01,
        "Errors are what is left after all retries: above this the server or the settings are at fault, "
        "and the prompts that are missing are not a random selection.",
        find_errors,
    ),
    Check(
        "skipped_share",
        "share",
        0.05,
        "Skipped prompts are too long or invalid for this model: above this the prompts and the context "
        "length do not fit, and long conversations are under-represented.",
        find_skipped,
    ),
    Check(
        "unreached_share",
        "share",
        0.2,
        "A turn that is truncated, fails, or calls a tool whose result is unknown ends its conversation: "
        "above this the data hardly holds later turns.",
        find_unreached,
    ),
    Check(
        "dropped_share",
        "share",
        0.05,
        "Answers were paid for but leave no training row: above this tokenize.max_length or "
        "tokenize.min_loss_tokens does not fit the data.",
        find_dropped,
    ),
    Check(
        "foreign_id_rows",
        "rows",
        0,
        "Ids that the model does not have stop its forward pass, or worse, mean another tokenizer's "
        "words.",
        find_beyond_vocabulary,
    ),
    Check(
        "scattered_mask_rows",
        "rows",
        0,
        "A row is one generation, sampled in one go: a mask in pieces, or none, supervises what the "
        "model did not say, or nothing.",
        find_scattered_masks,
    ),
    Check(
        "unpaired_mask_rows",
        "rows",
        0,
        "SpecForge's loader stops the training at a row without two neighbouring supervised tokens.",
        find_unpaired_masks,
    ),
    Check(
        "unprompted_rows",
        "rows",
        0,
        "An answer has something ahead of it that it answers: a mask that begins with the row covers the prompt, or is "
        "the wrong way round.",
        find_unprompted,
    ),
    Check(
        "wrong_end_rows",
        "rows",
        0,
        "The drafter learns to end where the model ends: a stop token that is missing, or one that "
        "was added to a cut answer, teaches it another end.",
        find_wrong_ends,
    ),
    Check(
        "asked_otherwise_rows",
        "rows",
        0,
        "An answer in the row of another prompt teaches the drafter to answer another question, and "
        "no length or count shows it.",
        find_asked_otherwise,
    ),
    Check(
        "rendered_otherwise_rows",
        "rows",
        0,
        "Serving renders prompts with the template: hidden states of a prompt that was rendered "
        "otherwise are of a model that nobody serves.",
        find_rendered_otherwise,
    ),
    Check(
        "text_mismatch_rows",
        "rows",
        0,
        "The ids are what is trained on and the text is what was served: where they differ, one of "
        "them is not what the model said.",
        find_says_otherwise,
    ),
    Check(
        "stray_marker_share",
        "share",
        0.01,
        "A chat or thinking marker inside an answer means that the model ran on past its end, or that "
        "parser and template do not fit it.",
        find_stray_markers,
    ),
    Check(
        "missing_reasoning_share",
        "share",
        0.05,
        "A thinking target is served thinking: a drafter trained on answers without thoughts is "
        "accepted hardly more than by chance there.",
        find_missing_thoughts,
    ),
    Check(
        "short_answer_share",
        "share",
        0.25,
        "Rows under two blocks of a drafter (32 tokens) are read, paid for, and hardly learnt from; "
        "some trainers leave them out.",
        find_short_answers,
    ),
    Check(
        "looping_share",
        "share",
        0.3,
        "An answer that repeats itself without end teaches the drafter that repeating is what the "
        "model does; its acceptance looks splendid there and nowhere else.",
        find_loops,
    ),
    Check(
        "other_script_share",
        "share",
        0.05,
        "Answers in another script than their question are a model that lost the language, or ids "
        "decoded by another tokenizer.",
        find_other_scripts,
    ),
    Check(
        "contaminated_rows",
        "rows",
        0,
        "What the drafter is later measured on must not be in its training data "
        "(audit.decontaminate).",
        find_contaminated,
    ),
)
