"""The DFlash block drafter, in plain PyTorch, with SGLang's weight names and conventions.

One forward fills a block of B positions. Position 0 holds a token the target has already produced (the
anchor), the other B - 1 hold the mask token, and position i predicts the token at `anchor + i`. The
block sees itself without a causal mask, and the context only through keys and values made from the
target's hidden states of the positions before the anchor:

    context = hidden_norm(fc(features))          [S, T, H]     features: some target layers side by side
    K, V    = k_norm(k_proj(context)), v_proj(context)         no input_layernorm on this path
    block   = embed(anchor, mask, ..., mask)     [S, n * B, H] the target's embedding, and its head after

Training puts n blocks of one sequence side by side and gives each its own view by mask, so that the
context is projected once for all of them. Sequences of one batch may have anchors of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn


def draft_config(
    target: dict,
    *,
    mask: tuple[str, int],
    feature_layers: Sequence[int],
    block: int,
    layers: int,
    intermediate: int,
) -> dict:
    """config.json of the drafter of a target, in the fields SGLang's DFlashDraftModel reads.

    Args:
        target: the target's config.json, with `rope_theta` and `head_dim` filled in.
        mask: a token that no text holds, and its id.
        feature_layers: 0-based layers whose outputs the drafter sees. SGLang records the input of layer
            k + 1, so the last one cannot be among them.
    """
    if max(feature_layers) >= target["num_hidden_layers"] - 1:
        raise ValueError(f"feature layers {list(feature_layers)} name the target's last layer or one past it")
    shared = (
        "vocab_size",
        "hidden_size",
        "hidden_act",
        "rms_norm_eps",
        "max_position_embeddings",
        "rope_theta",
        "initializer_range",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    )
    heads = ("num_attention_heads", "num_key_value_heads", "head_dim")
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **{key: target[key] for key in shared if key in target},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "torch_dtype": "bfloat16",
        "num_hidden_layers": layers,
        "intermediate_size": intermediate,
        **{key: target[key] for key in heads},
        "layer_types": ["full_attention"] * layers,
        "tie_word_embeddings": False,
        "block_size": block,
        "num_target_layers": target["num_hidden_layers"],
        "dflash_config": {
            "mask_token": mask[0],
            "mask_token_id": mask[1],
            "target_layer_ids": list(feature_layers),
        },
    }


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Half-split rotary embedding: x [S, heads, T, D], positions [S, T]."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = positions.float()[:, None, :, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    first, second = x.float().split(half, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class DraftAttention(nn.Module):
    """Queries from the block; keys and values from the context and the block."""

    def __init__(self, config: dict) -> None:
        super().__init__()
        hidden, self.width = config["hidden_size"], config["head_dim"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.theta = config["rope_theta"]
        self.q_proj = nn.Linear(hidden, self.heads * self.width, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.width, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.width, bias=False)
        self.o_proj = nn.Linear(self.heads * self.width, hidden, bias=False)
        self.q_norm = RMSNorm(self.width, config["rms_norm_eps"])
        self.k_norm = RMSNorm(self.width, config["rms_norm_eps"])

    def forward(self, x, context, positions, context_positions, mask):
        """x [S, Q, H], context [S, T, H], mask bool [S, Q, T + Q] -> [S, Q, H]."""

        def split(t, heads):
            return t.unflatten(-1, (heads, self.width)).transpose(1, 2)

        both, places = torch.cat([context, x], dim=1), torch.cat([context_positions, positions], dim=1)
        q = rotate(self.q_norm(split(self.q_proj(x), self.heads)), positions, self.theta)
        k = rotate(self.k_norm(split(self.k_proj(both), self.kv_heads)), places, self.theta)
        v = split(self.v_proj(both), self.kv_heads)
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
        return self.o_proj(out.transpose(1, 2).flatten(2))


class DraftMLP(nn.Module):
    def __init__(self, config: dict) -> None:
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    def __init__(self, config: dict) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm, self.self_attn = RMSNorm(hidden, eps), DraftAttention(config)
        self.post_attention_layernorm, self.mlp = RMSNorm(hidden, eps), DraftMLP(config)

    def forward(self, x, context, positions, context_positions, mask):
        x = x + self.self_attn(self.input_layernorm(x), context, positions, context_positions, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    def __init__(self, config: dict) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.block, self.mask_id = config["block_size"], config["dflash_config"]["mask_token_id"]
        self.fc = nn.Linear(len(config["dflash_config"]["target_layer_ids"]) * hidden, hidden, bias=False)
        self.hidden_norm, self.norm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config["num_hidden_layers"]))
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=config["initializer_range"])

    def forward(self, features, ids, anchors, embedding):
        """features [S, T, F * H], ids [S, T], anchors [S, n] -> block hidden states [S, n, B, H].

        `embedding` is the target's table [V, H]. The tokens after a block's anchor are never read by it.
        """
        (rows, count), length, block = anchors.shape, ids.shape[1], self.block
        context = self.hidden_norm(self.fc(features))
        tokens = ids.new_full((rows, count, block), self.mask_id)
        tokens[:, :, 0] = ids.gather(1, anchors)
        context_positions = torch.arange(length, device=ids.device).expand(rows, -1)
        positions = (anchors[:, :, None] + torch.arange(block, device=ids.device)).flatten(1)
        x = F.embedding(tokens.flatten(1), embedding)
        mask = block_mask(anchors, length, block)
        for layer in self.layers:
            x = layer(x, context, positions, context_positions, mask)
        return self.norm(x).unflatten(1, (count, block))


def block_mask(anchors: torch.Tensor, length: int, block: int) -> torch.Tensor:
    """What a block row may see, bool [S, n * B, T + n * B]: context before its anchor, and its own block."""
    rows = anchors.repeat_interleave(block, dim=1)
    before = torch.arange(length, device=anchors.device) < rows[:, :, None]
    owner = torch.arange(anchors.shape[1], device=anchors.device).repeat_interleave(block)
    own = (owner[:, None] == owner[None]).expand(len(anchors), -1, -1)
    return torch.cat([before, own], dim=2)


def draft_loss(drafter, target, features, ids, anchors, lengths=None, gamma: float = 4.0) -> torch.Tensor:
    """Cross entropy of positions 1 .. B - 1 against the sequence, weighted exp(-(i - 1) / gamma).

    The weight falls with depth because a later position only counts once every earlier one is right.
    Positions at or past `lengths` [S] count nothing; without lengths every block lies inside its sequence.
    """
    table, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    hidden = drafter(features, ids, anchors, table)[:, :, 1:]
    places = anchors[:, :, None] + torch.arange(1, drafter.block, device=ids.device)  # [S, n, B - 1]
    truth = ids.gather(1, places.flatten(1).clamp(max=ids.shape[1] - 1)).view_as(places)
    logits = F.linear(hidden, head.to(hidden.dtype)).float()
    loss = F.cross_entropy(logits.flatten(0, 2), truth.flatten(), reduction="none").view_as(places)
    weight = torch.exp(-torch.arange(drafter.block - 1, device=ids.device) / gamma).expand_as(places)
    if lengths is not None:
        weight = weight * (places < lengths[:, None, None])
    return (loss * weight).sum() / weight.sum()
