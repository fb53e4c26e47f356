"""Cross entropy under a frozen head, without ever holding all its logits.

    loss = sum_r share[r] * (logsumexp(logits[r]) - logits[r, truth[r]])        logits = hidden @ head.T
    d loss / d logits[r] = share[r] * (softmax(logits[r]) - onehot(truth[r]))

The head learns nothing, so the gradient of the hidden states is all that the backward pass needs: each part
of the rows goes to logits and straight back, in one pass over memory each way once `score_rows` is compiled.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

MOST_LOGITS = 1 << 28  # at once: half a gigabyte in bf16

Score = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def score_rows(logits: torch.Tensor, truth: torch.Tensor, share: torch.Tensor):
    """logits [R, V], truth int64 [R], share float32 [R] -> the loss, and its gradient by the logits."""
    wide = logits.float()
    log_sum = wide.logsumexp(dim=1, keepdim=True)
    hit = wide.gather(1, truth[:, None])
    is_truth = torch.arange(logits.shape[1], device=logits.device) == truth[:, None]
    gradient = ((wide - log_sum).exp() - is_truth.float()) * share[:, None]
    return (share * (log_sum - hit)[:, 0]).sum(), gradient.to(logits.dtype)


class HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, head, truth, share, score):
        parts = -(-hidden.shape[0] * head.shape[0] // MOST_LOGITS)
        size = -(-hidden.shape[0] // parts)
        gradient = torch.empty_like(hidden)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        head = head.to(hidden.dtype)
        for start in range(0, hidden.shape[0], size):
            part = slice(start, start + size)
            loss, of_logits = score(hidden[part] @ head.T, truth[part], share[part])
            total += loss
            gradient[part] = of_logits @ head
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx, upstream):
        (gradient,) = ctx.saved_tensors
        return gradient * upstream, None, None, None, None


def head_loss(
    hidden: torch.Tensor,
    head: torch.Tensor,
    truth: torch.Tensor,
    share: torch.Tensor,
    score: Score = score_rows,
) -> torch.Tensor:
    """hidden [R, H], head [V, H] frozen, truth int64 [R], share float32 [R] -> a float32 scalar."""
    return HeadLoss.apply(hidden, head, truth, share, score)
