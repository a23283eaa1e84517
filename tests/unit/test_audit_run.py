"""The audit of a whole run: what its shards found adds up, and what repeats across shards is seen only there."""

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from audit_run import audit_run
from rebuild.audit.checks import CHECKS
from rebuild.audit.set_checks import SET_CHECKS
from rebuild.errors import StepError
from rebuild.files import read_json, write_json
from tests.support.real_shards import (
    Data,
    Said,
    Speaker,
    clean_data,
    converse,
    cut_short,
    long_talk,
    one_turn,
    prose,
    smollm2,
    unanswered,
    write_data,
)
from tests.support.shards import Shard, failed_checks

NAMES = ("00000", "00001", "00002")


@pytest.fixture(scope="module")
def smol(demo_model: Path) -> Speaker:
    return smollm2(demo_model)


@pytest.fixture(scope="module")
def parts(smol: Speaker) -> list[Data]:
    """Three parts of a run, each with a few answers that are cut, short, empty or missing."""
    made = []
    for number in range(3):
        part = clean_data(smol, 12 + number, seed=number, name=f"s{number}p")
        part += long_talk(smol, f"s{number}talk", turns=2 + number)
        part += cut_short(smol, f"s{number}cut", seed=number)
        part += unanswered(smol, f"s{number}error", "error", "HTTP 503")
        part += one_turn(smol, f"s{number}short", prose(random.Random(number), 3), Said("No."))
        made.append(part)
    return made


def audited(run: Path, name: str, data: Data, speaker: Speaker | None = None) -> Shard:
    """Write a shard and its evidence."""
    shard = write_data(run, data, name)
    shard.audit(speaker.target if speaker else None)
    return shard


def judged(
    run: Path, shards: list[Shard], accept: dict[Any, str] | None = None, **limits: float
) -> dict[str, Any]:
    """Run the real `audit_run` and return the evidence it wrote."""
    verdict = run / "audit" / "run.json"
    audit_run(
        [shard.evidence for shard in shards],
        [shard.digest for shard in shards],
        verdict,
        limits=limits,
        accept=accept or {},
    )
    evidence: dict[str, Any] = read_json(verdict)
    return evidence


def by_name(evidence: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in evidence["checks"]}


def test_three_shards_together_are_judged_as_the_same_rows_in_one_shard(
    tmp_path: Path, smol: Speaker, parts: list[Data]
) -> None:
    three = [audited(tmp_path, name, part, smol) for name, part in zip(NAMES, parts, strict=True)]
    together = audited(tmp_path, "00003", sum(parts, Data([], [])), smol)
    run, one = judged(tmp_path, three), read_json(together.evidence)
    assert run["rows"] == one["rows"]
    assert run["verdict"] == one["verdict"] == "pass"
    for check in [*CHECKS, *SET_CHECKS]:
        found, expected = by_name(run)[check.name], by_name(one)[check.name]
        for key in ("verdict", "value", "count", "of", "allowed", "limit", "severity"):
            assert found[key] == expected[key], f"{check.name}: {key}"
        if found["count"] <= 3:
            assert found["evidence"] == expected["evidence"]
    run["distribution"].pop("retokenization"), one["distribution"].pop("retokenization")
    assert run["distribution"] == one["distribution"]


def test_retokenization_adds_up_over_the_shards(
    tmp_path: Path, smol: Speaker, parts: list[Data]
) -> None:
    shards = [audited(tmp_path, name, part, smol) for name, part in zip(NAMES, parts, strict=True)]
    own = [read_json(shard.evidence)["distribution"]["retokenization"] for shard in shards]
    told = judged(tmp_path, shards)["distribution"]["retokenization"]
    for key in ("rows", "differing"):
        assert told[key] == sum(part[key] for part in own)


def test_a_run_that_was_audited_without_its_tokenizer_is_judged_as_far_as_its_shards_were(
    tmp_path: Path, parts: list[Data]
) -> None:
    shards = [audited(tmp_path, name, part) for name, part in zip(NAMES, parts, strict=True)]
    checks = by_name(judged(tmp_path, shards))
    assert checks["text_mismatch_rows"]["verdict"] == "not judged"
    assert checks["unbalanced_rows"]["verdict"] == "pass"


