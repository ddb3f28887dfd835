"""What is kept of the first mini-batch of a run that made no step because a number in it was NaN or infinite."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerBase

from verl_lite.batching import MiniBatch, Schedule
from verl_lite.distributed.fsdp import NotFinite
from verl_lite.protocol import DataProto
from verl_lite.workers.update import MiniBatchResult

MAX_BYTES = 64 << 20  # of the tensors written
SHOWN_NAMES = 3


def describe_first_skipped(
    results: Sequence[Sequence[Sequence[MiniBatchResult]]],
    schedules: Sequence[Schedule],
    batch: DataProto,
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
) -> str | None:
    """Write the rows of the first skipped mini-batch to `path`.jsonl and .safetensors, and say what was not finite.

    None if no mini-batch was skipped. results, schedules: by epoch, as `summarise_updates` takes them.
    """
    for schedule, ranks in zip(schedules, results, strict=True):
        for mini, outcomes in zip(schedule.mini_batches, zip(*ranks, strict=True), strict=True):
            if outcomes[0].outcome == "skipped":
                seen = [rank.not_finite or NotFinite() for rank in outcomes]
                rows = list(mini.rows)
                bad = rows_with_bad_loss(mini, seen)
                write_rows(path, batch[rows], [row in bad for row in rows], tokenizer)
                return f"{explain(batch[rows], seen, len(bad))}; its rows are in {path}.jsonl and .safetensors"
    return None


def rows_with_bad_loss(mini: MiniBatch, seen: Sequence[NotFinite]) -> set[int]:
    """The rows of the micro-batches whose loss was not finite; `seen`: by rank."""
    found: set[int] = set()
    for own, sizes, not_finite in zip(mini.rank_rows, mini.micro_sizes, seen, strict=True):
        for micro in not_finite.losses:
            start = sum(sizes[:micro])
            found |= set(own[start : start + sizes[micro]])
    return found


def explain(rows: DataProto, seen: Sequence[NotFinite], bad_rows: int) -> str:
    """What was NaN or infinite, the causes before their effects: what the update reads, weights, loss, gradient."""
    found = []
    for name, column in rows.batch.items():
        if column.is_floating_point() and (count := int((~column.isfinite()).any(-1).sum())):
            found.append(f"{name} of {count} of {len(rows)} rows")
    found += _names("the weights", [name for rank in seen for name in rank.parameters])
    if any(rank.losses for rank in seen):
        found.append(f"the loss of micro-batches with {bad_rows} of {len(rows)} rows")
    found += _names("the gradient of", [name for rank in seen for name in rank.gradients])
    return "not finite: " + (", then ".join(found) or "the norm of a gradient whose parts are finite")


def _names(what: str, names: Sequence[str]) -> list[str]:
    different = list(dict.fromkeys(names))
    more = f" and {len(different) - SHOWN_NAMES} more" if len(different) > SHOWN_NAMES else ""
    return [f"{what} {', '.join(different[:SHOWN_NAMES])}{more}"] if different else []


def write_rows(path: Path, rows: DataProto, bad_loss: Sequence[bool], tokenizer: PreTrainedTokenizerBase) -> None:
    """A line per row as text and numbers, and the tensors; up to `MAX_BYTES`, rows with a bad loss first."""
    row_bytes = sum(column[:1].nbytes for column in rows.batch.values())
    order = sorted(range(len(rows)), key=lambda row: not bad_loss[row])[: max(1, MAX_BYTES // row_bytes)]
    kept = rows[order]
    tensors = {name: column.contiguous() for name, column in kept.batch.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: column.clone() for name, column in tensors.items()}, f"{path}.safetensors")
    present = tensors["attention_mask"].bool()
    prompt_width = present.shape[1] - tensors["response_mask"].shape[1]
    with Path(f"{path}.jsonl").open("w", encoding="utf-8") as file:
        for place, row in enumerate(order):
            prompt, response = (
                tensors["input_ids"][place, part][present[place, part]]
                for part in (slice(prompt_width), slice(prompt_width, None))
            )
            line = {
                "uid": str(kept.non_tensor_batch["uid"][place]),
                "loss_is_finite": not bad_loss[row],
                "prompt": tokenizer.decode(prompt),
                "response": tokenizer.decode(response),
                "prompt_ids": prompt.tolist(),
                "response_ids": response.tolist(),
                **{name: _extent(column[place]) for name, column in tensors.items() if column.is_floating_point()},
            }
            file.write(json.dumps(line) + "\n")  # ASCII only: whatever the model wrote is escaped


def _extent(values: torch.Tensor) -> dict[str, float | int | None]:
    finite = values[values.isfinite()]
    some = finite.numel() > 0
    return {
        "min": float(finite.min()) if some else None,
        "max": float(finite.max()) if some else None,
        "not_finite": values.numel() - finite.numel(),
    }
