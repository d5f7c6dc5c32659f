"""A stand-in for torch's attention kernel for documents of any length, which needs a GPU."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

_SIGNATURE = inspect.signature(varlen_attn)


def attend_by_documents(*args: Any, **options: Any) -> Tensor:
    """Attend one document after the other, `[T, H, D]`, by a mask; takes what torch's kernel takes.

    Query i of n sees of m keys those up to i + m - n, the last of them with the last: so flash attention aligns them.
    """
    given = _SIGNATURE.bind(*args, **options).arguments
    query, key, value = given["query"], given["key"], given["value"]
    borders, key_borders = given["cu_seq_q"].tolist(), given["cu_seq_k"].tolist()
    assert given["max_q"] == max(end - start for start, end in itertools.pairwise(borders))
    assert given["max_k"] == max(end - start for start, end in itertools.pairwise(key_borders))
    assert given["cu_seq_q"].dtype == given["cu_seq_k"].dtype == torch.int32
    assert given.get("enable_gqa", False) or query.shape[1] == key.shape[1]
    left, right = given["window_size"]
    assert right == 0
    documents = []
    for (start, end), (key_start, key_end) in zip(
        itertools.pairwise(borders), itertools.pairwise(key_borders), strict=True
    ):
        num_queries, num_keys = end - start, key_end - key_start
        last_seen = torch.arange(num_queries)[:, None] + num_keys - num_queries
        distance = last_seen - torch.arange(num_keys)[None, :]
        is_seen = (distance >= 0) & ((distance <= left) | (left < 0))
        heads = [query[start:end], key[key_start:key_end], value[key_start:key_end]]
        attended = scaled_dot_product_attention(
            *(own.transpose(0, 1).unsqueeze(0) for own in heads),
            attn_mask=is_seen,
            scale=given["scale"],
            enable_gqa=query.shape[1] != key.shape[1],
        )
        documents.append(attended[0].transpose(0, 1))
    return torch.cat(documents)
