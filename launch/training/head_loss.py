"""Cross entropy under a frozen head, without ever holding all its logits.

    logits = hidden @ head.T      label[r] = (1 - soft) * onehot(truth[r]) + soft * softmax(said[r] @ head.T)
    loss = sum_r share[r] * (logsumexp(logits[r]) - label[r] . logits[r])
    d loss / d logits[r] = share[r] * (softmax(logits[r]) - label[r])

The head learns nothing, so the gradient of the hidden states is all that the backward pass needs: each part
of the rows goes to logits and straight back, in one pass over memory each way once `score_rows` is compiled.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

MOST_LOGITS = 1 << 28  # at once: half a gigabyte in bf16

Score = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def score_rows(
    logits: torch.Tensor, truth: torch.Tensor, share: torch.Tensor, said: torch.Tensor | None, soft: float
):
    """logits [R, V], truth int64 [R], share float32 [R], the target's logits or None where `soft` is 0
    -> the loss, and its gradient by the logits."""
    wide = logits.float()
    log_sum = wide.logsumexp(dim=1, keepdim=True)
    label = (torch.arange(logits.shape[1], device=logits.device) == truth[:, None]).float()
    if said is not None:
        label = (1 - soft) * label + soft * said.float().softmax(dim=1)
    gradient = ((wide - log_sum).exp() - label) * share[:, None]
    return (share * (log_sum[:, 0] - (label * wide).sum(dim=1))).sum(), gradient.to(logits.dtype)


class HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, head, truth, share, said, soft, score):
        parts = -(-hidden.shape[0] * head.shape[0] // MOST_LOGITS)
        size = -(-hidden.shape[0] // parts)
        gradient = torch.empty_like(hidden)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        head = head.to(hidden.dtype)
        for start in range(0, hidden.shape[0], size):
            part = slice(start, start + size)
            of_target = said[part].to(hidden.dtype) @ head.T if soft else None
            loss, of_logits = score(hidden[part] @ head.T, truth[part], share[part], of_target, soft)
            total += loss
            gradient[part] = of_logits @ head
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx, upstream):
        (gradient,) = ctx.saved_tensors
        return gradient * upstream, None, None, None, None, None, None


def head_loss(
    hidden: torch.Tensor,
    head: torch.Tensor,
    truth: torch.Tensor,
    share: torch.Tensor,
    said: torch.Tensor | None = None,
    soft: float = 0.0,
    score: Score = score_rows,
) -> torch.Tensor:
    """hidden [R, H], head [V, H] frozen, truth int64 [R], share float32 [R], said [R, H]: what the target
    itself puts before its head there -> a float32 scalar."""
    return HeadLoss.apply(hidden, head, truth, share, said, soft, score)
