"""Prompts are read whole and in order, measured once, and whatever is wrong with the files is said at once."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import addition_rows, char_tokenizer, write_jsonl, write_parquet

from verl_lite.config import CustomClassConfig, DataConfig
from verl_lite.data import prompts
from verl_lite.data.dataset import PromptDataset, build_dataset, load_tokenizer
from verl_lite.data.files import read_messages


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(char_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def dataset(files: list[str], tokenizer: Any, **changes: Any) -> PromptDataset:
    options: dict[str, Any] = {
        "prompt_key": "prompt", "reward_fn_key": "data_source", "max_prompt_length": 16, "num_workers": 1,
        "filter_overlong_prompts": False, "truncation": "error", "max_samples": -1, "apply_chat_template_kwargs": {},
    }  # fmt: skip
    return PromptDataset(files, tokenizer, **{**options, **changes})


def row(question: str, **changes: Any) -> dict[str, Any]:
    made = {
        "prompt": [{"role": "user", "content": question}],
        "data_source": "verl_lite/addition",
        "reward_model": {"style": "rule", "ground_truth": "1"},
    }
    return {name: value for name, value in {**made, **changes}.items() if value != "ABSENT"}


def questions(data: PromptDataset) -> list[str]:
    return [data[i]["raw_prompt"][0]["content"] for i in range(len(data))]


def test_a_batch_has_its_prompts_by_token_and_by_name(tokenizer: Any, tmp_path: Path):
    data = dataset([write_parquet([row("1+2="), row("12+34="), row("123+456=")], tmp_path / "a.parquet")], tokenizer)
    batch = data.batch([0, 1], epoch=3)
    # Ids of the characters: the digits 2 … 11, "+" 12, "=" 16.
    assert len(batch) == 2
    columns = batch.non_tensor_batch
    assert columns["uid"].tolist() == ["3-0", "3-1"]
    assert columns["prompt_ids"].tolist() == [[3, 12, 4, 16], [3, 4, 12, 5, 6, 16]]
    assert columns["ground_truth"].tolist() == ["1", "1"]
    assert columns["data_source"].tolist() == ["verl_lite/addition"] * 2
    assert columns["raw_prompt"][0] == [{"role": "user", "content": "1+2="}]


def test_parquet_json_and_jsonl_give_the_same_rows(tokenizer: Any, tmp_path: Path):
    rows = addition_rows(5)
    (tmp_path / "a.json").write_text(json.dumps(rows))
    files = [
        write_parquet(rows, tmp_path / "a.parquet"), str(tmp_path / "a.json"), write_jsonl(rows, tmp_path / "a.jsonl"),
    ]  # fmt: skip
    first, *others = ([data[i] for i in range(5)] for data in (dataset([file], tokenizer) for file in files))
    assert others == [first, first]


def test_several_files_come_in_order_even_when_their_columns_differ(tokenizer: Any, tmp_path: Path):
    a = write_parquet([row(f"{i}") for i in range(3)], tmp_path / "a.parquet")
    b = write_parquet(
        [row(f"{i}", note="n", reward_model={"ground_truth": 7}) for i in range(3, 8)], tmp_path / "b.parquet"
    )
    data = dataset([a, b], tokenizer)
    assert questions(data) == [str(i) for i in range(8)]
    assert [data[2]["ground_truth"], data[3]["ground_truth"]] == ["1", 7]


def test_null_or_missing_extra_info_is_an_empty_dict(tokenizer: Any, tmp_path: Path):
    rows = [row("1", extra_info={"index": 5}), row("2", extra_info=None), row("3")]
    data = dataset([write_parquet(rows, tmp_path / "a.parquet")], tokenizer)
    assert data.batch([0, 1, 2], 0).non_tensor_batch["extra_info"].tolist() == [{"index": 5}, {}, {}]


@pytest.mark.parametrize(
    "rows, options, message",
    [
        ([row("1", reward_model="ABSENT")], {}, "a.jsonl has no column 'reward_model'"),
        ([row("1", data_source="ABSENT")], {}, r"no column 'data_source' \(named by data.reward_fn_key\)"),
        ([row("1")], {"prompt_key": "question"}, r"no column .question. \(named by data.prompt_key\); its columns"),
        ([row("1"), row("2", prompt=None)], {}, "a.jsonl, row 1: column 'prompt' .* is null"),
        ([row("1", reward_model={"style": "rule"})], {}, "row 0: column 'reward_model' has no field 'ground_truth'"),
        ([row("1", prompt=[{"role": "user"}])], {}, "row 0, column 'prompt': expected text"),
        ([row("1", prompt=[{"role": "user", "content": [{"type": "image"}]}])], {}, "only text parts are supported"),
        ([], {}, "no rows in"),
        ([row("")], {}, "row 0 of .* without a single token"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_named(rows: list, options: dict, message: str, tokenizer: Any, tmp_path: Path):
    with pytest.raises(ValueError, match=message):
        dataset([write_jsonl(rows, tmp_path / "a.jsonl")], tokenizer, **options)


def test_unreadable_files_are_named(tokenizer: Any, tmp_path: Path):
    (tmp_path / "a.csv").write_text("x")
    (tmp_path / "b.json").write_text("{")
    (tmp_path / "c.parquet").write_text("nonsense")
    for name, message in {
        "none.parquet": "none.parquet does not exist", "a.csv": "a.csv is none of .parquet", "b.json": "not valid json",
        "c.parquet": "c.parquet is not a readable parquet file",
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=message):
            dataset([str(tmp_path / name)], tokenizer)


@pytest.mark.parametrize(
    "prompt, text",
    [
        ("2+2=", "2+2="),
        ([{"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "2="}]}], "2+2="),
        (np.array([{"role": "user", "content": "2+2="}], dtype=object), "2+2="),
        ([{"role": "user", "content": "2+2=", "tool_calls": None}], "2+2="),
    ],
    ids=["string", "text parts", "numpy array", "null field"],
)
def test_prompts_in_other_forms_become_messages(prompt: Any, text: str):
    assert read_messages(prompt) == [{"role": "user", "content": text}]


def test_too_long_prompts_are_dropped_and_counted(tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    file = write_parquet([row("1" * n) for n in (3, 9, 4, 8)], tmp_path / "a.parquet")
    with caplog.at_level(logging.INFO):
        data = dataset([file], tokenizer, max_prompt_length=8, filter_overlong_prompts=True)
    assert [len(q) for q in questions(data)] == [3, 4, 8]
    expected = "4 prompts of 3–9 tokens; 1 longer than data.max_prompt_length=8 dropped, 3 left"
    assert caplog.messages == [f"{tmp_path.name}/a.parquet: {expected}"]
    # The uid is the place in the files: the filter does not change which prompt a uid names.
    assert data.batch([1], 0).non_tensor_batch["uid"].tolist() == ["0-2"]


def test_where_all_prompts_fit_their_number_and_length_are_all_it_says(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    file = write_parquet([row("1" * 6)] * 2, tmp_path / "a.parquet")
    with caplog.at_level(logging.INFO):
        dataset([file], tokenizer, max_prompt_length=8)
    assert caplog.messages == [f"{tmp_path.name}/a.parquet: 2 prompts of 6 tokens"]


def test_nothing_left_says_how_short_the_shortest_is(tokenizer: Any, tmp_path: Path):
    file = write_parquet([row("1" * n) for n in (12, 10)], tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="0 of 2 prompts left.*data.max_prompt_length=2, the shortest has 10 tokens"):
        dataset([file], tokenizer, max_prompt_length=2, filter_overlong_prompts=True)


def test_truncation_error_names_the_first_row(tokenizer: Any, tmp_path: Path):
    file = write_parquet([row("11"), row("123456"), row("1234567")], tmp_path / "a.parquet")
    message = "2 of 3 prompts are longer than data.max_prompt_length=5 .*7 tokens; first: row 1 of .* with 6"
    with pytest.raises(ValueError, match=message):
        dataset([file], tokenizer, max_prompt_length=5)


@pytest.mark.parametrize("truncation, kept", [("left", "34567"), ("right", "12345"), ("middle", "12567")])
def test_truncation(truncation: str, kept: str, tokenizer: Any, tmp_path: Path):
    file = write_parquet([row("1234567")], tmp_path / "a.parquet")
    data = dataset([file], tokenizer, max_prompt_length=5, truncation=truncation)
    assert tokenizer.decode(data[0]["prompt_ids"]) == kept


def test_max_samples_takes_the_first_rows(tokenizer: Any, tmp_path: Path):
    file = write_parquet([row(f"{i}") for i in range(5)], tmp_path / "a.parquet")
    assert questions(dataset([file], tokenizer, max_samples=3)) == ["0", "1", "2"]


def test_a_failing_template_names_the_row(tokenizer: Any, tmp_path: Path):
    failing = load_tokenizer(
        tokenizer.name_or_path,
        custom_chat_template="{% if messages[0].content == '3' %}{{ raise_exception('no threes') }}{% endif %}x",
    )
    file = write_parquet([row(f"{i}") for i in range(5)], tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="cannot tokenize row 3 of .*no threes"):
        dataset([file], failing)


def test_chat_template_arguments_reach_the_template(tokenizer: Any, tmp_path: Path):
    template = "{{ greeting }}{{ messages[0].content }}{% if add_generation_prompt %}={% endif %}"
    polite = load_tokenizer(tokenizer.name_or_path, custom_chat_template=template)
    file = write_parquet([row("1")], tmp_path / "a.parquet")
    data = dataset([file], polite, apply_chat_template_kwargs={"greeting": "hi"})
    assert polite.decode(data[0]["prompt_ids"]) == "hi1="


def test_two_processes_measure_what_one_measures(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prompts, "MIN_PROMPTS_PER_PROCESS", 2)
    file = write_parquet([row("1" * (1 + i % 3)) for i in range(7)], tmp_path / "a.parquet")
    one, two = (dataset([file], tokenizer, num_workers=n) for n in (1, 2))
    assert [one[i] for i in range(7)] == [two[i] for i in range(7)]


def test_tokenizer_without_pad_token_uses_the_end_token(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    tokenizer = load_tokenizer(char_tokenizer(tmp_path, pad_token=None))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 1
    assert len(caplog.records) == 1 and "has no pad token" in caplog.text


def test_an_inner_pad_id_is_a_token_like_any_other(tmp_path: Path):
    # pad = end token = id 1, and the prompt contains it.
    tokenizer = load_tokenizer(char_tokenizer(tmp_path, pad_token=None))
    file = write_parquet([row("1<eos>2"), row("12345")], tmp_path / "a.parquet")
    batch = dataset([file], tokenizer).batch([0, 1], 0)
    assert batch.non_tensor_batch["prompt_ids"].tolist() == [[3, 1, 4], [3, 4, 5, 6, 7]]


def test_tokenizer_without_chat_template_says_the_way_out(tmp_path: Path):
    path = char_tokenizer(tmp_path, chat_template=None)
    with pytest.raises(ValueError, match="no chat template; set actor_rollout_ref.model.custom_chat_template"):
        load_tokenizer(path)
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}")
    assert load_tokenizer(path, custom_chat_template=str(tmp_path / "mine.jinja")).chat_template.startswith("{{ mess")


@pytest.mark.parametrize("length", [255, 300, 5000])
def test_a_template_longer_than_a_file_name_may_be_is_a_template(tmp_path: Path, length: int):
    path = char_tokenizer(tmp_path, chat_template=None)
    template = "{{ messages[0].content }}".ljust(length, "x")
    assert load_tokenizer(path, custom_chat_template=template).chat_template == template


def test_missing_tokenizer_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match="cannot load a tokenizer from .*nowhere"):
        load_tokenizer(str(tmp_path / "nowhere"))


def test_the_example_of_a_custom_dataset_works(tokenizer: Any, tmp_path: Path):
    (tmp_path / "problems.tsv").write_text("1+2=\t3\n4+4=\t8\n")
    example = Path(__file__).parents[2] / "examples" / "custom_dataset.py"
    config = DataConfig(max_prompt_length=8, custom_cls=CustomClassConfig(path=str(example), name="TabSeparated"))
    data = build_dataset(config, [str(tmp_path / "problems.tsv")], tokenizer, max_samples=-1)
    assert questions(data) == ["1+2=", "4+4="]
    assert data[1]["ground_truth"] == "8"


def test_a_custom_class_must_be_a_prompt_dataset(tokenizer: Any, tmp_path: Path):
    (tmp_path / "mine.py").write_text("class Mine: pass\n")
    config = DataConfig(custom_cls=CustomClassConfig(path=str(tmp_path / "mine.py"), name="Mine"))
    with pytest.raises(TypeError, match="data.custom_cls.name=Mine .* must be a class derived from"):
        build_dataset(config, ["x.parquet"], tokenizer, max_samples=-1)
