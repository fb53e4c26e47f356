"""Per-request seeds: the same request with the same seed draws the same tokens.

Stock SGLang draws by seed only under --enable-deterministic-inference, for every request of the server.
Here a request that brings a `sampling_seed` draws by it, and the others draw as ever. The draw is stock's
own: a hash of seed, position and token gives the noise, so the token for position ``p`` is the same whether
plain decoding or a row of a tree asks for it, and whatever shape the tree had.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from sglang.srt.layers.sampler import (
    Sampler,
    sampling_from_probs_torch,
    top_k_top_p_min_p_sampling_from_probs_torch,
)
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from sglang.srt.utils.common import async_h2d

from sglang_ddtree_patch.settings import UNSEEDED


class SeededSampler(Sampler):
    """Stock sampling, where the rows of seeded requests take the token their seed gives."""

    def _sample_from_probs(
        self,
        probs: torch.Tensor,
        sampling_info: SamplingBatchInfo,
        positions: torch.Tensor,
        simple_sampling_case: bool,
    ) -> Any:
        seeds = sampling_info.sampling_seed
        # Without seeds in it: FlashInfer's sampling, and min-p everywhere, refuse to run beside them.
        unseeded = dataclasses.replace(sampling_info, sampling_seed=None)
        drawn, capture = super()._sample_from_probs(probs, unseeded, positions, simple_sampling_case)
        if seeds is not None:
            drawn = torch.where(seeds == UNSEEDED, drawn, draw_by_seed(probs, sampling_info, positions))
        return drawn, capture


def attach_seeds(batch: Any, sampler: Any) -> None:
    """Give a batch's forward the seeds of its requests, if any brings one and the sampler knows them."""
    seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
    if isinstance(sampler, SeededSampler) and any(seed is not None for seed in seeds):
        by_row = [UNSEEDED if seed is None else seed for seed in seeds]
        batch.sampling_info = dataclasses.replace(
            batch.sampling_info, sampling_seed=async_h2d(by_row, dtype=torch.int64, device=batch.device)
        )


def draw_by_seed(
    probs: torch.Tensor, sampling_info: SamplingBatchInfo, positions: torch.Tensor
) -> torch.Tensor:
    """The token each row's seed draws, as stock's deterministic mode draws it for that request alone.

    Stock ties the noise to token ids where a batch filters nothing, and to ranks where any request of it
    has a top-k, top-p or min-p, so that a request's tokens depend on its neighbours. Here the request's
    own parameters decide.

    Args:
        probs: [rows, vocabulary] softmax of the logits over temperature.
        sampling_info: one entry a row; ``sampling_seed`` [rows] int64.
        positions: [rows] position of the token that the row's logits follow.

    Returns:
        [rows] int32.
    """
    seeds, top_ks, top_ps, min_ps = (
        sampling_info.sampling_seed,
        sampling_info.top_ks,
        sampling_info.top_ps,
        sampling_info.min_ps,
    )
    by_token = sampling_from_probs_torch(probs, seeds, positions)
    if not (
        sampling_info.need_top_k_sampling
        or sampling_info.need_top_p_sampling
        or sampling_info.need_min_p_sampling
    ):
        return by_token
    # Stock has no min-p with seeds. Min-p drops the least likely, which stand last in the order that
    # top-k and top-p cut, so dropping them first leaves the same tokens.
    floor = probs.amax(-1, keepdim=True) * min_ps[:, None]
    by_rank = top_k_top_p_min_p_sampling_from_probs_torch(
        probs.masked_fill(probs < floor, 0.0), top_ks, top_ps, min_ps, False, seeds, positions
    )
    is_plain = (top_ks == TOP_K_ALL) & (top_ps == 1.0) & (min_ps <= 0.0)
    return torch.where(is_plain, by_token, by_rank)
