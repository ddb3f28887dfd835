"""The reward model: a sequence classifier of one output, which judges a response by what it says after the last token.

Which rows it judges stands in the data, per row: `reward_model.style` "model" is scored by the model, anything else
("rule") by the reward function. The two never add up: their scales have nothing to do with each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from verl_lite.batching import RankSchedule
from verl_lite.config import RewardModelBackboneConfig
from verl_lite.distributed.fsdp import FSDPEngine
from verl_lite.distributed.process_group import RankContext
from verl_lite.models.forward import to_rows
from verl_lite.models.loading import decoder_layers, load_reward_model
from verl_lite.protocol import DataProto
from verl_lite.workers.policy import model_inputs
from verl_lite.workers.update import forward_micro_batches


class RewardModelWorker:
    def __init__(self, context: RankContext, *, model: RewardModelBackboneConfig) -> None:
        self.packed, fsdp = model.use_remove_padding, model.fsdp_config

        def build(on_meta: bool) -> nn.Module:
            return load_reward_model(model, getattr(torch, fsdp.model_dtype), on_meta=on_meta)

        self.engine = FSDPEngine(build, lambda module: decoder_layers(module.backbone), context=context, fsdp=fsdp)
        self.engine.freeze()

    def compute_scores(self, shard: DataProto, schedule: RankSchedule) -> DataProto:
        """`scores` [B, 1] of the rows that `judged_batch` made."""

        def score(rows: DataProto) -> dict[str, Tensor]:
            scores = self.engine.module(model_inputs(rows, self.engine.device, packed=self.packed))
            return {"scores": to_rows(scores, rows.batch["response_mask"].to(self.engine.device))}

        with self.engine.phase("reward_model"):
            return forward_micro_batches(shard, schedule, score)

    def pop_peak_memory(self) -> dict[str, int]:
        """Bytes of the phases since the last call."""
        return self.engine.pop_peak_memory()


@dataclass(frozen=True)
class Transcriber:
    """From the policy's rows to the tokens that the reward model reads."""

    policy: PreTrainedTokenizerBase  # reward_model.model.input_tokenizer
    own: PreTrainedTokenizerBase | None  # the reward model's; None: it reads the policy's tokens as they are

    def transcribe(self, batch: DataProto) -> DataProto:
        """`judged_batch` of prompt and response: the policy's tokens, or the same chat under the model's own template.

        Reads input_ids, attention_mask, responses and, for a template, the object column raw_prompt.
        """
        real, width = batch.batch["attention_mask"].bool(), batch.batch["responses"].shape[1]
        if self.own is None:
            return judged_batch([row[keep].tolist() for row, keep in zip(batch.batch["input_ids"], real, strict=True)])
        responses = zip(batch.batch["responses"], real[:, real.shape[1] - width :], strict=True)
        texts = self.policy.batch_decode([row[keep].tolist() for row, keep in responses], skip_special_tokens=True)
        chats = [
            [*messages, {"role": "assistant", "content": text}]
            for messages, text in zip(batch.non_tensor_batch["raw_prompt"], texts, strict=True)
        ]
        rendered = self.own.apply_chat_template(chats, tokenize=False)
        # The template writes the special tokens itself.
        return judged_batch(self.own(rendered, add_special_tokens=False)["input_ids"])


def judged_batch(rows: Sequence[Sequence[int]]) -> DataProto:
    """Rows of token ids as workers read them, padded on the left, asking for one value per row: at its last token.

    A value is read before the response token it is for, so a place for one follows each row; it is not attended to.
    """
    width = max(map(len, rows))
    ids = torch.zeros(len(rows), width + 1, dtype=torch.int64)
    attention_mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, width - len(row) : width] = torch.tensor(row)
        attention_mask[i, width - len(row) : width] = 1
    response_mask = torch.ones(len(rows), 1, dtype=torch.int64)
    return DataProto.from_dict({"input_ids": ids, "attention_mask": attention_mask, "response_mask": response_mask})
