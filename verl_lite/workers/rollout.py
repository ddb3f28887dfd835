"""The rollout worker: owns one engine, turns prompts into a batch of responses, takes new weights."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from verl_lite.config import PolicyModelConfig, RolloutConfig, ValKwargs
from verl_lite.distributed.memory import own_memory_bytes
from verl_lite.distributed.process_group import RankContext
from verl_lite.distributed.random_state import load_random_state, save_random_state
from verl_lite.plugins import resolve
from verl_lite.protocol import DataProto
from verl_lite.rollout import ENGINES
from verl_lite.rollout.engine import Completion, Engine, EngineSettings, GenerationRequest, SamplingOptions
from verl_lite.rollout.weight_transfer import WeightUpdate, transfer_backend

logger = logging.getLogger(__name__)

# What responses are for: `rollout.*`, `rollout.val_kwargs.*`, or one greedy response per prompt as its baseline.
Purpose = Literal["train", "validate", "baseline"]


class RolloutWorker:
    """One engine. `context.rank` counts the engines of the run; on CPU those of a node share its cores out."""

    def __init__(
        self,
        context: RankContext,
        *,
        rollout: RolloutConfig,
        model: PolicyModelConfig,
        max_response_length: int,
        vocab_size: int,  # len(tokenizer)
        eos_token_ids: Sequence[int],
        pad_token_id: int,
        start_timeout_s: float,
        step_timeout_s: float,
    ) -> None:
        self._rollout = rollout
        self._max_response_length = max_response_length
        self._pad_token_id = pad_token_id
        self._timeout_s = step_timeout_s
        needs_tokenizer = bool(rollout.stop)
        settings = EngineSettings(
            model_path=model.path,
            tokenizer_path=(model.tokenizer_path or model.path) if needs_tokenizer else None,
            device=context.device,
            dtype=rollout.dtype,
            max_model_len=rollout.max_model_len,
            eos_token_ids=tuple(eos_token_ids),
            vocab_size=vocab_size,
            start_timeout_s=start_timeout_s,
            trust_remote_code=model.trust_remote_code,
            override_config=model.override_config,
            tensor_parallel_size=rollout.tensor_model_parallel_size,
            max_num_seqs=rollout.max_num_seqs,
            max_num_batched_tokens=rollout.max_num_batched_tokens,
            gpu_memory_utilization=rollout.gpu_memory_utilization,
            enforce_eager=rollout.enforce_eager,
            enable_prefix_caching=rollout.enable_prefix_caching,
            enable_chunked_prefill=rollout.enable_chunked_prefill,
            sleeps=context.device == "cuda" and rollout.nnodes == 0 and rollout.free_cache_engine,
            transfer_backend=transfer_backend(rollout.name, context.device, colocated=rollout.nnodes == 0),
            local_replica=context.local_rank,
            local_replicas=context.local_world_size,
            engine_kwargs=rollout.engine_kwargs.vllm if rollout.name == "vllm" else {},
        )
        self._random_state_file = f"rank_{context.rank}.safetensors"
        engine_class = resolve(rollout.name, ENGINES, key="actor_rollout_ref.rollout.name")
        self._engine: Engine = engine_class(settings)

    def generate(self, prompts: DataProto, *, purpose: Purpose, step: int) -> DataProto:
        """The prompts' rows, each n times (prompt-major), with responses; columns as in `protocol`.

        `prompts` needs the object columns `uid` and `prompt_ids`; all object columns are kept.
        """
        sampling = sampling_options(self._rollout, self._max_response_length, purpose)
        requests = [
            GenerationRequest(uid, list(ids), request_seed(self._rollout.seed, step, uid))
            for uid, ids in zip(prompts.non_tensor_batch["uid"], prompts.non_tensor_batch["prompt_ids"], strict=True)
        ]
        completions = self._engine.generate(requests, sampling, timeout_s=self._timeout_s)
        return build_batch(prompts, completions, pad_token_id=self._pad_token_id, log_probs=sampling.log_probs)

    def connect(self, info: Mapping[str, Any]) -> None:
        """Meet the trainer for `nccl` transfers; while this waits, the training ranks call `Publisher.connect`."""
        self._engine.connect(info, timeout_s=self._timeout_s)

    def update_weights(self, update: WeightUpdate) -> int | None:
        """Take one part of an update; returns the version the engine holds now."""
        self._engine.update_weights(update, timeout_s=self._timeout_s)
        return self._engine.weight_version

    def sleep(self) -> None:
        self._engine.sleep(timeout_s=self._timeout_s)

    def wake_up(self, part: str) -> None:
        """`part`: "weights" (before an update), then "kv_cache" (before generating)."""
        self._engine.wake_up(part, timeout_s=self._timeout_s)

    def own_memory(self) -> int:
        """Bytes of this process and its engine's."""
        return own_memory_bytes(children=True)

    def save_random_state(self, folder: str) -> str | None:
        """Of this process: what an engine in it draws unseeded requests from; vLLM's has processes of its own.

        Returns what the operating system refused, if anything.
        """
        try:
            save_random_state(Path(folder) / self._random_state_file)
        except OSError as error:
            return str(error)
        return None

    def load_random_state(self, folder: str) -> None:
        load_random_state(Path(folder) / self._random_state_file)

    def shutdown(self) -> None:
        self._engine.shutdown()


