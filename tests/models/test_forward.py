"""Log-probs, entropies and values of response tokens against a plain forward pass with whole logits."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tiny import CHARACTERS
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

from verl_lite.config import ModelConfig
from verl_lite.models import forward
from verl_lite.models.forward import PolicyModel, ValueModel, position_ids_from_mask, prepare_inputs, to_rows
from verl_lite.models.loading import enable_gradient_checkpointing, load_causal_lm, load_value_model

VOCABULARY = len(CHARACTERS) + 2


def ragged_rows() -> tuple[Tensor, Tensor, Tensor]:
    """6 rows of prompt 4 + response 5: padding on both sides, a hole in a mask, a row without any loss token."""
    torch.manual_seed(0)
    input_ids = torch.randint(2, 70, (6, 9))
    prompts, responses = torch.tensor([4, 2, 3, 1, 4, 2]), torch.tensor([5, 1, 4, 2, 3, 5])
    columns = torch.arange(9)
    attention_mask = ((columns >= 4 - prompts[:, None]) & (columns < 4 + responses[:, None])).long()
    response_mask = attention_mask[:, 4:].clone()
    response_mask[2, 1] = 0
    response_mask[4] = 0
    return input_ids, attention_mask, response_mask


def plain_log_probs(lm: nn.Module, input_ids: Tensor, attention_mask: Tensor, width: int, temperature: float) -> Tensor:
    """[B, width, V] of the response positions, row by row and without padding."""
    rows = []
    for ids, mask in zip(input_ids, attention_mask, strict=True):
        real = mask.bool()
        logits = lm(input_ids=ids[real][None]).logits[0] / temperature
        padded = logits.new_zeros(len(ids), logits.shape[-1])
        padded[real] = logits.log_softmax(-1)
        rows.append(padded[-width - 1 : -1])
    return torch.stack(rows)


@pytest.fixture(scope="module")
def gpt2_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Absolute positions, and dropout of one half everywhere."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("gpt2")
    config = GPT2Config(
        vocab_size=80, n_embd=32, n_layer=2, n_head=2, n_positions=32, initializer_range=0.3,
        resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(path)
    return str(path)


def test_positions_count_from_the_first_real_token() -> None:
    assert position_ids_from_mask(torch.tensor([[0, 0, 1, 1, 1]])).tolist() == [[0, 0, 0, 1, 2]]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("architecture", ["qwen2", "gpt2"])
def test_log_probs_and_entropies_equal_a_plain_forward(
    architecture: str, packed: bool, tiny_model_path: str, gpt2_path: str
) -> None:
    path = {"qwen2": tiny_model_path, "gpt2": gpt2_path}[architecture]
    input_ids, attention_mask, response_mask = ragged_rows()
    model = PolicyModel(
        load_causal_lm(ModelConfig(path=path, use_remove_padding=packed), torch.float32), temperature=0.7
    )
    log_probs, entropies = model(
        prepare_inputs(input_ids, attention_mask, response_mask, packed=packed), with_entropy=True
    )

    plain = load_causal_lm(ModelConfig(path=path, use_remove_padding=False), torch.float32)
    expected = plain_log_probs(plain, input_ids, attention_mask, 5, temperature=0.7)
    # The log-prob of response token t is read at the position before it: for t = 0 at the prompt's last token.
    taken = expected.gather(-1, input_ids[:, 4:, None])[..., 0] * response_mask
    torch.testing.assert_close(to_rows(log_probs, response_mask), taken, atol=1e-5, rtol=0)
    entropy = -(expected.exp() * expected).sum(-1) * response_mask
    torch.testing.assert_close(to_rows(entropies, response_mask), entropy, atol=1e-5, rtol=0)


def test_packing_gives_the_gradients_of_padding(tiny_model_path: str) -> None:
    input_ids, attention_mask, response_mask = ragged_rows()
    gradients = []
    for packed in (False, True):
        lm = load_causal_lm(ModelConfig(path=tiny_model_path, use_remove_padding=packed), torch.float32)
        log_probs, entropies = PolicyModel(lm, temperature=1.0)(
            prepare_inputs(input_ids, attention_mask, response_mask, packed=packed), with_entropy=True
        )
        (log_probs.square().sum() + entropies.sum()).backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in lm.parameters()]))
    assert (gradients[0] - gradients[1]).norm() < 1e-5 * gradients[0].norm()


def test_packing_keeps_sliding_windows_and_grouped_heads(tmp_path: Path) -> None:
    config = Qwen2Config(
        vocab_size=80, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2, sliding_window=3, use_sliding_window=True, max_window_layers=0,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    input_ids, attention_mask, response_mask = ragged_rows()
    results = []
    for packed in (False, True):
        lm = load_causal_lm(ModelConfig(path=str(tmp_path), use_remove_padding=packed), torch.float32)
        assert lm.config.layer_types == ["sliding_attention"] * 2
        inputs = prepare_inputs(input_ids, attention_mask, response_mask, packed=packed)
        results.append(PolicyModel(lm, temperature=1.0)(inputs, with_entropy=False)[0])
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=0)


def test_packing_keeps_an_architectures_own_scale_of_attention(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "granite", vocab_size=80, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, initializer_range=0.5, attention_multiplier=1.0,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    results = []
    for packed in (False, True):
        lm = load_causal_lm(ModelConfig(path=str(tmp_path), use_remove_padding=packed), torch.float32)
        inputs = prepare_inputs(*ragged_rows(), packed=packed)
        results.append(PolicyModel(lm, temperature=1.0)(inputs, with_entropy=False)[0])
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=0)


def test_chunks_change_neither_values_nor_gradients(tiny_model_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    input_ids, attention_mask, response_mask = ragged_rows()
    inputs = prepare_inputs(input_ids, attention_mask, response_mask, packed=False)
    results = []
    for tokens_per_chunk in (1000, 4):
        monkeypatch.setattr(forward, "LOGITS_PER_CHUNK", tokens_per_chunk * VOCABULARY)
        lm = load_causal_lm(ModelConfig(path=tiny_model_path, use_remove_padding=False), torch.float32)
        log_probs, entropies = PolicyModel(lm, temperature=1.0)(inputs, with_entropy=True)
        (log_probs.sum() + entropies.sum()).backward()
        results.append((log_probs, entropies, lm.get_input_embeddings().weight.grad))
    for one, many in zip(*results, strict=True):
        torch.testing.assert_close(one, many, atol=1e-5, rtol=1e-5)


def test_the_whole_logits_are_never_kept(tiny_model_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "LOGITS_PER_CHUNK", 4 * VOCABULARY)
    lm = load_causal_lm(ModelConfig(path=tiny_model_path, use_remove_padding=False), torch.float32)
    inputs = prepare_inputs(*ragged_rows(), packed=False)
    kept: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tuple(tensor.shape)) or tensor, lambda t: t
    ):
        PolicyModel(lm, temperature=1.0)(inputs, with_entropy=True)
    # The head's weight is [VOCABULARY, hidden]; nothing kept for backward is [tokens, VOCABULARY].
    assert not [shape for shape in kept if len(shape) > 1 and shape[-1] == VOCABULARY]


def test_no_more_logits_than_a_chunk_may_hold_exist_at_a_time(
    tiny_model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "LOGITS_PER_CHUNK", 8 * VOCABULARY - 1)
    lm = load_causal_lm(ModelConfig(path=tiny_model_path, use_remove_padding=False), torch.float32)
    model, chunks = PolicyModel(lm, temperature=1.0), []
    head = model._head
    monkeypatch.setattr(model, "_head", lambda hidden, *rest: (chunks.append(len(hidden)), head(hidden, *rest))[1])
    with torch.no_grad():
        model(prepare_inputs(*ragged_rows(), packed=False), with_entropy=False)
    # Rows of 5, 1, 3 (one of 4 masked), 2, 0 and 5 tokens: 16 in chunks of at most 7.
    assert chunks == [7, 7, 2]


def test_entropy_is_that_of_the_tempered_distribution() -> None:
    # softmax([2, 0] / 2) = [0.731059, 0.268941]: -sum p log p = 0.582203; at temperature 1 it would be 0.365334.
    for temperature, expected in ((2.0, 0.582203), (1.0, 0.365334)):
        model = PolicyModel(_TwoWords(), temperature=temperature)
        mask = torch.ones(1, 1)
        inputs = prepare_inputs(torch.zeros(1, 2, dtype=torch.long), torch.ones(1, 2), mask, packed=False)
        _, entropies = model(inputs, with_entropy=True)
        assert entropies.item() == pytest.approx(expected, abs=1e-6)


class _TwoWords(nn.Module):
    """Logits [2, 0] everywhere."""

    class Config:
        _attn_implementation = "sdpa"

        def get_text_config(self) -> _TwoWords.Config:
            return self

    def __init__(self) -> None:
        super().__init__()
        self.config = self.Config()
        self.base_model = self.last_hidden_state = None
        self.head = nn.Linear(1, 2, bias=False)
        self.head.weight.data = torch.tensor([[2.0], [0.0]])
        self.base_model = lambda input_ids, **_: type(
            "Output", (), {"last_hidden_state": torch.ones(*input_ids.shape, 1)}
        )
        self.base_model.config = self.config

    def get_output_embeddings(self) -> nn.Module:
        return self.head


@pytest.mark.parametrize(
    ("architecture", "field", "scale"),
    [("granite", "logits_scaling", 4.0), ("hyperclovax", "logits_scaling", 0.25), ("cohere", "logit_scale", 0.25),
     ("falcon_h1", "lm_head_multiplier", 0.25), ("gemma2", "final_logit_softcapping", 1.0)],
)  # fmt: skip
def test_what_an_architecture_does_to_its_logits_is_done_here_too(architecture: str, field: str, scale: float) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        architecture, vocab_size=80, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, mamba_d_ssm=32, mamba_n_heads=2, mamba_d_head=16, initializer_range=0.5,
        pad_token_id=0, bos_token_id=0, eos_token_id=1, **{field: 0.25},
    )  # fmt: skip
    lm = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    policy, ids = PolicyModel(lm, temperature=1.0), torch.arange(2, 12)[None]
    assert policy.logit_scale == scale
    inputs = prepare_inputs(ids, torch.ones(1, 10), torch.ones(1, 4), packed=False)
    log_probs, _ = policy(inputs, with_entropy=False)
    expected = plain_log_probs(lm, ids, torch.ones(1, 10), 4, 1.0)[0].gather(-1, ids[0, 6:, None])[:, 0]
    torch.testing.assert_close(log_probs, expected, atol=1e-5, rtol=1e-5)


def test_ids_beyond_the_tokenizer_get_no_probability(tiny_model_path: str) -> None:
    input_ids, attention_mask, response_mask = ragged_rows()
    lm = load_causal_lm(ModelConfig(path=tiny_model_path, use_remove_padding=False), torch.float32)
    inputs = prepare_inputs(input_ids, attention_mask, response_mask, packed=False)
    log_probs, entropies = PolicyModel(lm, temperature=1.0, vocab_size=70)(inputs, with_entropy=True)
    whole = plain_log_probs(lm, input_ids, attention_mask, 5, temperature=1.0)
    kept = whole[..., :70].log_softmax(-1)
    expected = kept.gather(-1, input_ids[:, 4:, None])[..., 0][response_mask.bool()]
    torch.testing.assert_close(log_probs, expected, atol=1e-5, rtol=0)
    assert (entropies < math.log(70)).all()


def test_a_batch_without_loss_tokens_has_zero_gradients_everywhere(tiny_model_path: str) -> None:
    input_ids, attention_mask, response_mask = ragged_rows()
    for packed in (False, True):
        lm = load_causal_lm(ModelConfig(path=tiny_model_path, use_remove_padding=packed), torch.float32)
        inputs = prepare_inputs(input_ids[:1], attention_mask[:1], response_mask[4:5], packed=packed)
        log_probs, _ = PolicyModel(lm, temperature=1.0)(inputs, with_entropy=False)
        to_rows(log_probs, response_mask[4:5]).sum().backward()
        assert all(parameter.grad is not None and not parameter.grad.any() for parameter in lm.parameters())


def test_left_padding_changes_nothing_for_absolute_positions(gpt2_path: str) -> None:
    model = PolicyModel(
        load_causal_lm(ModelConfig(path=gpt2_path, use_remove_padding=False), torch.float32), temperature=1.0
    )
    critic = ValueModel(model.lm.base_model)
    nn.init.normal_(critic.score.weight)
    torch.manual_seed(1)
    row = torch.randint(2, 70, (1, 7))  # prompt 3, response 4
    mask = torch.ones(1, 4)
    alone = prepare_inputs(row, torch.ones(1, 7), mask, packed=False)
    longer = torch.randint(2, 70, (1, 9))  # prompt 5, response 4
    padded = torch.cat([torch.cat([torch.zeros(1, 2, dtype=torch.long), row], 1), longer])
    attention_mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1] * 9])
    together = prepare_inputs(padded, attention_mask, mask.expand(2, 4), packed=False)
    torch.testing.assert_close(
        model(together, with_entropy=False)[0][:4], model(alone, with_entropy=False)[0], atol=1e-5, rtol=0
    )
    torch.testing.assert_close(critic(together)[:4], critic(alone), atol=1e-5, rtol=0)


def test_dropout_is_off_and_gradient_checkpointing_on_in_the_same_model(gpt2_path: str) -> None:
    inputs = prepare_inputs(*ragged_rows(), packed=False)
    kept_sizes, gradients = [], []
    for checkpointing in (False, True):
        lm = load_causal_lm(ModelConfig(path=gpt2_path, use_remove_padding=False), torch.float32)
        if checkpointing:
            enable_gradient_checkpointing(lm)
        model = PolicyModel(lm, temperature=1.0)
        kept: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t.numel()) or t, lambda t: t):
            log_probs, _ = model(inputs, with_entropy=False)
        kept_sizes.append(sum(kept))
        assert torch.equal(log_probs, model(inputs, with_entropy=False)[0])  # bit by bit: nothing was dropped
        log_probs.sum().backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in lm.parameters()]))
    assert kept_sizes[1] < 0.5 * kept_sizes[0]
    torch.testing.assert_close(gradients[0], gradients[1])


def test_values_are_read_before_each_response_token(tiny_model_path: str) -> None:
    input_ids, attention_mask, response_mask = ragged_rows()
    results = []
    for packed in (False, True):
        model = load_value_model(ModelConfig(path=tiny_model_path, use_remove_padding=packed), torch.float32)
        nn.init.constant_(model.score.weight, 0.5)
        nn.init.constant_(model.score.bias, 1.0)
        results.append(model(prepare_inputs(input_ids, attention_mask, response_mask, packed=packed)))
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=0)
    # Row 0 has no padding: value of its first token = 0.5 · sum of the hidden state at column 3 + 1.
    hidden = model.backbone.__class__.from_pretrained(tiny_model_path)(input_ids[:1]).last_hidden_state
    assert results[0][0].item() == pytest.approx(0.5 * hidden[0, 3].sum().item() + 1, abs=1e-4)
