"""Candidates of a position: the best tokens of a row of logits, with log-probabilities over the whole row.

    log_prob_k = logit_k - log sum_v exp(logit_v)

Best first; of equal logits the smaller token comes first. On NVIDIA GPUs that is two launches of
`kernels/tree/candidates_kernel.py`; the code here is what they are tested against, and what runs elsewhere.
"""

from __future__ import annotations

import torch

from sglang_ddtree_patch.kernels.device import has_kernels


def top_log_probs(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` best tokens of every row.

    Args:
        logits: [rows, vocabulary] floating point.
        count: at most ``vocabulary``.

    Returns:
        tokens: [rows, count] int64.
        log_probs: [rows, count] float32, not increasing along a row; NaN where the row holds a NaN.
    """
    if has_kernels(logits.device):
        from sglang_ddtree_patch.kernels.tree.candidates_kernel import top_log_probs_triton

        return top_log_probs_triton(logits, count)
    return top_log_probs_torch(logits, count)


def top_log_probs_torch(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`top_log_probs` in plain PyTorch, on any device."""
    logits = logits.float()
    best = torch.sort(logits, dim=-1, descending=True, stable=True)
    tokens = best.indices[:, :count]
    return tokens, logits.gather(1, tokens) - logits.logsumexp(-1, keepdim=True)