def test_empty_shards_change_nothing(tmp_path: Path, parts: list[Data]) -> None:
    shards = [audited(tmp_path, name, part) for name, part in zip(NAMES, parts, strict=True)]
    empty = audited(tmp_path, "00003", Data([], []))
    without = judged(tmp_path, shards)
    assert judged(tmp_path, [*shards, empty]) == without | {"shards": 4}
    assert judged(tmp_path, [empty])["verdict"] == "pass"


def test_shares_that_chance_explains_in_each_shard_are_caught_in_all_of_them(
    tmp_path: Path, smol: Speaker
) -> None:
    shards = []
    for name in [*NAMES, "00003", "00004", "00005"]:
        data = clean_data(smol, 17, seed=int(name), name=name)
        for place in range(3):
            data += unanswered(smol, f"{name}lost{place}", "skipped", "prompt_too_long: 9000")
        shards.append(audited(tmp_path, name, data))
        assert failed_checks(read_json(shards[-1].evidence)) == set()
    evidence = judged(tmp_path, shards)
    assert failed_checks(evidence) == {"skipped_share"}
    assert (by_name(evidence)["skipped_share"]["count"], evidence["rows"]["skipped"]) == (18, 18)


def test_prompts_that_are_nearly_the_same_in_different_shards_are_caught_there(
    tmp_path: Path, smol: Speaker
) -> None:
    first = clean_data(smol, 20, seed=1, name="a")
    second = clean_data(smol, 20, seed=2, name="b")
    for place, prompt in enumerate(first.prompts[:16]):
        asked = prompt["messages"][0]["content"] + " Please!"
        said = Said(prose(random.Random(f"c{place}"), 5))
        second += one_turn(smol, f"c{place}", asked, said)
    shards = [
        audited(tmp_path, name, data) for name, data in zip(NAMES, [first, second], strict=False)
    ]
    for shard in shards:
        assert failed_checks(read_json(shard.evidence)) == set()
    evidence = judged(tmp_path, shards)
    assert failed_checks(evidence) == {"near_duplicate_share"}
    check = by_name(evidence)["near_duplicate_share"]
    assert (check["count"], check["of"]) == (16, 56)
    assert check["evidence"][0] == {"sample_id": "c0_gen0", "seen": "asks nearly what a0_gen0 asks"}


def test_answers_that_are_the_same_in_different_shards_are_caught_there(
    tmp_path: Path, smol: Speaker
) -> None:
    """One shard has a row without training tokens: the keys of the others must not suffer from the gap."""
    shards = []
    for name in NAMES:
        fresh = clean_data(smol, 20, seed=int(name), name=name)
        data = Data([], [])
        for place, prompt in enumerate(fresh.prompts):
            data += converse(smol, prompt, [Said(prose(random.Random(place), 4 + place))])
        if name == NAMES[1]:
            data += unanswered(smol, "lost", "error", "HTTP 503")
        shards.append(audited(tmp_path, name, data))
        assert failed_checks(read_json(shards[-1].evidence)) == set()
    evidence = judged(tmp_path, shards)
    assert failed_checks(evidence) == {"repeated_answer_share"}
    check = by_name(evidence)["repeated_answer_share"]
    assert (check["count"], check["of"]) == (60, 60)
    assert check["evidence"][0]["seen"].startswith("3 prompts have the answer ")


def disaster(speaker: Speaker, name: str) -> Data:
    """Return 20 prompts that are all answered with one word."""
    data = Data([], [])
    for prompt in clean_data(speaker, 20, seed=9, name=name).prompts:
        data += converse(speaker, prompt, [Said("OK.")])
    return data


@pytest.mark.parametrize("key", ["00001", 1])
def test_what_failed_in_a_waived_shard_does_not_fail_the_run_again(
    tmp_path: Path, smol: Speaker, parts: list[Data], key: object
) -> None:
    shards = [
        audited(tmp_path, NAMES[0], parts[0]),
        audited(tmp_path, NAMES[1], disaster(smol, "ok")),
        audited(tmp_path, NAMES[2], parts[2]),
    ]
    failed = failed_checks(read_json(shards[1].evidence))
    assert failed == {
        "trivial_answer_share",
        "short_answer_share",
        "mask_sum_mode_share",
        "repeated_answer_share",
        "median_loss_tokens",
    }
    bad = judged(tmp_path, shards)
    assert failed_checks(bad) >= {"trivial_answer_share", "repeated_answer_share"}
    waived = judged(tmp_path, shards, accept={key: "short on purpose"})
    assert failed_checks(waived) == set()
    sound = judged(tmp_path, [shards[0], shards[2]])
    for name in failed:
        found, expected = by_name(waived)[name], by_name(sound)[name]
        assert (found["count"], found["of"]) == (expected["count"], expected["of"])
    assert waived["rows"] == bad["rows"]
    assert waived["distribution"] == bad["distribution"]


