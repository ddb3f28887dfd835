"""vLLM behind the engine contract: AsyncLLM, whose engine core is a child process of ours.

Environment variables are set before vLLM is imported, so one process holds one engine.
"""

from __future__ import annotations

import asyncio
import difflib
import itertools
import logging
import os
import re
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import psutil

from verl_lite.distributed.deaths import ProcessDied, describe_exit, oom_kills
from verl_lite.distributed.watchdog import shared_memory_of
from verl_lite.rollout.engine import (
    Completion,
    EngineSettings,
    GenerationRequest,
    SamplingOptions,
    check_part,
    check_requests,
)
from verl_lite.rollout.weight_transfer import WeightUpdate

logger = logging.getLogger(__name__)
T = TypeVar("T")

_BACKENDS = {"shm": "verl_lite_shm", "ipc": "verl_lite_ipc", "nccl": "nccl"}
_POLL_S = 0.5  # between two looks at whether the engine's process is alive: vLLM's control calls do not notice
_ECHO = "engine core exited unexpectedly"  # the first of many lines with which vLLM's client takes itself down
_CPU_BLOCK_TOKENS = 32  # the kernels want a multiple of 32; small blocks share short prompts and waste less


class VllmEngine:
    """See `engine.Engine`."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.weight_version: int | None = None
        self._next_part = 0
        self._request_ids = itertools.count()
        self._oom_kills = oom_kills()
        self._cores: list[Any] = []  # the engine's processes
        self._segments: set[Path] = set()  # what they hold in shared memory
        os.environ.update(_environment(settings))
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True, name="vllm-client").start()
        try:
            self._llm: Any = self._run(self._start(), settings.start_timeout_s, "start the engine")
        except RuntimeError as error:
            code = re.search(r"Failed core proc.*: (-?\d+)\}", str(error))
            if code is None:
                raise
            ending = describe_exit(int(code[1]), self._oom_kills)
            raise ProcessDied(f"while vLLM started, its engine process {ending}") from None
        self._cores = list(self._llm.engine_core.resources.engine_manager.processes)
        self._segments = _shared_memory()

    async def _start(self) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        settings = self.settings
        options = _engine_options(settings)
        known = {field.name for field in fields(AsyncEngineArgs)}
        for name in options.keys() - known:
            near = difflib.get_close_matches(name, known, n=3)
            raise ValueError(f"actor_rollout_ref.rollout.engine_kwargs.vllm.{name}: unknown to vLLM; near: {near}")
        config = AsyncEngineArgs(**options).create_engine_config()
        if settings.device == "cpu" and config.cache_config.kv_cache_memory_bytes is None:
            config.cache_config.kv_cache_memory_bytes = _cpu_kv_cache_bytes(settings, config)
        llm = AsyncLLM.from_vllm_config(config, disable_log_stats=True)
        if settings.vocab_size < config.model_config.get_vocab_size():
            await llm.collective_rpc("mask_vocabulary", args=(settings.vocab_size,))
        return llm

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: SamplingOptions, *, timeout_s: float
    ) -> list[list[Completion]]:
        check_requests(requests, sampling, self.settings.max_model_len)
        what = f"generate {len(requests)} × {sampling.n} responses"
        return self._run(self._generate(requests, sampling), timeout_s, what)

    async def _generate(
        self, requests: Sequence[GenerationRequest], sampling: SamplingOptions
    ) -> list[list[Completion]]:
        async with asyncio.TaskGroup() as group:  # one failure cancels the others
            tasks = [group.create_task(self._complete(request, sampling)) for request in requests]
        return [task.result() for task in tasks]

    async def _complete(self, request: GenerationRequest, sampling: SamplingOptions) -> list[Completion]:
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        greedy = sampling.temperature == 0
        eos = () if sampling.ignore_eos else self.settings.eos_token_ids
        params = SamplingParams(
            n=1 if greedy else sampling.n,  # vLLM refuses n equal answers
            temperature=sampling.temperature,
            top_p=1.0 if greedy else sampling.top_p,
            top_k=0 if greedy else sampling.top_k,
            max_tokens=sampling.max_tokens,
            stop=list(sampling.stop),
            stop_token_ids=[*eos, *sampling.stop_token_ids],
            ignore_eos=True,  # vLLM's own idea of the end token: ours are all in stop_token_ids
            seed=request.seed,
            logprobs=0 if sampling.log_probs else None,  # 0: of the chosen token alone
            flat_logprobs=True,
            detokenize=bool(sampling.stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = TokensPrompt(prompt_token_ids=request.prompt_ids)
        outputs: list[Any] = []
        async for output in self._llm.generate(prompt, params, request_id=str(next(self._request_ids))):
            outputs = output.outputs
        completions = [
            Completion(list(o.token_ids), list(o.logprobs.logprobs) if sampling.log_probs else [], o.finish_reason)
            for o in outputs
        ]
        return completions * sampling.n if greedy else completions

    def connect(self, info: Mapping[str, Any], *, timeout_s: float) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        call = self._llm.init_weight_transfer_engine(WeightTransferInitRequest(dict(info)))
        self._run(call, timeout_s, "meet the trainer")

    def update_weights(self, update: WeightUpdate, *, timeout_s: float) -> None:
        following = check_part(update, self._next_part)
        self._run(self._update(update), timeout_s, f"take part {update.part} of weights version {update.version}")
        self._next_part = following
        if update.last:
            self.weight_version = update.version

    async def _update(self, update: WeightUpdate) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        if update.part == 0:
            await self._llm.start_weight_update()
        await self._llm.update_weights(WeightTransferUpdateRequest(update.payload))
        if update.last:
            await self._llm.finish_weight_update(str(update.version))
            if not await self._llm.reset_prefix_cache():  # keys and values of the old weights
                raise RuntimeError("vLLM kept its prefix cache after a weight update: requests are still running")

    def sleep(self, *, timeout_s: float) -> None:
        if self.settings.sleeps:
            self._run(self._llm.sleep(level=1), timeout_s, "fall asleep")

    def wake_up(self, part: str, *, timeout_s: float) -> None:
        if self.settings.sleeps:
            self._run(self._llm.wake_up(tags=[part]), timeout_s, f"wake up ({part})")

    def shutdown(self) -> None:
        async def stop() -> None:
            self._llm.shutdown(timeout=0)  # nothing to save; the polite way takes 5 s
            self._llm = None

        self._cores = []  # they are about to end
        segments = self._segments | _shared_memory()
        self._run(stop(), 60, "shut down")
        _remove(segments)
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self, call: Coroutine[Any, Any, T], timeout_s: float, what: str) -> T:
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        deadline = time.monotonic() + timeout_s
        try:
            while True:
                try:
                    return future.result(max(0.0, min(_POLL_S, deadline - time.monotonic())))
                except FutureTimeout:
                    if future.done():  # the call's own
                        raise
                self._check_alive()
                if time.monotonic() > deadline:
                    raise TimeoutError(f"vLLM did not {what} within {timeout_s:g} s")
        except BaseExceptionGroup as group:
            self._check_alive(group.exceptions[0])
            raise group.exceptions[0] from group
        except Exception as error:
            self._check_alive(error)
            raise
        finally:
            future.cancel()

    def _check_alive(self, error: BaseException | None = None) -> None:
        """Raise `ProcessDied` if the engine's process has ended, or says that it will: that may have caused `error`."""
        for core in self._cores:
            ending = None
            if type(error).__name__ == "EngineDeadError":  # it says so before it ends, and can be long about ending
                core.join(5)
                if core.exitcode is None:
                    core.kill()
                    ending = "said that it cannot go on, perhaps because a process of its own had ended"
            if core.exitcode is not None or ending:
                _remove(self._segments)
                ending = ending or describe_exit(core.exitcode, self._oom_kills)
                raise ProcessDied(f"vLLM's engine process (pid {core.pid}) {ending}", _ECHO) from None


