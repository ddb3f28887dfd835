"""What a generation engine is: token ids in, token ids with their log-probs out, weights replaced between steps.

Nothing else of vLLM leaks out of this package. An engine of your own is a class with these methods, built as
`YourEngine(EngineSettings)` and named by import path in `actor_rollout_ref.rollout.name`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from verl_lite.rollout.weight_transfer import WeightUpdate

# Widths of an attention head for which vLLM's CPU kernels are compiled; others fail at the first prompt.
VLLM_CPU_HEAD_DIMS = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


@dataclass(frozen=True)
class EngineSettings:
    """What an engine is built from; the same for every kind of engine."""

    model_path: str
    device: str  # "cuda" | "cpu"
    dtype: str  # "float32" | "bfloat16" | "float16"
    max_model_len: int  # prompt + response, tokens
    eos_token_ids: tuple[int, ...]
    vocab_size: int  # ids the tokenizer knows: 0 .. vocab_size - 1; larger ones are never sampled
    start_timeout_s: float
    tokenizer_path: str | None = None  # needed for `SamplingOptions.stop`
    trust_remote_code: bool = False
    override_config: Mapping[str, Any] = field(default_factory=dict)
    tensor_parallel_size: int = 1
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    gpu_memory_utilization: float = 0.5
    enforce_eager: bool = False
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    sleeps: bool = False  # gives its GPU memory back between `sleep` and `wake_up`
    transfer_backend: str = "shm"
    local_replica: int = 0  # which of the engines on this node, for its share of the cores
    local_replicas: int = 1
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)  # the engine's own options, passed through


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt. With a seed its responses depend on nothing but seed, prompt, options and weights."""

    uid: str
    prompt_ids: list[int]
    seed: int | None = None  # response i is drawn with seed + i


@dataclass(frozen=True)
class SamplingOptions:
    """How responses are drawn. Temperature 0 is greedy."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: all tokens
    max_tokens: int = 16
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    log_probs: bool = True


@dataclass(frozen=True)
class Completion:
    """One response.

    token_ids:     what the policy chose, the end token included, e.g. [17, 42, 1].
    log_probs:     of each of them under the distribution it was drawn from (after temperature, top-k and top-p); empty
                   when `SamplingOptions.log_probs` is off. Greedy: of the untempered distribution.
    finish_reason: "stop" (end token, stop id or stop string) or "length" (`max_tokens` reached).
    """

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str


class Engine(Protocol):
    """A generation engine. Calls block; every one of them ends within `timeout_s` or raises TimeoutError."""

    weight_version: int | None
    """Version of the last complete update; None: the weights of `model_path`."""

    def __init__(self, settings: EngineSettings) -> None: ...

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: SamplingOptions, *, timeout_s: float
    ) -> list[list[Completion]]:
        """`sampling.n` completions for each request, in the order of the requests."""
        ...

    def connect(self, info: Mapping[str, Any], *, timeout_s: float) -> None:
        """Meet the trainer before the first update; only the `nccl` transfer needs it."""
        ...

    def update_weights(self, update: WeightUpdate, *, timeout_s: float) -> None:
        """Take one part of an update; the last one makes the new weights valid and drops every cached prefix."""
        ...

    def sleep(self, *, timeout_s: float) -> None:
        """Give GPU memory back (weights go to host memory, the KV cache goes). No effect unless `settings.sleeps`."""
        ...

    def wake_up(self, part: str, *, timeout_s: float) -> None:
        """Undo `sleep`: first part="weights", then, with room made for it, part="kv_cache"."""
        ...

    def shutdown(self) -> None:
        """End the engine and its processes."""
        ...


def check_part(update: WeightUpdate, expected: int) -> int:
    """Refuse a part out of order; returns the number of the part to come after this one."""
    if update.part != expected:
        raise ValueError(f"weights version {update.version}: got part {update.part}, expected {expected}")
    return 0 if update.last else expected + 1


def check_requests(requests: Sequence[GenerationRequest], sampling: SamplingOptions, max_model_len: int) -> None:
    """Refuse what an engine would cut off silently."""
    for request in requests:
        if not request.prompt_ids:
            raise ValueError(f"prompt {request.uid} is empty; an engine needs at least one token")
        if len(request.prompt_ids) + sampling.max_tokens > max_model_len:
            raise ValueError(
                f"prompt {request.uid} has {len(request.prompt_ids)} tokens; with data.max_response_length="
                f"{sampling.max_tokens} it does not fit actor_rollout_ref.rollout.max_model_len={max_model_len}"
            )


def model_problems(
    model_path: str, *, engine: str, device: str, max_model_len: int, override_config: Mapping[str, Any]
) -> list[str]:
    """Why this model can't be served like this, from its config.json alone; checked before anything loads."""
    config = json.loads((Path(model_path) / "config.json").read_text()) | dict(override_config)
    config = config.get("text_config") or config
    problems = []
    longest = config.get("max_position_embeddings")
    if longest is not None and max_model_len > longest and not config.get("rope_scaling"):
        problems.append(
            f"actor_rollout_ref.rollout.max_model_len={max_model_len} (data.max_prompt_length + "
            f"data.max_response_length unless set) exceeds max_position_embeddings={longest} of {model_path}; "
            f"shorten prompt or response to {longest} tokens together"
        )
    if engine == "vllm" and device == "cpu" and {"hidden_size", "num_attention_heads"} <= config.keys():
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        if head_dim not in VLLM_CPU_HEAD_DIMS:
            problems.append(
                f"{model_path} has attention heads of {head_dim}; vLLM's CPU kernels know "
                f"{', '.join(map(str, VLLM_CPU_HEAD_DIMS))}: use another model or actor_rollout_ref.rollout.name=hf"
            )
    return problems