def test_a_waiver_does_not_hide_what_a_shard_shares_with_others(
    tmp_path: Path, smol: Speaker
) -> None:
    """Waived for its lengths alone, a shard is still searched for prompts of the others."""
    first = clean_data(smol, 20, seed=1, name="a")
    again = Data([], [])
    for place, prompt in enumerate(first.prompts):
        asked = prompt["messages"][0]["content"]
        again += one_turn(smol, f"b{place}", asked, Said(prose(random.Random(place), 5)))
    shards = [audited(tmp_path, NAMES[0], first), audited(tmp_path, NAMES[1], again)]
    accept = {NAMES[1]: "one topic", NAMES[0]: "never needed"}
    assert failed_checks(judged(tmp_path, shards, accept)) == {"near_duplicate_share"}


def test_a_run_of_nothing_but_waived_shards_passes_with_nothing_counted(
    tmp_path: Path, smol: Speaker
) -> None:
    shard = audited(tmp_path, NAMES[0], disaster(smol, "ok"))
    evidence = judged(tmp_path, [shard], accept={"00000": "a test"})
    assert evidence["verdict"] == "pass"
    check = by_name(evidence)["trivial_answer_share"]
    assert (check["verdict"], check["count"], check["of"]) == ("pass", 0, 0)


def test_the_evidence_is_strict_json_with_a_few_examples_of_every_shard(
    tmp_path: Path, parts: list[Data]
) -> None:
    shards = [audited(tmp_path, name, part) for name, part in zip(NAMES, parts, strict=True)]
    evidence = judged(tmp_path, shards)
    assert (evidence["schema_version"], evidence["shard"], evidence["shards"]) == ("2", "run", 3)
    shown = {example["sample_id"][:2] for example in evidence["examples"]}
    assert shown == {"s0", "s1", "s2"}
    text = (tmp_path / "audit" / "run.json").read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_a_limit_of_the_run_replaces_the_default_and_an_unknown_one_stops(
    tmp_path: Path, parts: list[Data]
) -> None:
    shards = [audited(tmp_path, NAMES[0], parts[0])]
    assert failed_checks(judged(tmp_path, shards, error_share=0)) == {"error_share"}
    with pytest.raises(StepError, match="did you mean 'error_share'"):
        judged(tmp_path, shards, errors_share=0)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_text("{"),
        lambda path: path.write_text("[]"),
        lambda path: write_json(path, read_json(path) | {"schema_version": "1"}),
        lambda path: write_json(path, {"shard": "00000", "verdict": "pass"}),
    ],
    ids=["cut off", "no object", "version 1", "keys missing"],
)
def test_evidence_of_a_shard_that_cannot_be_read_is_named_with_what_to_do(
    tmp_path: Path, parts: list[Data], damage: Any
) -> None:
    shard = audited(tmp_path, NAMES[0], parts[0])
    damage(shard.evidence)
    with pytest.raises(StepError, match="cannot read the audit's evidence") as stopped:
        judged(tmp_path, [shard])
    assert f"rm {shard.evidence}" in stopped.value.remedy
    assert not (tmp_path / "audit" / "run.json").exists()


def test_a_digest_that_is_cut_off_or_of_another_version_is_named_with_what_to_do(
    tmp_path: Path, parts: list[Data]
) -> None:
    shard = audited(tmp_path, NAMES[0], parts[0])
    pq.write_table(pa.table({"sample_id": ["a"]}), shard.digest)
    with pytest.raises(StepError, match="the digest of a shard is of another version") as stopped:
        judged(tmp_path, [shard])
    assert f"rm {shard.digest}" in stopped.value.remedy
    shard.digest.write_bytes(b"PAR1")
    with pytest.raises(StepError, match=r"cannot read the Parquet file .*00000\.parquet"):
        judged(tmp_path, [shard])
