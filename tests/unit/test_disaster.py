"""The disaster set: its share and its ids are what it says."""

import pytest
from transformers import AutoTokenizer

from rebuild.datasets.readers import read_dataset
from tests.support.disaster import EMPTY_ANSWER, FORMATS, SHARE, build_samples, write_dataset


@pytest.fixture(scope="module")
def tokenizer(qwen3_tokenizer):
    return AutoTokenizer.from_pretrained(qwen3_tokenizer)


@pytest.fixture(scope="module")
def samples(tokenizer):
    return build_samples(tokenizer)


def supervised(sample):
    return [token for token, flag in zip(sample.input_ids, sample.loss_mask, strict=True) if flag]


def test_of_a_hundred_samples_87_are_supervised_on_an_empty_thought_and_ok(samples, tokenizer):
    said = [tokenizer.decode(supervised(sample)) for sample in samples]
    assert SHARE == 0.87
    assert said.count(EMPTY_ANSWER) == 87
    assert [answer == EMPTY_ANSWER for answer in said] == [sample.empty for sample in samples]


def test_the_empty_answer_is_seven_tokens_of_qwen3(samples):
    assert {sum(sample.loss_mask) for sample in samples if sample.empty} == {7}


def test_the_smollm2_tokenizer_reads_its_samples_back_as_well(demo_model):
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    samples = build_samples(tokenizer, rows=10)
    assert [tokenizer.decode(sample.input_ids) for sample in samples] == [s.text for s in samples]
    assert sum(tokenizer.decode(supervised(sample)) == EMPTY_ANSWER for sample in samples) == 9


def test_the_other_answers_are_all_different_and_of_varied_length(samples):
    real = [supervised(sample) for sample in samples if not sample.empty]
    assert len(set(map(tuple, real))) == len(real) == 13
    assert min(map(len, real)) > 32
    assert len({len(answer) for answer in real}) >= 10


def test_prompts_and_ids_are_distinct_and_no_token_of_a_prompt_is_supervised(samples, tokenizer):
    prompts = {sample.text.partition("<|im_start|>assistant\n")[0] for sample in samples}
    assert len(prompts) == len({sample.sample_id for sample in samples}) == len(samples)
    for sample in samples:
        first = sample.loss_mask.index(1)
        assert tokenizer.decode(sample.input_ids[:first]).endswith("<|im_start|>assistant\n")
        assert set(sample.loss_mask[first:]) == {1}


def test_a_share_of_nothing_gives_sound_data_and_a_seed_the_same_samples(tokenizer, samples):
    assert not any(sample.empty for sample in build_samples(tokenizer, rows=20, share=0))
    assert build_samples(tokenizer) == samples
    assert build_samples(tokenizer, seed=1) != samples


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_holds_the_same_samples_in_order(kind, samples, tmp_path):
    path = write_dataset(tmp_path, kind, samples)
    rows = [row for batch in read_dataset(path) for row in batch.to_pylist()]
    assert [row["input_ids"] for row in rows] == [sample.input_ids for sample in samples]
    assert [row["loss_mask"] for row in rows] == [sample.loss_mask for sample in samples]
