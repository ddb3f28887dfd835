"""From token ids to log-probs, entropies and values of response tokens.

The modules here are the FSDP roots: whatever reads a weight happens inside their `forward`, where FSDP has gathered it.
Calling the inner model or its head on its own would mix plain and sharded tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from verl_lite.models.attention import PACKED_ATTENTION, PackedRows

# 256 MiB of float32 logits; a few such buffers exist at a time, whatever the batch and the vocabulary.
LOGITS_PER_CHUNK = 2**26


@dataclass(frozen=True)
class ModelInputs:
    """A micro-batch as the model runs it: padded rows [b, l] cut to the columns in use, or one packed row [1, N]."""

    input_ids: Tensor  # [b, l] or [1, N]
    position_ids: Tensor  # the same shape; counted from each row's first real token
    attention_mask: Tensor | None  # [b, l]; None when packed
    packed_rows: PackedRows | None
    predictors: Tensor  # [n] place in the flattened input of the token before each response token that counts
    targets: Tensor  # [n] the response tokens that count, row after row


def position_ids_from_mask(attention_mask: Tensor) -> Tensor:
    """Positions counted from each row's first real token; 0 in the padding before it. [B, L] → [B, L] long.

    [0, 0, 1, 1, 1] → [0, 0, 0, 1, 2]
    """
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def prepare_inputs(input_ids: Tensor, attention_mask: Tensor, response_mask: Tensor, *, packed: bool) -> ModelInputs:
    """input_ids, attention_mask [B, P+R]; response_mask [B, R] is 1 where a log-prob is wanted, holes allowed."""
    rows, columns = response_mask.bool().nonzero(as_tuple=True)
    # The token at column c of the response is predicted at the column before it, the prompt's last for c = 0.
    predictor_columns = columns + input_ids.shape[1] - response_mask.shape[1] - 1
    targets = input_ids[rows, predictor_columns + 1]
    mask = attention_mask.bool()
    position_ids = position_ids_from_mask(mask)
    if packed:
        lengths = mask.sum(-1).tolist()
        return ModelInputs(
            input_ids=input_ids[mask][None],
            position_ids=position_ids[mask][None],
            attention_mask=None,
            packed_rows=PackedRows.from_lengths(lengths, input_ids.device),
            predictors=(mask.flatten().long().cumsum(0) - 1)[rows * mask.shape[1] + predictor_columns],
            targets=targets,
        )
    used = mask.any(0).nonzero()[:, 0]
    first, last = int(used[0]), int(used[-1]) + 1
    return ModelInputs(
        input_ids=input_ids[:, first:last],
        position_ids=position_ids[:, first:last],
        attention_mask=attention_mask[:, first:last],
        packed_rows=None,
        predictors=rows * (last - first) + predictor_columns - first,
        targets=targets,
    )


def to_rows(values: Tensor, response_mask: Tensor) -> Tensor:
    """Values of the tokens that count [n] → [B, R], zeros elsewhere. Differentiable."""
    return values.new_zeros(response_mask.shape).masked_scatter(response_mask.bool(), values)


class PolicyModel(nn.Module):
    """A causal language model that answers with log-probs instead of logits."""

    def __init__(self, lm: PreTrainedModel, *, temperature: float, vocab_size: int | None = None) -> None:
        """vocab_size: the tokenizer's size; ids beyond it, which a model may have, get no probability. None: all do."""
        super().__init__()
        self.lm = lm
        self.temperature = temperature
        self.vocab_size = vocab_size
        config = lm.config.get_text_config()
        # The few architectures that do something to the logits after the head name it so in their config.
        self.logit_scale = getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None) or 1.0
        if scaling := getattr(config, "logits_scaling", None):
            # HyperCLOVA X multiplies by what the others divide by.
            self.logit_scale *= scaling if config.model_type == "hyperclovax" else 1 / scaling
        self.logit_softcap = getattr(config, "final_logit_softcapping", None)

    def forward(self, inputs: ModelInputs, *, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
        """Log-probs and entropies (nats) of the tokens that count, of the distribution at `temperature`; each [n]."""
        hidden = _hidden_at_predictors(self.lm.base_model, inputs)
        head = self.lm.get_output_embeddings()
        chunk_size = max(1, LOGITS_PER_CHUNK // head.weight.shape[0])
        log_probs, entropies = [], []
        for start in range(0, max(1, len(hidden)), chunk_size):
            part = slice(start, start + chunk_size)
            if len(hidden) > chunk_size and hidden.requires_grad:
                # Logits are computed again in backward; kept, they would add up to [tokens, vocab].
                log_prob, entropy = checkpoint(
                    self._head, hidden[part], inputs.targets[part], with_entropy,
                    use_reentrant=False, preserve_rng_state=False,
                )  # fmt: skip
            else:
                log_prob, entropy = self._head(hidden[part], inputs.targets[part], with_entropy)
            log_probs.append(log_prob)
            entropies.append(entropy)
        return torch.cat(log_probs), torch.cat(entropies) if with_entropy else None

    def _head(self, hidden: Tensor, targets: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
        head = self.lm.get_output_embeddings()
        bias = None if head.bias is None else head.bias[: self.vocab_size]
        logits = _at_least_float32(F.linear(hidden, head.weight[: self.vocab_size], bias))
        if self.logit_softcap is not None:
            logits = self.logit_softcap * torch.tanh(logits / self.logit_softcap)
        if self.logit_scale != self.temperature:
            logits = logits * (self.logit_scale / self.temperature)
        log_normalizer = logits.logsumexp(-1)
        log_probs = logits.gather(-1, targets[:, None])[:, 0] - log_normalizer
        if not with_entropy:
            return log_probs, None
        return log_probs, log_normalizer - (logits.softmax(-1) * logits).sum(-1)


class ValueModel(nn.Module):
    """A transformer with a scalar head; the value at a response token is read at the token before it."""

    def __init__(self, backbone: PreTrainedModel, score: nn.Linear | None = None) -> None:
        """score: the head; None: a new one."""
        super().__init__()
        self.backbone = backbone
        if score is None:
            # Zeros: the first values are 0 on every rank, whatever the seed, and the first targets are not noise.
            score = nn.Linear(backbone.config.get_text_config().hidden_size, 1, dtype=backbone.dtype)
            nn.init.zeros_(score.weight)
            nn.init.zeros_(score.bias)
        self.score = score

    def forward(self, inputs: ModelInputs) -> Tensor:
        """Values [n] of the states before the tokens that count."""
        values = self.score(_hidden_at_predictors(self.backbone, inputs))
        return _at_least_float32(values.sum(-1))  # of one output; indexing would give a view, which FSDP warns about


def _hidden_at_predictors(backbone: PreTrainedModel, inputs: ModelInputs) -> Tensor:
    packed: dict[str, Any] = {}
    if inputs.packed_rows is not None:
        rows = inputs.packed_rows
        if backbone.config._attn_implementation == PACKED_ATTENTION:
            packed = {"packed_rows": rows}
        else:  # transformers' own flash attention
            longest = max(rows.lengths)
            packed = {
                "cu_seq_lens_q": rows.offsets, "cu_seq_lens_k": rows.offsets,
                "max_length_q": longest, "max_length_k": longest,
            }  # fmt: skip
    hidden = backbone(
        input_ids=inputs.input_ids,
        attention_mask=inputs.attention_mask,
        position_ids=inputs.position_ids,
        use_cache=False,
        **packed,
    ).last_hidden_state
    return hidden.flatten(0, 1).index_select(0, inputs.predictors)


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
