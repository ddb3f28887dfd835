"""Small real parts for the tests: a character tokenizer, random Qwen2 models, two-digit addition in verl's columns."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from prepare_quickstart import CHARACTERS, save_character_tokenizer


def char_tokenizer(path: Path | str, **options: Any) -> str:
    """Save the quickstart's tokenizer under `path`: <pad>=0, <eos>=1, then one id per character from 2 on."""
    save_character_tokenizer(path, **options)
    return str(path)


def tiny_model(
    path: Path | str,
    *,
    tie: bool = True,
    vocab_size: int | None = None,
    layers: int = 2,
    hidden: int = 64,
    max_position_embeddings: int = 128,
    seed: int = 0,
    **config: Any,
) -> str:
    """Save a random Qwen2 (float32) with its tokenizer under `path`; weights large enough that outputs differ."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    char_tokenizer(path)
    torch.manual_seed(seed)
    qwen = Qwen2Config(
        vocab_size=vocab_size or len(CHARACTERS) + 2,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=tie,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        dtype="float32",
        **config,
    )
    model = Qwen2ForCausalLM(qwen).to(torch.float32)
    model.generation_config.eos_token_id = 1
    model.generation_config.pad_token_id = 0
    model.save_pretrained(str(path))
    return str(path)


JUDGES_TEMPLATE = "{% for m in messages %}{{ '#' if m['role'] == 'user' else '*' }}{{ m['content'] }}<eos>{% endfor %}"


def tiny_reward_model(path: Path | str, *, own_tokenizer: bool = False, seed: int = 1, **config: Any) -> str:
    """Save a random Qwen2 classifier of one output under `path`, with the policy's tokenizer or one of its own.

    Its own numbers the characters in reverse and writes "#12+34=<eos>*46<eos>" where the policy's writes "12+34=46".
    """
    import torch
    from transformers import AutoConfig, Qwen2ForSequenceClassification

    tiny_model(path, **config)
    qwen = AutoConfig.from_pretrained(str(path), num_labels=1)
    torch.manual_seed(seed)
    model = Qwen2ForSequenceClassification(qwen).to(torch.float32)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(str(path))
    if own_tokenizer:
        char_tokenizer(path, chat_template=JUDGES_TEMPLATE)
        file = Path(path) / "tokenizer.json"
        content = json.loads(file.read_text())
        vocab = content["model"]["vocab"]
        last = len(vocab) + 1
        content["model"]["vocab"] = {token: i if i < 2 else last - i for token, i in vocab.items()}
        file.write_text(json.dumps(content))
    return str(path)


def addition_rows(count: int, *, seed: int = 0, data_source: str = "verl_lite/addition") -> list[dict[str, Any]]:
    """Rows with verl's columns: prompt "12+34=", ground truth "46"; all problems different."""
    pairs = random.Random(seed).sample([(a, b) for a in range(10, 100) for b in range(10, 100)], count)
    return [
        {
            "data_source": data_source,
            "prompt": [{"role": "user", "content": f"{a}+{b}="}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {"index": i},
        }
        for i, (a, b) in enumerate(pairs)
    ]


def write_parquet(rows: list[dict[str, Any]], path: Path | str) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), str(path))
    return str(path)


def write_jsonl(rows: list[dict[str, Any]], path: Path | str) -> str:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# The least that trainer.json of a checkpoint says.
CHECKPOINT_STATE: dict[str, Any] = {
    "step": 0, "total_training_steps": 9, "ranks": 1, "data": "", "contents": {"actor": ["model"]}, "architecture": {},
    "sampler": {"epoch": 0, "position": 0, "seed": 1, "shuffle": True, "num_rows": 8}, "kl_controller": {"kl_coef": 0},
    "skipped_in_a_row": {"actor": 0, "critic": 0}, "best": {"acc": [[0.5, 1]]}, "config": {},
}  # fmt: skip