def sampling_options(rollout: RolloutConfig, max_response_length: int, purpose: Purpose) -> SamplingOptions:
    """How to decode; what the keys say of training leaves no trace in validation, nor the other way round."""
    source: RolloutConfig | ValKwargs = rollout.val_kwargs if purpose == "validate" else rollout
    greedy = purpose == "baseline" or not source.do_sample or source.temperature == 0
    return SamplingOptions(
        n=1 if purpose == "baseline" else source.n,
        temperature=0.0 if greedy else source.temperature,
        top_p=source.top_p,
        top_k=source.top_k,
        max_tokens=max_response_length,
        stop=tuple(rollout.stop or ()),
        stop_token_ids=tuple(rollout.stop_token_ids or ()),
        ignore_eos=rollout.ignore_eos,
        log_probs=rollout.calculate_log_probs,
    )


def request_seed(seed: int | None, step: int, uid: str) -> int | None:
    """63 bits of a hash of (seed, step, uid): response i is drawn with this + i, so small neighbours would repeat."""
    if seed is None:
        return None
    return int.from_bytes(hashlib.blake2b(f"{seed}/{step}/{uid}".encode(), digest_size=8).digest()) >> 1


def build_batch(
    prompts: DataProto, completions: Sequence[Sequence[Completion]], *, pad_token_id: int, log_probs: bool = True
) -> DataProto:
    """One row per completion, prompt-major. Widths are the longest of the batch, masks come from lengths."""
    counts = [len(group) for group in completions]
    responses = [completion for group in completions for completion in group]
    prompt_ids = [
        list(ids) for ids, n in zip(prompts.non_tensor_batch["prompt_ids"], counts, strict=True) for _ in range(n)
    ]
    response_mask = _padded([[1] * len(r.token_ids) for r in responses], 0)
    tensors = {
        "prompts": _padded(prompt_ids, pad_token_id, left=True),
        "responses": _padded([r.token_ids for r in responses], pad_token_id),
        "response_mask": response_mask,
    }
    tensors["input_ids"] = torch.cat([tensors["prompts"], tensors["responses"]], dim=1)
    tensors["attention_mask"] = torch.cat(
        [_padded([[1] * len(p) for p in prompt_ids], 0, left=True), response_mask], dim=1
    )
    tensors["position_ids"] = (tensors["attention_mask"].cumsum(1) - 1).clamp(min=0)
    if log_probs:
        tensors["rollout_log_probs"] = _padded([r.log_probs for r in responses], 0.0)
    objects = {name: np.repeat(column, counts) for name, column in prompts.non_tensor_batch.items()}
    return DataProto.from_dict(tensors, objects, dict(prompts.meta_info))


def join_batches(parts: Sequence[DataProto], *, pad_token_id: int) -> DataProto:
    """Concatenate batches of several replicas or rounds, whose widths differ.

    An object column that some lack, since a reward function returned nothing of that name, is None there.
    """
    prompt_width = max(part.batch["prompts"].shape[1] for part in parts)
    response_width = max(part.batch["responses"].shape[1] for part in parts)
    columns = dict.fromkeys(name for part in parts for name in part.non_tensor_batch)

    def widened(part: DataProto) -> DataProto:
        left = prompt_width - part.batch["prompts"].shape[1]
        right = response_width - part.batch["responses"].shape[1]
        tensors = {}
        for name, column in part.batch.items():
            fill = pad_token_id if name in ("prompts", "responses", "input_ids") else 0
            before = left if name in ("prompts", "input_ids", "attention_mask") else 0
            after = 0 if name == "prompts" else right
            tensors[name] = torch.nn.functional.pad(column, (before, after), value=fill)
        tensors["position_ids"] = (tensors["attention_mask"].cumsum(1) - 1).clamp(min=0)
        missing = {name: [None] * len(part) for name in columns if name not in part.non_tensor_batch}
        return DataProto.from_dict(tensors, {**part.non_tensor_batch, **missing}, part.meta_info)

    return DataProto.concat([widened(part) for part in parts])


def _padded(rows: list[list[Any]], fill: float, *, left: bool = False) -> torch.Tensor:
    width = max(map(len, rows), default=0)
    dtype = torch.float32 if isinstance(fill, float) else torch.int64
    gaps = [[fill] * (width - len(row)) for row in rows]
    padded = [gap + row if left else row + gap for row, gap in zip(rows, gaps, strict=True)]
    return torch.tensor(padded, dtype=dtype).reshape(len(rows), width)
