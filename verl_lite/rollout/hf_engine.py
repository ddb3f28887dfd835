"""The small engine: transformers and a sampling loop. It keeps the contract honest and runs where vLLM has no build."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TopKLogitsWarper, TopPLogitsWarper

from verl_lite.rollout.engine import (
    Completion,
    EngineSettings,
    GenerationRequest,
    SamplingOptions,
    check_part,
    check_requests,
)
from verl_lite.rollout.weight_transfer import WeightUpdate, read_part


class HfEngine:
    """See `engine.Engine`. Batches of up to `max_num_seqs` rows, each drawn with its own random generator."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.weight_version: int | None = None
        self._next_part = 0
        self._loaded: set[str] = set()
        self._device = torch.device(settings.device)
        self._tokenizer: Any = None
        if settings.tokenizer_path is not None:
            self._tokenizer = AutoTokenizer.from_pretrained(
                settings.tokenizer_path, trust_remote_code=settings.trust_remote_code
            )
        config = AutoConfig.from_pretrained(
            settings.model_path, trust_remote_code=settings.trust_remote_code, **settings.override_config
        )
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            settings.model_path,
            config=config,
            dtype=getattr(torch, settings.dtype),
            trust_remote_code=settings.trust_remote_code,
        )
        self._model.to(self._device).eval()

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: SamplingOptions, *, timeout_s: float
    ) -> list[list[Completion]]:
        check_requests(requests, sampling, self.settings.max_model_len)
        deadline = time.monotonic() + timeout_s
        copies = 1 if sampling.temperature == 0 else sampling.n
        rows = [(request, i) for request in requests for i in range(copies)]
        completions: list[Completion] = []
        for start in range(0, len(rows), self.settings.max_num_seqs):
            batch = rows[start : start + self.settings.max_num_seqs]
            prompts = [request.prompt_ids for request, _ in batch]
            seeds = [None if request.seed is None else request.seed + i for request, i in batch]
            completions += self._sample(prompts, seeds, sampling, deadline)
        groups = [completions[i : i + copies] for i in range(0, len(completions), copies)]
        return [group * sampling.n for group in groups] if copies < sampling.n else groups

    @torch.inference_mode()
    def _sample(
        self, prompts: list[list[int]], seeds: list[int | None], sampling: SamplingOptions, deadline: float
    ) -> list[Completion]:
        stop_ids = set(sampling.stop_token_ids) | set(() if sampling.ignore_eos else self.settings.eos_token_ids)
        generators = [
            None if seed is None else torch.Generator(self._device).manual_seed(seed % 2**63) for seed in seeds
        ]
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=self._device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self._device)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        tokens: list[list[int]] = [[] for _ in prompts]
        log_probs: list[list[float]] = [[] for _ in prompts]
        reasons = ["" for _ in prompts]
        cache = None
        while not all(reasons):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the hf engine did not generate {len(prompts)} responses in time")
            output = self._model(
                input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True,
                logits_to_keep=1,
            )  # fmt: skip
            cache = output.past_key_values
            chosen, chosen_log_probs = sample(
                output.logits[:, -1].float()[:, : self.settings.vocab_size], sampling, generators
            )
            for row, (token, log_prob) in enumerate(zip(chosen.tolist(), chosen_log_probs.tolist(), strict=True)):
                if not reasons[row]:
                    tokens[row].append(token)
                    log_probs[row].append(log_prob)
                    reasons[row] = self._finish_reason(tokens[row], stop_ids, sampling)
            ids, positions = chosen[:, None], positions[:, -1:] + 1
            mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], dim=1)
        return [
            Completion(t, lp if sampling.log_probs else [], reason)
            for t, lp, reason in zip(tokens, log_probs, reasons, strict=True)
        ]

    def _finish_reason(self, tokens: list[int], stop_ids: set[int], sampling: SamplingOptions) -> str:
        if tokens[-1] in stop_ids:
            return "stop"
        if sampling.stop and any(word in self._tokenizer.decode(tokens) for word in sampling.stop):
            return "stop"
        return "length" if len(tokens) == sampling.max_tokens else ""

    def connect(self, info: Mapping[str, Any], *, timeout_s: float) -> None:
        raise ValueError("the hf engine takes its weights through the shm transfer, which needs no meeting")

    def update_weights(self, update: WeightUpdate, *, timeout_s: float) -> None:
        self._next_part = check_part(update, self._next_part)
        tensors = read_part(**update.payload)
        unexpected = self._model.load_state_dict(tensors, strict=False).unexpected_keys
        self._loaded = (self._loaded if update.part else set()) | set(tensors)
        if update.last:
            missing = sorted(self._model.state_dict().keys() - self._loaded)
            if missing or unexpected:
                raise ValueError(f"the actor's update lacks {missing[:5]} and has unknown {unexpected[:5]}")
            self.weight_version = update.version

    def sleep(self, *, timeout_s: float) -> None:
        if self.settings.sleeps:
            self._model.to("cpu")

    def wake_up(self, part: str, *, timeout_s: float) -> None:
        if self.settings.sleeps:
            self._model.to(self._device)

    def shutdown(self) -> None:
        self._model = None


def sample(
    logits: torch.Tensor, sampling: SamplingOptions, generators: Sequence[torch.Generator | None]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token a row; logits [B, V] float32 → ids [B], log-probs [B] of the distribution drawn from.

    The exponential race: with E_v ~ Exp(1) independent, argmax_v p_v / E_v has distribution p.
    """
    if sampling.temperature == 0:
        log_probs = logits.log_softmax(-1)
        chosen = log_probs.argmax(-1)
    else:
        log_probs = keep_likeliest(logits / sampling.temperature, sampling.top_k, sampling.top_p).log_softmax(-1)
        noise = torch.empty_like(log_probs).exponential_()
        for row, generator in enumerate(generators):
            if generator is not None:
                noise[row].exponential_(generator=generator)
        chosen = (log_probs - noise.log()).argmax(-1)
    return chosen, log_probs.gather(-1, chosen[:, None])[:, 0]


def keep_likeliest(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Set to -inf what is not among the `top_k` likeliest, then not among the likeliest with mass `top_p` together."""
    ids = torch.empty(0, dtype=torch.long)  # of the text so far, which these two do not look at
    logits = TopKLogitsWarper(top_k)(ids, logits) if top_k > 0 else logits
    return TopPLogitsWarper(top_p)(ids, logits) if top_p < 1 else logits
