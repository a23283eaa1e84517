"""Whether the rows of a shard add up: prompts to generated, generated to tokenized, and what the files say of themselves."""

from collections import Counter

import pandas as pd

from rebuild.audit.facts import STATUSES, Facts, answered_rows

WHOLE = "(whole shard)"

Case = tuple[str, str]  # sample id, what was seen there


def contradictions(facts: Facts) -> list[Case]:
    """Return a case for everything that does not add up."""
    generated = facts.answers["sample_id"].tolist()
    tokenized = facts.samples["sample_id"].tolist()
    trained = set(tokenized).intersection(answered_rows(facts)["sample_id"])
    unknown = facts.answers[~facts.answers["status"].isin(STATUSES)]
    return [
        *(
            compare_order(expected_ids(facts), generated, "generated")
            or compare_turns(facts.answers)
        ),
        *compare_order([name for name in generated if name in trained], tokenized, "tokenized"),
        *((name, "has an unknown status") for name in unknown["sample_id"]),
        *compare_counts(facts),
    ]


def expected_ids(facts: Facts) -> list[str]:
    """Return the sample ids that the prompts call for, in order.

    One for each user turn, and one more for each tool call whose result was put to the model.
    """
    answers = facts.answers
    resumed = answers["prompt_id"][after_tool_result(answers)].value_counts().to_dict()
    return [
        f"{prompt}_gen{turn}"
        for prompt, user_turns in facts.prompts.items()
        for turn in range(user_turns + resumed.get(prompt, 0))
    ]


def after_tool_result(answers: pd.DataFrame) -> "pd.Series[bool]":
    """Return for each row whether it goes on, within the same user turn, after a tool call in the row before."""
    before = answers[["prompt_id", "user_turn", "status"]].shift()
    return (
        (answers["prompt_id"] == before["prompt_id"])
        & (answers["user_turn"] == before["user_turn"])
        & (before["status"] == "tool_calls")
    )


def compare_turns(answers: pd.DataFrame) -> list[Case]:
    """Return a case for every row that does not answer its prompt's next user turn."""
    due = (~after_tool_result(answers)).groupby(answers["prompt_id"]).cumsum()
    wrong = answers.assign(due=due)[answers["user_turn"] != due]
    return [
        (str(row["sample_id"]), f"answers user turn {row['user_turn']}, where {row['due']} was due")
        for row in wrong.to_dict("records")
    ]


def compare_order(expected: list[str], seen: list[str], kind: str) -> list[Case]:
    """Return a case for every id that is missing, unexpected or repeated, else for the first one out of place."""
    wanted, found = set(expected), Counter(seen)
    cases = [(name, f"not {kind}") for name in expected if name not in found]
    cases += [(name, f"{kind}, but not called for") for name in found if name not in wanted]
    cases += [(name, f"{kind} {count} times") for name, count in found.items() if count > 1]
    if not cases:
        pairs = zip(expected, seen, strict=False)
        cases = [(got, f"{kind} in the place of {name}") for name, got in pairs if got != name][:1]
    return cases


def compare_counts(facts: Facts) -> list[Case]:
    """Return a case for everything that the files' metadata say and the rows, or the files before them, contradict."""
    dropped: dict[str, int] = facts.counts.get("dropped", {})
    status = Counter(facts.answers["status"])
    told_and_seen = {
        "rows in": (facts.counts.get("in"), len(facts.answers)),
        "rows out": (facts.counts.get("out"), len(facts.samples)),
        "rows dropped": (sum(dropped.values()), len(facts.answers) - len(facts.samples)),
        "rows with status error": (dropped.get("status_error"), status["error"]),
        "rows with status skipped": (dropped.get("status_skipped"), status["skipped"]),
        **facts.origins,
    }
    return [
        (WHOLE, f"{what}: {told!r} by the metadata, but {seen!r}")
        for what, (told, seen) in told_and_seen.items()
        if told != seen
    ]
