"""The DFlash block drafter, in plain PyTorch, with SGLang's weight names and conventions.

One forward fills a block of B positions. Position 0 holds a token the target has already produced (the
anchor), the other B - 1 hold the mask token, and position i predicts the token at `anchor + i`. The
block sees itself without a causal mask, and the context only through keys and values made from the
target's hidden states of the positions before the anchor:

    context = hidden_norm(fc(features))          [S, T, H]     features: some target layers side by side
    K, V    = k_norm(k_proj(context)), v_proj(context)         no input_layernorm on this path
    block   = embed(anchor, mask, ..., mask)     [S, n * B, H] the target's embedding, and its head after

Training puts n blocks of one sequence side by side and gives each its own view by mask, so that the
context is projected once for all of them; attention takes them in parts. Sequences of one batch may have
anchors of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from head_loss import head_loss, score_rows
from torch import nn

SIDE_BY_SIDE = 16  # blocks under one mask: each costs attention over all of them, in vain but for its own
GAMMA = 4.0  # positions over which a token's weight falls to 1 / e


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


def angles(positions: torch.Tensor, width: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of the rotary embedding at positions [N]: two float32 [N, 1, width / 2]."""
    half = width // 2
    frequency = theta ** (-torch.arange(half, device=positions.device, dtype=torch.float32) / half)
    angle = positions.float()[:, None, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Half-split rotary embedding: x [N, heads, D]."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class DraftAttention(nn.Module):
    """Queries from the block; keys and values from the context and the block."""

    def __init__(self, config: dict) -> None:
        super().__init__()
        hidden, self.width = config["hidden_size"], config["head_dim"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.q_proj = nn.Linear(hidden, self.heads * self.width, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.width, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.width, bias=False)
        self.o_proj = nn.Linear(self.heads * self.width, hidden, bias=False)
        self.q_norm = RMSNorm(self.width, config["rms_norm_eps"])
        self.k_norm = RMSNorm(self.width, config["rms_norm_eps"])

    def queries(self, x, cos, sin):
        return rotate(self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, self.width))), cos, sin)

    def keys_and_values(self, x, cos, sin):
        keys = self.k_norm(self.k_proj(x).unflatten(-1, (self.kv_heads, self.width)))
        return rotate(keys, cos, sin), self.v_proj(x).unflatten(-1, (self.kv_heads, self.width))

    def attend(self, q, own, context, bias, parts: int):
        """q [S * P * Q, heads, D], keys and values of the blocks [S * P * Q, kv, D] and of the context
        [S * T, kv, D], bias [S * P, Q, T + Q] -> [S * P * Q, heads * D]. A sequence's P parts of its blocks
        do not see each other."""
        rows, group = len(bias), self.heads // self.kv_heads

        def joined(before, block):  # -> [S * P, heads, T + Q, D]
            before = before.unflatten(0, (rows // parts, 1, -1)).expand(-1, parts, -1, -1, -1)
            both = torch.cat([before, block.unflatten(0, (rows // parts, parts, -1))], dim=2).flatten(0, 1)
            # SDPA's kernels for a mask want as many heads of keys as of queries.
            return both[:, :, :, None].expand(-1, -1, -1, group, -1).flatten(2, 3).transpose(1, 2)

        k, v = (joined(before, block) for before, block in zip(context, own, strict=True))
        q = q.unflatten(0, (rows, -1)).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[:, None])
        return out.transpose(1, 2).flatten(2).flatten(0, 1)


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
    """A layer in three pieces that work on each row alone, around the attention: they can be compiled."""

    def __init__(self, config: dict) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm, self.self_attn = RMSNorm(hidden, eps), DraftAttention(config)
        self.post_attention_layernorm, self.mlp = RMSNorm(hidden, eps), DraftMLP(config)

    def project(self, x, cos, sin):
        x = self.input_layernorm(x)
        return self.self_attn.queries(x, cos, sin), self.self_attn.keys_and_values(x, cos, sin)

    def project_context(self, context, cos, sin):
        return self.self_attn.keys_and_values(context, cos, sin)

    def finish(self, x, attended):
        x = x + self.self_attn.o_proj(attended)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    def __init__(self, config: dict) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.block, self.mask_id = config["block_size"], config["dflash_config"]["mask_token_id"]
        self.width, self.theta = config["head_dim"], config["rope_theta"]
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
        tokens = ids.new_full((rows, count, block), self.mask_id)
        tokens[:, :, 0] = ids.gather(1, anchors)
        positions = anchors[:, :, None] + torch.arange(block, device=ids.device)
        block_angles = angles(positions.flatten(), self.width, self.theta)
        context_angles = angles(torch.arange(length, device=ids.device).repeat(rows), self.width, self.theta)
        x = F.embedding(tokens.flatten(), embedding)
        parts = count // SIDE_BY_SIDE if count % SIDE_BY_SIDE == 0 else 1
        mask = block_mask(anchors.view(rows * parts, -1), length, block)
        bias = x.new_zeros(()).masked_fill(~mask, -torch.inf)
        context = self.read(features.flatten(0, 1))
        for layer in self.layers:
            q, own = layer.project(x, *block_angles)
            before = layer.project_context(context, *context_angles)
            x = layer.finish(x, layer.self_attn.attend(q, own, before, bias, parts))
        return self.settle(x).view(rows, count, block, -1)

    def read(self, features):
        return self.hidden_norm(self.fc(features))

    def settle(self, x):
        return self.norm(x)

    def compile_pieces(self, backend: str = "inductor") -> None:
        """Let the compiler fuse what works on each row alone: norms, rotary embedding, SwiGLU, casts.

        Attention stays outside, and every shape is compiled for itself: steps have few (text_batches.py).
        """

        pieces = [(layer, name) for layer in self.layers for name in ("project", "project_context", "finish")]
        for module, name in [*pieces, (self, "read"), (self, "settle")]:
            setattr(module, name, torch.compile(getattr(module, name), dynamic=False, backend=backend))


def block_mask(anchors: torch.Tensor, length: int, block: int) -> torch.Tensor:
    """What a block row may see, bool [S, n * B, T + n * B]: context before its anchor, and its own block."""
    rows = anchors.repeat_interleave(block, dim=1)
    before = torch.arange(length, device=anchors.device) < rows[:, :, None]
    owner = torch.arange(anchors.shape[1], device=anchors.device).repeat_interleave(block)
    own = (owner[:, None] == owner[None]).expand(len(anchors), -1, -1)
    return torch.cat([before, own], dim=2)


@dataclass(frozen=True)
class Drafted:
    """What a drafter put into blocks, and the text there."""

    hidden: torch.Tensor  # [S, n, B - 1, H], before the head
    places: torch.Tensor  # int64 [S, n, B - 1], positions in the sequence
    truth: torch.Tensor  # int64 [S, n, B - 1]
    weight: torch.Tensor  # float32 [S, n, B - 1], exp(-(i - 1) / gamma), 0 past a text's end


def draft(drafter, table, features, ids, anchors, lengths=None, gamma: float = GAMMA) -> Drafted:
    """Fill blocks of positions 1 .. B - 1; those at or past `lengths` [S] count nothing.

    Without lengths every block lies inside its sequence. The weight falls with depth because a later position
    only counts once every earlier one is right.
    """
    hidden = drafter(features, ids, anchors, table)[:, :, 1:]
    places = anchors[:, :, None] + torch.arange(1, drafter.block, device=ids.device)
    truth = ids.gather(1, places.flatten(1).clamp(max=ids.shape[1] - 1)).view_as(places)
    weight = torch.exp(-torch.arange(drafter.block - 1, device=ids.device) / gamma).expand_as(places)
    if lengths is not None:
        weight = weight * (places < lengths[:, None, None])
    return Drafted(hidden, places, truth, weight)


def draft_loss(
    drafter, target, features, ids, anchors, lengths=None, said=None, soft: float = 0.0, score=score_rows
) -> torch.Tensor:
    """Weighted mean cross entropy of the blocks against the text, and by the share `soft` against the
    target's distribution at each of its tokens: `said` [S, T, H] is what the target puts before its head."""
    table, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    made = draft(drafter, table, features, ids, anchors, lengths)
    share = (made.weight / made.weight.sum()).flatten()
    rows = None
    if soft:
        before = (made.places - 1).flatten(1).clamp(max=ids.shape[1] - 1)
        rows = said.gather(1, before[:, :, None].expand(-1, -1, said.shape[2])).flatten(0, 1)
    return head_loss(made.hidden.flatten(0, 2), head, made.truth.flatten(), share, rows, soft, score)
