"""What actor and reference share: a sharded causal language model that scores response tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from verl_lite.config import FSDPConfig, ModelConfig
from verl_lite.distributed.fsdp import FSDPEngine
from verl_lite.distributed.process_group import RankContext
from verl_lite.models.forward import ModelInputs, PolicyModel, prepare_inputs, to_rows
from verl_lite.models.loading import decoder_layers, enable_gradient_checkpointing, load_causal_lm
from verl_lite.protocol import DataProto


def build_policy_engine(
    context: RankContext,
    model: ModelConfig,
    fsdp: FSDPConfig,
    *,
    temperature: float,
    vocab_size: int | None,
    gradient_checkpointing: bool = False,
) -> FSDPEngine:
    def build(on_meta: bool) -> nn.Module:
        lm = load_causal_lm(model, getattr(torch, fsdp.model_dtype), on_meta=on_meta)
        if gradient_checkpointing:
            enable_gradient_checkpointing(lm)
        return PolicyModel(lm, temperature=temperature, vocab_size=vocab_size)

    return FSDPEngine(build, lambda module: decoder_layers(module.lm), context=context, fsdp=fsdp)


def model_inputs(rows: DataProto, device: torch.device, *, packed: bool) -> ModelInputs:
    """A micro-batch on the device, for the response tokens that count."""
    ids, attention_mask, mask = (rows.batch[key] for key in ("input_ids", "attention_mask", "response_mask"))
    return prepare_inputs(ids.to(device), attention_mask.to(device), mask.to(device), packed=packed)


def score_tokens(
    engine: FSDPEngine, rows: DataProto, *, packed: bool, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probs and, if asked, entropies (nats) of the rows' response tokens; each [B, R], 0 where the mask is 0."""
    mask = rows.batch["response_mask"].to(engine.device)
    log_probs, entropies = engine.module(model_inputs(rows, engine.device, packed=packed), with_entropy=with_entropy)
    return to_rows(log_probs, mask), None if entropies is None else to_rows(entropies, mask)
