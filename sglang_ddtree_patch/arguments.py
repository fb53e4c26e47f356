"""Server arguments: what DDTREE asks for, checked and resolved before any model loads.

Two wrappers around steps of SGLang's own argument resolution. The early one checks what was asked and
takes `ddtree-verify` out of the arguments again, so that everything in between (page size, graph and
memory defaults, the attention backend itself) resolves as it would for the backend SGLang chooses.
The late one puts `ddtree-verify` in front of that backend for tree verify alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.arg_groups.choices import DRAFT_ATTENTION_BACKEND_CHOICES
from sglang.srt.arg_groups.overrides import (
    attention_backends_of,
    declare_resolution,
    model_config_of,
    resolved_view,
    resolving_view,
)
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

from sglang_ddtree_patch.attention.kernel_choice import REFERENCE, own_kernel
from sglang_ddtree_patch.contract_check import installed_release
from sglang_ddtree_patch.draft_config import check_vocabulary, trained_block_size
from sglang_ddtree_patch.errors import ConfigurationError
from sglang_ddtree_patch.settings import (
    ALGORITHM,
    BACKEND,
    DEFAULT_WIDTH,
    MAX_DRAFT_BLOCK,
    MAX_WIDTH,
    candidates_per_position,
    widths_are_chosen,
)

logger = logging.getLogger(__name__)

SOURCE = "sglang-ddtree-patch"
DEFAULT_MAX_RUNNING_REQUESTS = 48
SERVED_KV_DTYPES = frozenset({"auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2"})

# Backends that cannot run the drafter's block: it is a target-verify forward without a causal mask.
_CANNOT_DRAFT = frozenset({"torch_native"})

Step = Callable[[Any], None]


def take_backend_out(server_args: Any, previous: Step) -> None:
    """Wraps `handle_model_source_paths`: check the request, resolve the block, set our backend aside."""
    previous(server_args)
    cfg = resolving_view(server_args)
    asked_for_backend = BACKEND in (
        cfg.attention_backend, cfg.prefill_attention_backend, cfg.decode_attention_backend
    )
    if str(cfg.speculative_algorithm).upper() == ALGORITHM:
        check_features(cfg)
        # A drafter's window is put back late: SGLang would say that it has no effect.
        declare_resolution(
            server_args, SOURCE, **resolve_block(cfg), speculative_draft_window_size=None
        )
    elif asked_for_backend:
        logger.warning(
            "--attention-backend %s verifies token trees and --speculative-algorithm %s is not set: "
            "serving with the attention backend SGLang chooses.", BACKEND, ALGORITHM,
        )
    if asked_for_backend:
        fields = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
        declare_resolution(
            server_args, SOURCE, **{name: None for name in fields if getattr(cfg, name) == BACKEND}
        )


def put_backend_in_front(server_args: Any, previous: Step) -> None:
    """Wraps `handle_speculative_decoding`: tree verify goes to our backend, the rest stays stock."""
    previous(server_args)
    cfg = resolving_view(server_args)
    if cfg.speculative_algorithm != ALGORITHM:
        return
    model_config = model_config_of(server_args)
    check_model(model_config)
    check_vocabulary(cfg, model_config.vocab_size)
    check_page_size(asked=server_args._raw_input["page_size"], resolved=cfg.page_size)
    slots = max(cfg.speculative_num_draft_tokens, cfg.speculative_dflash_block_size)
    check_pool(cfg.max_total_tokens, slots, cfg.page_size)
    prefill, _ = attention_backends_of(resolved_view(server_args))
    fields = {
        "attention_backend": prefill,
        "prefill_attention_backend": prefill,
        "decode_attention_backend": BACKEND,
        "speculative_attention_mode": "decode",
        "speculative_draft_window_size": server_args._raw_input["speculative_draft_window_size"],
        # Other values change how SGLang counts KV slots. Set this late, as DFLASH does: earlier, they
        # would steer the default attention backend away from FA3.
        "speculative_num_steps": 1,
        "speculative_eagle_topk": 1,
        "speculative_draft_attention_backend": choose_draft_backend(
            cfg.speculative_draft_attention_backend, prefill
        ),
    }
    if own_kernel(cfg.device) == REFERENCE:
        fields["cuda_graph_config"] = with_phase(
            cfg.cuda_graph_config, Phase.DECODE, backend=Backend.DISABLED
        )
    if cfg.max_running_requests is None:
        fields["max_running_requests"] = DEFAULT_MAX_RUNNING_REQUESTS
    declare_resolution(server_args, SOURCE, **fields)
    logger.info(
        "DDTREE: width=%d draft_block=%d candidates=%d page_size=%s; %s verifies trees in front of %s; "
        "draft attention %s; CUDA graphs for draft and verify: %s.",
        cfg.speculative_num_draft_tokens, cfg.speculative_dflash_block_size, candidates_per_position(),
        cfg.page_size, BACKEND, prefill, fields["speculative_draft_attention_backend"],
        cfg.cuda_graph_config.decode.backend,
    )


def check_features(cfg: Any) -> None:
    """Refuse what DDTREE does not serve, one clear line each.

    Raises:
        ConfigurationError: the first setting that cannot be served.
    """
    if cfg.speculative_draft_model_path is None:
        raise ConfigurationError(
            f"--speculative-algorithm {ALGORITHM} needs a DFlash drafter for this model: "
            "add --speculative-draft-model-path PATH."
        )
    if cfg.decode_attention_backend not in (None, BACKEND, cfg.attention_backend):
        raise ConfigurationError(
            f"--decode-attention-backend {cfg.decode_attention_backend} would never run: with "
            f"{ALGORITHM} every decode round is a tree verify. Name the backend to wrap with "
            "--attention-backend instead."
        )
    if cfg.page_size is not None and cfg.page_size < 1:
        raise ConfigurationError(f"--page-size {cfg.page_size} is no page size: type 1, 16, 32 or 64.")
    refused = {
        f"--pp-size {cfg.pp_size}": cfg.pp_size != 1,
        "--enable-dp-attention": cfg.enable_dp_attention,
        f"--disaggregation-mode {cfg.disaggregation_mode}": cfg.disaggregation_mode != "null",
        f"--dcp-size {cfg.dcp_size}": cfg.dcp_size != 1,
        "--enable-two-batch-overlap": cfg.enable_two_batch_overlap,
        "--enable-pdmux": cfg.enable_pdmux,
        "--enable-lora": cfg.enable_lora or bool(cfg.lora_paths),
        "--enable-strict-thinking": cfg.enable_strict_thinking,
        "--enable-mixed-chunk": cfg.enable_mixed_chunk,
        # A turn goes on from a slot that the round behind the last one would have written.
        "--enable-streaming-session": cfg.enable_streaming_session,
        "--speculative-adaptive": cfg.speculative_adaptive,
        "--speculative-use-block-verification": installed_release().verifies_blocks(cfg),
        f"--speculative-num-steps {cfg.speculative_num_steps}": cfg.speculative_num_steps not in (None, 1),
        # A threshold below 1 accepts tokens the target would not choose.
        f"--speculative-accept-threshold-single {cfg.speculative_accept_threshold_single}": (
            cfg.speculative_accept_threshold_single != 1.0
        ),
        f"--speculative-accept-threshold-acc {cfg.speculative_accept_threshold_acc}": (
            cfg.speculative_accept_threshold_acc != 1.0
        ),
        # It cannot roll a grammar back, which a walk over branches needs.
        "--grammar-backend outlines": cfg.grammar_backend == "outlines",
        "--enable-deterministic-inference": cfg.enable_deterministic_inference,
        f"--kv-cache-dtype {cfg.kv_cache_dtype}": cfg.kv_cache_dtype not in SERVED_KV_DTYPES,
    }
    for setting, is_set in refused.items():
        if is_set:
            raise ConfigurationError(f"{ALGORITHM} does not serve {setting} yet: leave it out.")
    window = cfg.speculative_draft_window_size
    if window is not None and window < 1:
        raise ConfigurationError(
            f"--speculative-draft-window-size {window} is no number of positions: leave it out for a drafter "
            "that reads the whole prefix."
        )
    if cfg.speculative_eagle_topk not in (None, 1):
        raise ConfigurationError(
            f"--speculative-eagle-topk {cfg.speculative_eagle_topk} belongs to EAGLE: set the candidates "
            "a position of DDTREE with the environment variable SGLANG_DDTREE_TOPK."
        )
    candidates_per_position()
    widths_are_chosen()
    widths_are_chosen()


def resolve_block(cfg: Any) -> dict[str, int]:
    """The fields that size a round: width from the flag, block from the flag or the drafter's config.

    Raises:
        ConfigurationError: a width or block out of range, or a draft model that is not DFlash.
    """
    width = cfg.speculative_num_draft_tokens
    width = DEFAULT_WIDTH if width is None else int(width)
    if not 1 <= width <= MAX_WIDTH:
        raise ConfigurationError(
            f"--speculative-num-draft-tokens {width} is not a tree width: it is the number of rows of "
            f"the verify block, root included, from 1 to {MAX_WIDTH}."
        )
    block = cfg.speculative_dflash_block_size
    trained_block = trained_block_size(cfg)
    block = int(block) if block is not None else trained_block
    if not 2 <= block <= MAX_DRAFT_BLOCK:
        raise ConfigurationError(
            f"a drafter block of {block} positions cannot be drafted: --speculative-dflash-block-size "
            f"takes 2 to {MAX_DRAFT_BLOCK}, and this drafter was trained with {trained_block}."
        )
    return {
        "speculative_num_draft_tokens": width,
        "speculative_dflash_block_size": block,
    }


def check_model(model_config: Any) -> None:
    """Refuse targets whose per-request state is not an ordinary KV cache.

    Raises:
        ConfigurationError: recurrent layers, or layers that attend to chunks or to compressed keys.
    """
    if mambaish_config(model_config) is not None:
        raise ConfigurationError(
            f"{ALGORITHM} does not serve targets with recurrent layers yet: SGLang commits their state "
            "along a chain. Use --speculative-algorithm DFLASH for this model."
        )
    seen = None
    if model_config.is_hybrid_swa and model_config.is_deepseek_v4_arch:
        seen = "compressed keys"
    elif model_config.attention_chunk_size is not None:
        seen = "chunks of the prefix"
    if seen is not None:
        raise ConfigurationError(
            f"{ALGORITHM} does not serve targets whose layers attend to {seen} yet. "
            "Use --speculative-algorithm DFLASH for this model."
        )


def check_page_size(asked: int | None, resolved: int) -> None:
    """Refuse a page size that SGLang replaced because the wrapped backend cannot do it.

    Raises:
        ConfigurationError: the page size in force is not the one asked for.
    """
    if asked is not None and asked != resolved:
        raise ConfigurationError(
            f"--page-size {asked} is not possible with the attention backend in use, which needs "
            f"{resolved}: type --page-size {resolved}, or choose another --attention-backend."
        )


def choose_draft_backend(asked: str | None, prefill: str) -> str:
    """The drafter's attention backend: the one asked for, else the stock one if it can draft, else ours.

    Raises:
        ConfigurationError: the one asked for cannot run the drafter's block.
    """
    possible = [name for name in DRAFT_ATTENTION_BACKEND_CHOICES if name not in _CANNOT_DRAFT]
    if asked is None:
        return prefill if prefill in possible else BACKEND
    if asked not in possible:
        raise ConfigurationError(
            f"--speculative-draft-attention-backend {asked} cannot run a drafter's block: leave it out, or "
            f"name one of {', '.join(possible)}."
        )
    return asked


def check_pool(max_total_tokens: int | None, slots: int, page_size: int) -> None:
    """Refuse a KV pool in which not even one request could take a round.

    Raises:
        ConfigurationError: fewer slots than a round's reserve, in whole pages, and a page of prompt.
    """
    needed = (-(-2 * slots // page_size) + 2) * page_size
    if max_total_tokens is not None and max_total_tokens < needed:
        raise ConfigurationError(
            f"--max-total-tokens {max_total_tokens} holds no request: a round of this width reserves "
            f"{2 * slots} slots in pages of {page_size}, so at least {needed} are needed."
        )
