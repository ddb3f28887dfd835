"""A pretrained chat model's tokenizer: byte-level, ChatML with a default system message, end = pad = <|im_end|>.

What `examples/smollm2_chain_sum.sh` goes through, with a vocabulary of single bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import write_parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl_lite.config import DataConfig
from verl_lite.data.dataset import build_dataset, load_tokenizer
from verl_lite.protocol import DataProto
from verl_lite.rewards.managers import RewardManager
from verl_lite.rewards.pool import RewardFunction, RewardPool
from verl_lite.trainer.setup import end_token_ids

CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
START, END = 1, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tokenizer's part of a model folder."""
    path = tmp_path_factory.mktemp("chat_model")
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bytewise = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bytewise, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
    )  # fmt: skip
    fast.chat_template = CHATML
    fast.save_pretrained(str(path))
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (path / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}))
    return str(path)


def row(question: str, answer: str, *before: dict[str, str]) -> dict[str, Any]:
    return {
        "prompt": [*before, {"role": "user", "content": question}], "data_source": "verl_lite/addition",
        "reward_model": {"style": "rule", "ground_truth": answer},
    }  # fmt: skip


def test_a_prompt_is_the_template_to_the_start_of_the_answer(folder: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder)
    system = {"role": "system", "content": "Count."}
    file = write_parquet([row("3 + 4?", "7"), row("Zwölf − 5?", "7", system)], tmp_path / "a.parquet")
    data = build_dataset(DataConfig(seed=1, max_prompt_length=128), [file], tokenizer, max_samples=-1)
    batch = data.batch([0, 1], epoch=0)
    first, second = batch.non_tensor_batch["prompt_ids"]
    assert tokenizer.decode(first) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n3 + 4?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(second) == (
        "<|im_start|>system\nCount.<|im_end|>\n<|im_start|>user\nZwölf − 5?<|im_end|>\n<|im_start|>assistant\n"
    )
    # One id per special token, no second start token before the first; "ö" has two bytes, "−" three.
    assert [first.count(START), first.count(END), first[0]] == [3, 2, START]
    assert len(second) == len(tokenizer.decode(second)) + 1 + 2 - 3 * (len("<|im_start|>") - 1) - 2 * (
        len("<|im_end|>") - 1
    )


def test_the_end_token_ends_a_response_and_is_no_part_of_the_answer(folder: str) -> None:
    tokenizer = load_tokenizer(folder)
    assert end_token_ids(folder, tokenizer) == [END]
    seven, space = tokenizer("7")["input_ids"], tokenizer(" ")["input_ids"]
    responses = torch.tensor([[*seven, END, END], [*space, *seven, END], [*seven, *seven, *seven]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 1, 1]])  # end, then padding; ended; cut off at the limit
    columns = {"data_source": ["verl_lite/addition"] * 3, "ground_truth": ["7"] * 3, "extra_info": [{}] * 3}
    batch = DataProto.from_dict({"responses": responses, "response_mask": mask}, columns)
    with RewardPool(RewardFunction(), num_workers=1, timeout_s=30, on_error="raise") as pool:
        scores = RewardManager(pool, tokenizer).score(batch).token_level_scores
    assert scores.tolist() == [[0, 1, 0], [0, 0, 1], [0, 0, 0]]
