"""Attention over rows that stand end to end in one row, without padding (`use_remove_padding`).

Registered with transformers under `PACKED_ATTENTION`; nothing in a model is patched. Every other layer of a transformer
works token by token and needs to know nothing about rows; only attention and the position ids (which restart at each
row) do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface

PACKED_ATTENTION = "verl_lite_packed"


@dataclass(frozen=True)
class PackedRows:
    """Where the rows lie in a packed row of N tokens.

    Rows of similar length are run together, padded on the right to the longest among them. Causal attention never looks
    right, so the padding needs no mask. Lengths within a bucket differ by less than a factor of two, so a long row does
    not make short ones expensive.
    """

    lengths: tuple[int, ...]  # tokens of each row; their sum is N
    offsets: Tensor  # [rows + 1] int32, where each row begins, and N
    buckets: tuple[Tensor, ...]  # each [rows of the bucket, its longest]: the token to put there; 0 in the padding
    restore: Tensor  # [N] the place of each token in the buckets, flattened and concatenated

    @classmethod
    def from_lengths(cls, lengths: list[int], device: torch.device) -> PackedRows:
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        by_size: dict[int, list[int]] = {}
        for row, length in enumerate(lengths):
            by_size.setdefault(length.bit_length(), []).append(row)
        buckets, sources, places, offset = [], [], [], 0
        for _, rows in sorted(by_size.items()):
            row_lengths = torch.tensor([lengths[row] for row in rows])
            columns = torch.arange(int(row_lengths.max()))
            real = columns < row_lengths[:, None]
            tokens = torch.where(real, torch.tensor([starts[row] for row in rows])[:, None] + columns, 0)
            buckets.append(tokens.to(device))
            sources.append(tokens[real])
            places.append(offset + real.flatten().nonzero()[:, 0])
            offset += real.numel()
        restore = torch.empty(starts[-1], dtype=torch.long)
        restore[torch.cat(sources)] = torch.cat(places)
        return cls(
            tuple(lengths),
            torch.tensor(starts, dtype=torch.int32, device=device),
            tuple(buckets),
            restore.to(device),
        )


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    packed_rows: PackedRows | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention of each row to itself: query [1, h, N, d], key and value [1, kv heads, N, d] → [1, N, h, d].

    transformers' attention function; `packed_rows` is the model's own keyword argument, handed down by its layers.
    """
    if packed_rows is None:
        raise ValueError(
            f"{type(module).__name__} does not hand keyword arguments down to attention, which packing needs; "
            "set model.use_remove_padding=False"
        )
    if softcap is not None or s_aux is not None:
        raise ValueError(
            f"{type(module).__name__} uses attention soft-capping or sinks, which packing does not support; "
            "set model.use_remove_padding=False"
        )
    # [N, heads, d]
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return _flash_attention(query, key, value, scaling, sliding_window, packed_rows)[None], None
    outputs = []
    for tokens in packed_rows.buckets:
        rows, longest = tokens.shape
        mask = None
        if sliding_window is not None and longest > sliding_window:
            distance = torch.arange(longest)[:, None] - torch.arange(longest)
            mask = ((distance >= 0) & (distance < sliding_window)).to(query.device)
        q, k, v = (
            tensor.index_select(0, tokens.flatten()).unflatten(0, (rows, longest)).transpose(1, 2)
            for tensor in (query, key, value)
        )
        output = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, packed_rows.restore)[None], None


def _flash_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, sliding_window: int | None, rows: PackedRows
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # present and able to run only in builds for GPUs

    longest = max(rows.lengths)
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    output = varlen_attn(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        rows.offsets,
        rows.offsets,
        longest,
        longest,
        scale=scale,
        window_size=window,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(output, Tensor), "a pair only where the log-normalizers are asked for"
    return output


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