def _shared_memory() -> set[Path]:
    """What this process and its children hold."""
    children = psutil.Process().children(recursive=True)
    return shared_memory_of([os.getpid(), *(child.pid for child in children)])


def _remove(segments: set[Path]) -> None:
    for segment in segments:
        segment.unlink(missing_ok=True)


def core_lists(allowed: Sequence[int], local_replica: int, local_replicas: int, tensor_parallel_size: int) -> str:
    """The cores of one engine's ranks, as vLLM takes them: "0,1" or, for two ranks, "0|1".

    Replicas share the allowed cores out in contiguous lists, ranks share their replica's; where there are fewer cores
    than takers they double up, but nobody gets a core the process may not use.
    """

    def share(cores: Sequence[int], index: int, takers: int) -> Sequence[int]:
        if len(cores) < takers:
            return [cores[index % len(cores)]]
        return cores[index * len(cores) // takers : (index + 1) * len(cores) // takers]

    mine = share(sorted(allowed), local_replica, local_replicas)
    ranks = [share(mine, rank, tensor_parallel_size) for rank in range(tensor_parallel_size)]
    return "|".join(",".join(map(str, cores)) for cores in ranks)


def _environment(settings: EngineSettings) -> dict[str, str]:
    environment = {
        "VERL_LITE_ENGINE_OWNER_PID": str(os.getpid()),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",  # pickles on its control channel
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_ENGINE_READY_TIMEOUT_S": str(int(settings.start_timeout_s)),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if os.path.isdir(settings.model_path):
        environment["HF_HUB_OFFLINE"] = "1"
    if settings.device == "cpu":
        cores = core_lists(
            list(os.sched_getaffinity(0)),
            settings.local_replica,
            settings.local_replicas,
            settings.tensor_parallel_size,
        )
        environment |= {
            "VLLM_CPU_OMP_THREADS_BIND": cores,
            "OMP_WAIT_POLICY": "PASSIVE",  # active waiting starves the other processes on these cores
            # oneDNN keeps the kernels of so many shapes; its own 1024 grow to 100 MiB in the first hundreds of steps.
            "ONEDNN_PRIMITIVE_CACHE_CAPACITY": os.environ.get("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256"),
        }
        if settings.enforce_eager:
            environment["TORCHDYNAMO_DISABLE"] = "1"  # the sampler's compiled helper costs 22 s at the first token
    return environment


def _engine_options(settings: EngineSettings) -> dict[str, Any]:
    from vllm.config.weight_transfer import WeightTransferConfig

    overrides = {key: value for key, value in settings.override_config.items() if key != "attn_implementation"}
    options: dict[str, Any] = {
        "model": settings.model_path,
        "tokenizer": settings.tokenizer_path or settings.model_path,
        "skip_tokenizer_init": settings.tokenizer_path is None,
        "trust_remote_code": settings.trust_remote_code,
        "load_format": "safetensors",  # never a pickle; engine_kwargs.vllm.load_format=… for other formats
        "hf_overrides": overrides,
        "dtype": settings.dtype,
        "generation_config": "vllm",  # the model's own sampling defaults would change the policy
        "logprobs_mode": "processed_logprobs",
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "enforce_eager": settings.enforce_eager,
        "enable_prefix_caching": settings.enable_prefix_caching,
        "enable_chunked_prefill": settings.enable_chunked_prefill,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "weight_transfer_config": WeightTransferConfig(backend=_BACKENDS[settings.transfer_backend]),
        "worker_extension_cls": "verl_lite.rollout.vllm_worker.WorkerExtension",
    }
    if settings.tensor_parallel_size > 1 or settings.device == "cpu":
        options["distributed_executor_backend"] = "mp"  # inside a Ray actor vLLM might choose Ray
    if settings.device == "cpu":
        options["block_size"] = _CPU_BLOCK_TOKENS
    else:
        options |= {
            "gpu_memory_utilization": settings.gpu_memory_utilization,
            "enable_sleep_mode": settings.sleeps,
        }
    return options | dict(settings.engine_kwargs)


def _cpu_kv_cache_bytes(settings: EngineSettings, config: Any) -> int:
    """Room for `max_num_seqs` sequences of full length, but at most the set share of the memory that is free.

    vLLM's own default is a share of all memory for each engine, refused when it isn't free.
    """
    model, parallel = config.model_config, config.parallel_config
    block = config.cache_config.block_size
    per_token = (
        2 * model.get_num_layers(parallel) * model.get_num_kv_heads(parallel) * model.get_head_size()
        * model.dtype.itemsize
    )  # fmt: skip
    blocks = settings.max_num_seqs * -(-settings.max_model_len // block) + 1
    wanted = blocks * block * per_token
    engines = settings.local_replicas * settings.tensor_parallel_size
    allowed = int(psutil.virtual_memory().available * settings.gpu_memory_utilization / engines)
    if allowed < wanted:
        logger.info(
            "KV cache of %.1f GiB instead of %.1f (rollout.max_num_seqs × max_model_len): rollout."
            "gpu_memory_utilization=%g of the free memory", allowed / 2**30, wanted / 2**30,
            settings.gpu_memory_utilization,
        )  # fmt: skip
    return min(wanted, allowed)
