"""What loading makes of a model folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Lfm2Config, Lfm2ForCausalLM, OPTConfig, OPTForCausalLM

from verl_lite.config import ModelConfig
from verl_lite.models.attention import PackedRows, packed_attention
from verl_lite.models.loading import decoder_layers, load_causal_lm, load_value_model


def test_weights_come_in_the_dtype_asked_for_and_tied_names_stay(tiny_model_path: str) -> None:
    lm = load_causal_lm(ModelConfig(path=tiny_model_path, use_remove_padding=True), torch.float64)
    assert {parameter.dtype for parameter in lm.parameters()} == {torch.float64}
    assert "lm_head.weight" in lm.state_dict()
    assert len(decoder_layers(lm)) == 2


def test_a_model_on_meta_has_the_same_names_and_no_storage(tiny_model_path: str) -> None:
    real = load_causal_lm(ModelConfig(path=tiny_model_path, use_remove_padding=False), torch.float32)
    meta = load_causal_lm(ModelConfig(path=tiny_model_path, use_remove_padding=False), torch.float32, on_meta=True)
    assert list(meta.state_dict()) == list(real.state_dict())
    assert all(parameter.is_meta for parameter in meta.parameters())


def test_override_config_replaces_fields_and_refuses_unknown_ones(tiny_model_path: str) -> None:
    def load(override: dict[str, Any]) -> Any:
        source = ModelConfig(path=tiny_model_path, use_remove_padding=False, override_config=override)
        return load_causal_lm(source, torch.float32)

    lm = load({"rms_norm_eps": 0.5, "attn_implementation": "eager"})
    assert lm.config.rms_norm_eps == 0.5
    assert lm.config._attn_implementation == "eager"
    with pytest.raises(ValueError, match=r"override_config: Qwen2Config has no rms_norm_epps .*qwen2 model"):
        load({"rms_norm_epps": 0.5})


def test_attention_that_cannot_pack_is_refused_with_the_way_out(tiny_model_path: str) -> None:
    with pytest.raises(ValueError, match=r"attn_implementation=sdpa .*use_remove_padding=False"):
        load_causal_lm(
            ModelConfig(path=tiny_model_path, override_config={"attn_implementation": "sdpa"}), torch.float32
        )
    ones = torch.ones(1, 1, 2, 4)
    with pytest.raises(ValueError, match=r"Linear does not hand .*use_remove_padding=False"):
        packed_attention(torch.nn.Linear(1, 1), ones, ones, ones, None)


def test_layers_that_carry_tokens_from_row_to_row_are_not_packed(tmp_path: Path) -> None:
    # A short convolution: the last tokens of a row would enter the first states of the next.
    config = Lfm2Config(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=1,
        num_key_value_heads=1, layer_types=["conv", "full_attention"],
    )  # fmt: skip
    Lfm2ForCausalLM(config).save_pretrained(tmp_path)
    load_causal_lm(ModelConfig(path=str(tmp_path), use_remove_padding=False), torch.float32)
    with pytest.raises(ValueError, match=r"Lfm2ForCausalLM has layers \(conv\) .*use_remove_padding=False"):
        load_causal_lm(ModelConfig(path=str(tmp_path), use_remove_padding=True), torch.float32)


def test_every_dropout_of_a_config_is_off(tmp_path: Path) -> None:
    config = OPTConfig(
        vocab_size=80, hidden_size=16, ffn_dim=16, num_hidden_layers=1, num_attention_heads=2, word_embed_proj_dim=16,
        max_position_embeddings=16, dropout=0.3, attention_dropout=0.2, layerdrop=0.1,
    )  # fmt: skip
    OPTForCausalLM(config).save_pretrained(tmp_path)
    lm = load_causal_lm(ModelConfig(path=str(tmp_path), use_remove_padding=False), torch.float32)
    assert (lm.config.dropout, lm.config.attention_dropout, lm.config.layerdrop) == (0.0, 0.0, 0.0)


def test_a_value_head_starts_at_zero_unless_the_folder_has_one(tiny_model_path: str, tmp_path: Path) -> None:
    fresh = load_value_model(ModelConfig(path=tiny_model_path), torch.float32)
    assert not fresh.score.weight.any() and not fresh.score.bias.any()

    tensors = {f"model.{name}": tensor for name, tensor in fresh.backbone.state_dict().items()}
    save_file(
        {**tensors, "score.weight": torch.full_like(fresh.score.weight, 0.25)},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    (tmp_path / "config.json").write_text(json.dumps(fresh.backbone.config.to_dict()))
    assert (load_value_model(ModelConfig(path=str(tmp_path)), torch.float32).score.weight == 0.25).all()


def test_a_hub_ids_value_head_and_end_tokens_are_read_as_a_folders(tiny_model_path: str, tmp_path: Path) -> None:
    """From a cache as a download leaves it, without a network."""
    snapshot = tmp_path / "models--owner--critic" / "snapshots" / "abc"
    shutil.copytree(tiny_model_path, snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    tensors = load_file(snapshot / "model.safetensors")
    hidden = tensors["model.norm.weight"].shape[0]
    save_file(
        {**tensors, "score.weight": torch.full((1, hidden), 0.25)}, snapshot / "model.safetensors", {"format": "pt"}
    )
    (snapshot / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')
    code = """
import torch
from verl_lite.config import ModelConfig
from verl_lite.data.prompts import load_tokenizer
from verl_lite.models.loading import load_value_model
from verl_lite.trainer.setup import end_token_ids
model = load_value_model(ModelConfig(path="owner/critic"), torch.float32)
print((model.score.weight == 0.25).all().item(), end_token_ids("owner/critic", load_tokenizer("owner/critic")))
"""
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "True [1, 7]\n", done.stderr


def test_rows_of_similar_length_share_a_bucket() -> None:
    packed = PackedRows.from_lengths([5, 2, 7, 3], torch.device("cpu"))
    # 2 and 3 (two bits) together, 5 and 7 (three bits) together; padding points at token 0.
    assert [bucket.tolist() for bucket in packed.buckets] == [
        [[5, 6, 0], [14, 15, 16]],
        [[0, 1, 2, 3, 4, 0, 0], [7, 8, 9, 10, 11, 12, 13]],
    ]
    assert packed.offsets.tolist() == [0, 5, 7, 14, 17]
    flat = torch.cat([bucket.flatten() for bucket in packed.buckets])
    assert flat[packed.restore].tolist() == list(range(17))
