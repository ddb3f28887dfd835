"""The reward model on real ranks: its scores are those of the classifier that transformers loads from the folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from tiny import char_tokenizer, tiny_model, tiny_reward_model
from training import forward_pass, ragged_batch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from verl_lite.config import FSDPConfig, RewardModelBackboneConfig
from verl_lite.distributed.process_group import RankContext
from verl_lite.protocol import DataProto
from verl_lite.workers.reward_model import RewardModelWorker, Transcriber, judged_batch


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_reward_model(tmp_path_factory.mktemp("reward_model"))


def scores(context: RankContext, path: str, batch: DataProto, packed: bool, **cut: Any) -> list[float]:
    model = RewardModelBackboneConfig(path=path, use_remove_padding=packed, fsdp_config=FSDPConfig(dtype="float32"))
    worker = RewardModelWorker(context, model=model)
    assert not any(parameter.requires_grad for parameter in worker.engine.module.parameters())
    return forward_pass(worker.compute_scores, batch, context, **cut).batch["scores"][:, 0].tolist()


ROWS = [[5], [7, 8, 9, 4], [3, 2, 6, 5, 11, 12, 8], [9, 9]]


def expected(path: str, rows: list[list[int]]) -> list[float]:
    """Row by row, without padding: nothing that could go wrong with it."""
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    with torch.no_grad():
        return [model(input_ids=torch.tensor([row])).logits.item() for row in rows]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("cut", [{"micro_batch_rows": 3}, {"max_token_len": 8}])
def test_a_row_scores_what_the_classifier_says_at_its_last_token(
    packed: bool, cut: dict[str, int], two_ranks: Ranks, path: str
) -> None:
    wanted = expected(path, ROWS)
    assert max(wanted) - min(wanted) > 0.1
    for of_rank in two_ranks.run(scores, path, judged_batch(ROWS), packed, **cut):
        assert of_rank == pytest.approx(wanted, abs=1e-5)


def test_fewer_rows_than_ranks(two_ranks: Ranks, path: str) -> None:
    row = [7, 8, 9]
    assert two_ranks.run(scores, path, judged_batch([row]), True, micro_batch_rows=4)[0] == pytest.approx(
        expected(path, [row]), abs=1e-5
    )


def test_a_language_model_is_no_reward_model(two_ranks: Ranks, tmp_path: Path) -> None:
    language_model = tiny_model(tmp_path / "lm")
    with pytest.raises(RuntimeError, match="has no head `score` of one output"):
        two_ranks.run(scores, language_model, judged_batch([[5]]), True, micro_batch_rows=4)


def test_the_policys_tokens_are_read_as_they_are_where_the_tokenizer_is_the_same() -> None:
    batch = ragged_batch(6)
    judged = Transcriber(None, None).transcribe(batch)  # type: ignore[arg-type]
    for row, (ids, mask) in enumerate(zip(batch.batch["input_ids"], batch.batch["attention_mask"].bool(), strict=True)):
        own = judged.batch["attention_mask"][row].bool()
        assert judged.batch["input_ids"][row][own].tolist() == ids[mask].tolist()
    assert not judged.batch["attention_mask"][:, -1].any()
    assert judged.batch["response_mask"].tolist() == [[1]] * 6


def test_another_tokenizer_reads_the_chat_under_its_own_template(tmp_path: Path) -> None:
    """The policy wrote "12+34=" → "46<eos>"; the judge has other token ids and another template."""
    policy = AutoTokenizer.from_pretrained(char_tokenizer(tmp_path / "policy"))
    own = AutoTokenizer.from_pretrained(tiny_reward_model(tmp_path / "own", own_tokenizer=True))
    prompt, response = (policy(text, add_special_tokens=False)["input_ids"] for text in ("12+34=", "46<eos>"))
    assert own("12+34=", add_special_tokens=False)["input_ids"] != prompt
    batch = DataProto.from_dict(
        {
            "input_ids": torch.tensor([[0, *prompt, *response, 0]]),
            "attention_mask": torch.tensor([[0] + [1] * 9 + [0]]),
            "responses": torch.tensor([[*response, 0]]),
        },
        {"raw_prompt": [[{"role": "user", "content": "12+34="}]]},
    )
    judged = Transcriber(policy, own).transcribe(batch)
    real = judged.batch["attention_mask"][0].bool()
    assert own.decode(judged.batch["input_ids"][0][real]) == "#12+34=<eos>*46<eos>"
