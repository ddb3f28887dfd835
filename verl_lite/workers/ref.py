"""The reference policy: the model training started from, which only ever scores."""

from __future__ import annotations

from verl_lite.batching import RankSchedule
from verl_lite.config import FSDPConfig, ModelConfig
from verl_lite.distributed.process_group import RankContext
from verl_lite.protocol import DataProto
from verl_lite.workers.policy import build_policy_engine, score_tokens
from verl_lite.workers.update import forward_micro_batches


class RefWorker:
    def __init__(
        self,
        context: RankContext,
        *,
        model: ModelConfig,
        fsdp: FSDPConfig,
        temperature: float,
        vocab_size: int | None = None,
    ) -> None:
        """temperature, vocab_size: the actor's, so that equal weights give equal log-probs."""
        self.packed = model.use_remove_padding
        self.engine = build_policy_engine(context, model, fsdp, temperature=temperature, vocab_size=vocab_size)
        self.engine.freeze()

    def compute_log_probs(self, shard: DataProto, schedule: RankSchedule) -> DataProto:
        """`ref_log_probs` [B, R] of the shard's rows."""
        with self.engine.phase("ref"):
            return forward_micro_batches(
                shard, schedule, lambda rows: {"ref_log_probs": score_tokens(self.engine, rows, packed=self.packed)[0]}
            )

    def pop_peak_memory(self) -> dict[str, int]:
        """Bytes of the phases since the last call."""
        return self.engine.pop_peak_memory()
