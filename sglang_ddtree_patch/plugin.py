"""Entry point `sglang.srt.plugins`: what SGLang runs in every process before it parses arguments.

SGLang logs and swallows an exception raised here and then says "unknown algorithm", so what is missing
is said in words, at the moment somebody asks for DDTREE.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang_ddtree_patch.contract_check import ContractReport, check_installed_sglang
from sglang_ddtree_patch.errors import ConfigurationError, report_configuration_errors_in_one_line
from sglang_ddtree_patch.settings import ALGORITHM, BACKEND

logger = logging.getLogger(__name__)

_loaded = False


def load() -> None:
    """Register the algorithm, the backend and the hooks; a second call does nothing.

    A server that does not ask for DDTREE behaves as without the plugin. Where the installed SGLang does
    not match the contract, only a refusal is registered: SGLang itself keeps serving.
    """
    global _loaded
    if _loaded:
        return
    _loaded = True
    report_configuration_errors_in_one_line()
    report = check_installed_sglang()
    if report.mismatches:
        logger.warning("%s", report.summary())
        _register_refusal(report)
    else:
        _register()


def _register() -> None:
    from sglang.srt.arg_groups.choices import (
        add_attention_backend_choices,
        add_draft_attention_backend_choices,
    )
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sglang_ddtree_patch.algorithm import DDTreeAlgorithm
    from sglang_ddtree_patch.arguments import put_backend_in_front, take_backend_out
    from sglang_ddtree_patch.round.allocation import row_headroom
    from sglang_ddtree_patch.round.finish import (
        continue_from_what_was_shown,
        finish_where_plain_decoding_would,
    )
    from sglang_ddtree_patch.sampling.requests import check_values, disarm, validate_request

    add_attention_backend_choices([BACKEND])
    add_draft_attention_backend_choices([BACKEND])
    register_attention_backend(BACKEND)(_create_backend)
    SpeculativeAlgorithm.register(ALGORITHM, supports_overlap=True, spec_class=DDTreeAlgorithm)(_worker_class)
    register_resolution_hook("handle_model_source_paths")(take_backend_out)
    register_resolution_hook("handle_speculative_decoding")(put_backend_in_front)
    HookRegistry.register(
        "sglang.srt.speculative.dflash_utils.validate_dflash_request", validate_request, HookType.AROUND
    )
    HookRegistry.register(
        "sglang.srt.managers.schedule_batch.Req.set_finish_with_abort", disarm, HookType.AFTER
    )
    HookRegistry.register(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request",
        check_values,
        HookType.AFTER,
    )
    HookRegistry.register(
        "sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len",
        row_headroom,
        HookType.AROUND,
    )
    HookRegistry.register(
        "sglang.srt.managers.scheduler_components.batch_result_processor."
        "SchedulerBatchResultProcessor._resolve_spec_v2_tokens",
        _settle_round,
        HookType.AFTER,
    )
    HookRegistry.register(
        "sglang.srt.managers.schedule_batch.Req.update_finish_state",
        finish_where_plain_decoding_would,
        HookType.AROUND,
    )
    HookRegistry.register(
        "sglang.srt.session.session_controller.Session._concat_token_arrays",
        continue_from_what_was_shown,
        HookType.AROUND,
    )


def _settle_round(tokens: Any, *call: Any, **named: Any) -> None:
    # Late, as the backend.
    from sglang_ddtree_patch.round.result import settle_round

    settle_round(tokens, *call, **named)


def _create_backend(runner: Any) -> Any:
    # Late: the backend imports model code that processes without a model never need.
    from sglang_ddtree_patch.attention.backend import create_backend

    return create_backend(runner)


def _worker_class(server_args: Any) -> type:
    from sglang_ddtree_patch.round.worker import DDTreeWorker

    return DDTreeWorker


def _register_refusal(report: ContractReport) -> None:
    """Let the names parse, so that asking for them ends in the contract's own words."""
    from sglang.srt.arg_groups.choices import add_attention_backend_choices
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    add_attention_backend_choices([BACKEND])

    @register_resolution_hook("handle_model_source_paths")
    def refuse(server_args: Any, previous: Any) -> None:
        cfg = resolving_view(server_args)
        if str(cfg.speculative_algorithm).upper() == ALGORITHM or cfg.attention_backend == BACKEND:
            raise ConfigurationError(report.summary())
        previous(server_args)
