"""The engine contract, run against every engine: vLLM and transformers, tied and untied weights."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tiny import CHARACTERS, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_lite.plugins import resolve
from verl_lite.rollout import ENGINES
from verl_lite.rollout.engine import Engine, EngineSettings, GenerationRequest, SamplingOptions, model_problems
from verl_lite.rollout.weight_transfer import FilePublisher

KNOWN_IDS = len(CHARACTERS) + 2
MODEL_IDS = 128  # the embedding is padded beyond the tokenizer, as in many real models
TIMEOUT_S = 60.0


class Served(NamedTuple):
    engine: Engine
    model: Any  # the same weights, for a plain forward


@pytest.fixture(scope="module", params=["hf-tied", "hf-untied", "vllm-tied", "vllm-untied"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    name, tying = request.param.split("-")
    path = tiny_model(tmp_path_factory.mktemp(request.param), tie=tying == "tied", vocab_size=MODEL_IDS)
    settings = EngineSettings(
        model_path=path,
        tokenizer_path=path,
        device="cpu",
        dtype="float32",
        max_model_len=112,
        eos_token_ids=(1,),
        vocab_size=KNOWN_IDS,
        start_timeout_s=240,
        enforce_eager=True,
        max_num_seqs=32,
    )
    engine = resolve(name, ENGINES, key="rollout.name")(settings)
    yield Served(engine, AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval())
    engine.shutdown()


versions = itertools.count()


def move_every_parameter(served: Served, scale: float = 0.05) -> int:
    with torch.no_grad():
        for parameter in served.model.parameters():
            parameter.add_(torch.randn_like(parameter) * scale)
    publisher = FilePublisher(rank=0, dtype=torch.float32, checksums=True, part_bytes=40_000)
    version = next(versions)
    update = publisher.publish(served.model.state_dict(), version)
    assert update is not None and not update.last, "a part is smaller than the model: the loop over parts is tested too"
    while update is not None:
        served.engine.update_weights(update, timeout_s=TIMEOUT_S)
        update = publisher.next_part()
    publisher.release()
    return version


def plain_log_probs(served: Served, prompt: list[int], tokens: list[int], sampling: SamplingOptions) -> list[float]:
    """One forward without cache, one position after the other; the distribution cut off by sorting in Python."""
    with torch.no_grad():
        logits = served.model(torch.tensor([prompt + tokens])).logits[0].double()
    result = []
    for t, token in enumerate(tokens):
        row = logits[len(prompt) - 1 + t, :KNOWN_IDS] / (sampling.temperature or 1.0)
        kept = sorted(range(KNOWN_IDS), key=lambda v: -row[v].item())
        kept = kept[: sampling.top_k] if sampling.top_k > 0 else kept
        probabilities = torch.softmax(row[kept], dim=0).tolist()
        mass, count = 0.0, 0
        while mass < sampling.top_p and count < len(kept):
            mass += probabilities[count]
            count += 1
        result.append(torch.log_softmax(row[kept[:count]], dim=0)[kept.index(token)].item())
    return result


def assert_log_probs_are_those_of_the_model(served: Served, sampling: SamplingOptions) -> None:
    requests = [GenerationRequest(f"0-{i}", [5 + i, 9, 14], seed=1000 * i) for i in range(4)]
    for request, group in zip(requests, served.engine.generate(requests, sampling, timeout_s=TIMEOUT_S), strict=True):
        assert len(group) == sampling.n
        for completion in group:
            assert completion.log_probs == pytest.approx(
                plain_log_probs(served, request.prompt_ids, completion.token_ids, sampling), abs=1e-4
            )


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingOptions(n=4, max_tokens=12),
        SamplingOptions(n=2, max_tokens=12, temperature=0.7),
        SamplingOptions(n=2, max_tokens=12, temperature=1.3, top_k=5),
        SamplingOptions(n=2, max_tokens=12, top_p=0.8, top_k=20),
        SamplingOptions(n=1, max_tokens=12, temperature=0.0),
    ],
)
def test_log_probs_are_those_of_the_distribution_the_token_was_drawn_from(
    served: Served, sampling: SamplingOptions
) -> None:
    assert_log_probs_are_those_of_the_model(served, sampling)


def test_engine_has_the_new_weights_after_every_parameter_moved(served: Served) -> None:
    version = move_every_parameter(served)
    assert served.engine.weight_version == version
    assert_log_probs_are_those_of_the_model(served, SamplingOptions(n=4, max_tokens=12))


def test_update_drops_the_cached_prefix(served: Served) -> None:
    request = [GenerationRequest("0-0", [2 + i % 70 for i in range(100)])]
    greedy = SamplingOptions(temperature=0.0, max_tokens=8, ignore_eos=True)
    before = served.engine.generate(request, greedy, timeout_s=TIMEOUT_S)[0][0]
    assert served.engine.generate(request, greedy, timeout_s=TIMEOUT_S)[0][0].token_ids == before.token_ids
    move_every_parameter(served, scale=0.2)
    after = served.engine.generate(request, greedy, timeout_s=TIMEOUT_S)[0][0]
    expected = plain_log_probs(served, request[0].prompt_ids, after.token_ids, greedy)
    assert after.log_probs == pytest.approx(expected, abs=1e-4)
    assert after.log_probs != pytest.approx(before.log_probs, abs=1e-2)


def test_parts_out_of_order_are_refused(served: Served) -> None:
    held = served.engine.weight_version
    publisher = FilePublisher(rank=0, dtype=torch.float32, part_bytes=40_000)
    publisher.publish(served.model.state_dict(), 99)
    second = publisher.next_part()
    with pytest.raises(ValueError, match="got part 1, expected 0"):
        served.engine.update_weights(second, timeout_s=TIMEOUT_S)
    assert served.engine.weight_version == held


def tokens(served: Served, requests: list[GenerationRequest], sampling: SamplingOptions) -> list[list[list[int]]]:
    groups = served.engine.generate(requests, sampling, timeout_s=TIMEOUT_S)
    return [[completion.token_ids for completion in group] for group in groups]


def test_samples_depend_on_the_seed_alone_not_on_batch_or_order(served: Served) -> None:
    requests = [GenerationRequest(f"0-{i}", [3 + i, 8], seed=2**62 + 977 * i) for i in range(6)]
    sampling = SamplingOptions(n=3, max_tokens=10)
    together = tokens(served, requests, sampling)
    assert tokens(served, requests[::-1], sampling)[::-1] == together
    assert [tokens(served, [request], sampling)[0] for request in requests] == together


def test_responses_of_a_group_differ_and_equal_prompts_with_other_seeds_differ(served: Served) -> None:
    requests = [GenerationRequest("0-0", [7, 8], seed=5), GenerationRequest("0-1", [7, 8], seed=5_000_000)]
    groups = tokens(served, requests, SamplingOptions(n=4, max_tokens=10, ignore_eos=True))
    assert len({tuple(response) for group in groups for response in group}) == 8


def test_unseeded_samples_differ_between_calls(served: Served) -> None:
    sampling = SamplingOptions(n=2, max_tokens=10, ignore_eos=True)
    requests = [GenerationRequest("0-0", [7, 8])]
    assert tokens(served, requests, sampling) != tokens(served, requests, sampling)


def test_greedy_gives_n_equal_responses(served: Served) -> None:
    first, second = tokens(served, [GenerationRequest("0-0", [7, 8])], SamplingOptions(n=2, temperature=0.0))[0]
    assert first == second


def test_response_may_fill_the_length_limit_exactly(served: Served) -> None:
    request = GenerationRequest("0-0", [4] * 80)
    completion = served.engine.generate(
        [request], SamplingOptions(max_tokens=32, ignore_eos=True), timeout_s=TIMEOUT_S
    )[0][0]
    assert (len(completion.token_ids), completion.finish_reason) == (32, "length")


def test_prompt_and_response_beyond_the_limit_are_refused(served: Served) -> None:
    with pytest.raises(ValueError, match="0-7 has 81 tokens.*max_response_length=32.*max_model_len=112"):
        served.engine.generate(
            [GenerationRequest("0-7", [4] * 81)], SamplingOptions(max_tokens=32), timeout_s=TIMEOUT_S
        )


def test_end_token_ends_a_response_and_stays_in_it(served: Served) -> None:
    requests = [GenerationRequest(f"0-{i}", [3 + i], seed=i * 1000) for i in range(32)]
    completions = sum(served.engine.generate(requests, SamplingOptions(n=4, max_tokens=40), timeout_s=TIMEOUT_S), [])
    ended = [c for c in completions if c.finish_reason == "stop"]
    assert ended and all(c.token_ids[-1] == 1 and 1 not in c.token_ids[:-1] for c in ended)
    assert all(1 not in c.token_ids and len(c.token_ids) == 40 for c in completions if c.finish_reason == "length")
    assert all(len(c.log_probs) == len(c.token_ids) for c in completions)


def test_ids_the_tokenizer_does_not_know_are_never_sampled(served: Served) -> None:
    requests = [GenerationRequest(f"0-{i}", [3 + i], seed=i * 1000) for i in range(32)]
    groups = tokens(served, requests, SamplingOptions(n=4, max_tokens=20, temperature=2.0, ignore_eos=True))
    assert max(token for group in groups for response in group for token in response) < KNOWN_IDS


def test_stop_ids_and_stop_strings_end_a_response(served: Served) -> None:
    request = [GenerationRequest("0-0", [5, 6], seed=3)]
    free = tokens(served, request, SamplingOptions(max_tokens=12, ignore_eos=True))[0][0]
    cut = free[: free.index(free[4]) + 1]
    by_id = SamplingOptions(max_tokens=12, ignore_eos=True, stop_token_ids=(free[4],))
    assert tokens(served, request, by_id)[0][0] == cut
    text = AutoTokenizer.from_pretrained(served.engine.settings.tokenizer_path).decode([free[4]])  # type: ignore[attr-defined]
    by_text = SamplingOptions(max_tokens=12, ignore_eos=True, stop=(text,))
    assert tokens(served, request, by_text)[0][0] == cut


def test_without_log_probs_none_are_computed(served: Served) -> None:
    completion = served.engine.generate(
        [GenerationRequest("0-0", [5])], SamplingOptions(log_probs=False), timeout_s=TIMEOUT_S
    )[0][0]
    assert completion.log_probs == [] and completion.token_ids


def test_late_generation_raises_and_the_engine_goes_on(served: Served) -> None:
    with pytest.raises(TimeoutError):
        served.engine.generate(
            [GenerationRequest("0-0", [5])], SamplingOptions(n=8, max_tokens=100, ignore_eos=True), timeout_s=0.001
        )
    assert tokens(served, [GenerationRequest("0-0", [5])], SamplingOptions(max_tokens=2))[0][0]


def write_config(folder: Path, **config: Any) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_model_too_short_for_prompt_and_response_is_named_before_anything_loads(tmp_path: Path) -> None:
    path = write_config(tmp_path, max_position_embeddings=64, hidden_size=64, num_attention_heads=2)
    assert model_problems(path, engine="vllm", device="cpu", max_model_len=64, override_config={}) == []
    (problem,) = model_problems(path, engine="vllm", device="cpu", max_model_len=80, override_config={})
    assert "max_model_len=80" in problem and "max_position_embeddings=64" in problem


def test_attention_heads_vllm_cannot_run_on_cpu_are_named_before_anything_loads(tmp_path: Path) -> None:
    path = write_config(tmp_path, max_position_embeddings=64, hidden_size=32, num_attention_heads=2)
    (problem,) = model_problems(path, engine="vllm", device="cpu", max_model_len=64, override_config={})
    assert "heads of 16" in problem and "rollout.name=hf" in problem
    assert model_problems(path, engine="hf", device="cpu", max_model_len=64, override_config={}) == []
    assert model_problems(path, engine="vllm", device="cuda", max_model_len=64, override_config={}) == []
