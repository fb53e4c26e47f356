"""Every SGLang attribute that this package overrides, calls, reads or hooks.

This is the whole surface between the two: what is not in this table is not used. Parameter names are
compared in order; `members` are strings that a constant must hold. contract_check.py compares the table
with the installed sources when the plugin loads, and the tests compare our overrides with the table.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

SUPPORTED_VERSION = "0.5.23"


class Use(enum.Enum):
    """How an attribute is used, which is what a mismatch breaks."""

    OVERRIDE = "overridden by a subclass of ours"
    CALL = "called"
    READ = "read"
    HOOK = "wrapped through SGLang's hook registry"


MEMBERS_SHOWN = 3  # in a message; what is missing is named in full


@dataclass(frozen=True)
class Attribute:
    """One attribute: where it is defined and what must hold of it."""

    use: Use
    module: str
    name: str
    parameters: tuple[str, ...] | None  # without self; None where it is not a function
    members: tuple[str, ...]

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"

    @property
    def expectation(self) -> str:
        if self.parameters is not None:
            return f"({', '.join(self.parameters)})"
        if self.members:
            more = len(self.members) - MEMBERS_SHOWN
            rest = f" and {more} more" if more > 0 else ""
            return f"a constant that holds {', '.join(self.members[:MEMBERS_SHOWN])}{rest}"
        return "an attribute of that name"


def _a(use: Use, module: str, name: str, parameters: str | None = None, members: str = "") -> Attribute:
    module = f"sglang.srt.{module}"
    return Attribute(
        use, module, name, None if parameters is None else tuple(parameters.split()), tuple(members.split())
    )


CONTRACT: tuple[Attribute, ...] = (
    # Registration and hooks.
    _a(Use.CALL, "plugins.hook_registry", "HookRegistry.register", "target hook hook_type source"),
    _a(Use.READ, "plugins.hook_registry", "HookType.AROUND"),
    _a(Use.READ, "plugins.hook_registry", "HookType.REPLACE"),
    _a(Use.CALL, "arg_groups.choices", "add_attention_backend_choices"),
    _a(Use.CALL, "arg_groups.choices", "add_draft_attention_backend_choices"),
    _a(Use.READ, "arg_groups.choices", "DRAFT_ATTENTION_BACKEND_CHOICES"),
    _a(Use.CALL, "arg_groups.resolution_hooks", "register_resolution_hook", "name"),
    _a(
        Use.READ, "arg_groups.resolution_hooks", "_OVERRIDABLE_HOOKS",
        members="handle_model_source_paths handle_speculative_decoding",
    ),
    _a(Use.CALL, "layers.attention.attention_registry", "register_attention_backend", "name"),
    _a(Use.READ, "layers.attention.attention_registry", "ATTENTION_BACKENDS"),
    _a(
        Use.CALL, "speculative.spec_info", "SpeculativeAlgorithm.register",
        "name supports_overlap validate_server_args spec_class",
    ),
    _a(
        Use.CALL, "speculative.spec_info", "SpeculativeAlgorithm.create_future_map",
        "device req_to_token_pool needs_cpu_seq_lens needs_confidence_relay",
    ),
    _a(Use.READ, "speculative.spec_info", "SpeculativeAlgorithm.DFLASH"),
    _a(Use.HOOK, "speculative.dflash_utils", "validate_dflash_request", "req enable_overlap"),
    _a(Use.HOOK, "mem_cache.allocation_sizing", "get_req_to_token_extra_context_len", ""),
    # The algorithm.
    _a(Use.OVERRIDE, "speculative.spec_registry", "CustomSpecAlgo.is_dflash", ""),
    _a(Use.OVERRIDE, "speculative.spec_registry", "CustomSpecAlgo.is_dflash_family", ""),
    _a(Use.OVERRIDE, "speculative.spec_registry", "CustomSpecAlgo.supports_target_verify_for_draft", ""),
    _a(Use.OVERRIDE, "speculative.spec_registry", "CustomSpecAlgo.supports_prefill_shared_read_done", ""),
    _a(Use.OVERRIDE, "speculative.spec_registry", "CustomSpecAlgo.supports_grammar_overlap", ""),
    _a(
        Use.OVERRIDE, "speculative.spec_registry", "CustomSpecAlgo.get_num_tokens_per_req_for_target_verify",
        "num_draft_tokens is_draft_worker",
    ),
    _a(
        Use.OVERRIDE, "speculative.spec_registry", "CustomSpecAlgo.resolve_max_speculative_num_draft_tokens",
        "server_args",
    ),
    _a(Use.OVERRIDE, "speculative.spec_info", "SpeculativeAlgorithm.need_topk", ""),
    _a(Use.OVERRIDE, "speculative.spec_info", "SpeculativeAlgorithm.carries_draft_hidden_states", ""),
    # Arguments.
    _a(Use.CALL, "arg_groups.model_override_base", "attention_backends_of", "cfg"),
    _a(Use.CALL, "arg_groups.model_override_base", "resolved_view", "server_args"),
    _a(Use.CALL, "arg_groups.model_override_base", "resolving_view", "server_args"),
    _a(Use.CALL, "arg_groups.overrides", "declare_resolution", "server_args source **fields"),
    _a(Use.CALL, "arg_groups.overrides", "model_config_of"),
    _a(Use.READ, "arg_groups.overrides", "attention_backends_of"),
    _a(Use.READ, "arg_groups.overrides", "resolved_view"),
    _a(Use.READ, "arg_groups.overrides", "resolving_view"),
    _a(Use.READ, "arg_groups.overrides", "resolution_result", members="_raw_input"),
    _a(Use.CALL, "configs.hybrid_arch", "mambaish_config", "model_config"),
    _a(Use.READ, "configs.model_config", "ModelConfig.is_hybrid_swa"),
    _a(Use.READ, "configs.model_config", "ModelConfig.has_attention_sinks"),
    _a(Use.READ, "configs.model_config", "ModelConfig.is_deepseek_v4_arch"),
    _a(Use.READ, "configs.model_config", "ModelConfig.attention_chunk_size"),
    _a(Use.READ, "configs.model_config", "ModelConfig.vocab_size"),
    _a(Use.CALL, "model_executor.cuda_graph_config", "with_phase", "config phase **changes"),
    _a(Use.READ, "model_executor.cuda_graph_config", "Backend.DISABLED"),
    _a(Use.READ, "model_executor.cuda_graph_config", "Phase.DECODE"),
    _a(Use.CALL, "speculative.dflash_utils", "parse_dflash_draft_config", "draft_hf_config"),
    _a(Use.READ, "speculative.dflash_utils", "DFlashDraftConfig.is_domino"),
    _a(Use.READ, "speculative.dflash_utils", "DFlashDraftConfig.selector_rank"),
    _a(Use.CALL, "speculative.dflash_utils", "DFlashDraftConfig.resolve_block_size", "default"),
    _a(
        Use.CALL, "utils.hf_transformers.config", "get_config",
        "model trust_remote_code revision model_override_args model_config_parser **kwargs",
    ),
    _a(
        Use.READ, "arg_groups.field_order", "POSITIONAL_FIELD_ORDER",
        members="attention_backend prefill_attention_backend decode_attention_backend "
        "speculative_attention_mode speculative_draft_attention_backend cuda_graph_config "
        "max_running_requests max_total_tokens page_size pp_size dcp_size enable_dp_attention "
        "enable_two_batch_overlap "
        "enable_pdmux disaggregation_mode device enable_lora lora_paths enable_strict_thinking "
        "grammar_backend "
        "enable_deterministic_inference kv_cache_dtype trust_remote_code json_model_override_args "
        "speculative_algorithm speculative_adaptive speculative_draft_window_size speculative_eagle_topk "
        "enable_mixed_chunk enable_streaming_session speculative_use_block_verification "
        "speculative_accept_threshold_single "
        "speculative_accept_threshold_acc speculative_num_steps speculative_num_draft_tokens "
        "speculative_dflash_block_size "
        "speculative_draft_model_path speculative_draft_model_revision sampling_backend enable_metrics "
        "tp_size",
    ),
    _a(Use.CALL, "runtime_context", "get_spec", ""),
    _a(Use.CALL, "runtime_context", "_ConfigBag.override", "**kwargs"),
    _a(Use.CALL, "runtime_context", "attention_backends", ""),
    _a(Use.CALL, "runtime_context", "max_speculative_num_draft_tokens", ""),
    _a(Use.CALL, "mem_cache.allocation_sizing", "get_alloc_reserve_per_decode", ""),
    _a(Use.CALL, "mem_cache.allocation_sizing", "get_alloc_page_size", ""),
    # Requests.
    _a(Use.READ, "sampling.sampling_params", "SamplingParams.frequency_penalty"),
    _a(Use.READ, "sampling.sampling_params", "SamplingParams.presence_penalty"),
    _a(Use.READ, "sampling.sampling_params", "SamplingParams.repetition_penalty"),
    _a(Use.READ, "sampling.sampling_params", "SamplingParams.min_new_tokens"),
    _a(Use.READ, "sampling.sampling_params", "SamplingParams.beam_width"),
    _a(Use.READ, "managers.schedule_batch", "Req.sampling_params"),
    _a(Use.READ, "managers.schedule_batch", "Req.custom_logit_processor"),
    _a(
        Use.CALL, "layers.sampler", "apply_custom_logit_processor",
        "logits sampling_batch_info num_tokens_in_batch",
    ),
    _a(Use.READ, "sampling.sampling_batch_info", "SamplingBatchInfo.custom_params"),
    _a(Use.READ, "sampling.sampling_batch_info", "SamplingBatchInfo.custom_logit_processor"),
    _a(Use.READ, "sampling.sampling_batch_info", "ProcessorEntry.processor"),
    _a(Use.READ, "sampling.sampling_batch_info", "ProcessorEntry.rows"),
    _a(Use.READ, "sampling.sampling_batch_info", "ProcessorEntry.indices"),
    _a(Use.CALL, "utils.common", "async_d2h", "tensor"),
    _a(Use.READ, "managers.schedule_batch", "Req.return_hidden_states"),
    _a(Use.READ, "managers.schedule_batch", "Req.vocab_size"),
    _a(Use.READ, "managers.schedule_batch", "Req.multimodal_inputs"),
    _a(Use.READ, "managers.schedule_batch", "Req.logprob"),
    _a(Use.READ, "managers.schedule_batch", "ReqLogprob.top_logprobs_num"),
    _a(Use.READ, "sampling.sampling_params", "SamplingParams.stop_token_ids"),
    _a(Use.READ, "managers.schedule_batch", "Req.return_sampling_mask"),
    _a(Use.HOOK, "managers.schedule_batch", "Req.set_finish_with_abort", "error_msg status_code err_type"),
    _a(
        Use.HOOK, "managers.tokenizer_manager", "TokenizerManager._validate_one_request",
        "obj input_ids",
    ),
    _a(Use.READ, "managers.io_struct", "GenerateReqInput.return_logprob"),
    _a(Use.READ, "managers.io_struct", "GenerateReqInput.logprob_start_len"),
    _a(Use.READ, "managers.io_struct", "GenerateReqInput.top_logprobs_num"),
    _a(Use.READ, "managers.io_struct", "GenerateReqInput.session_params"),
    _a(Use.READ, "sampling.sampling_params", "SamplingParams.top_k"),
    _a(Use.READ, "sampling.sampling_params", "SamplingParams.custom_params"),
    _a(Use.READ, "sampling.sampling_params", "SamplingParams.temperature"),
    _a(Use.CALL, "sampling.sampling_params", "SamplingParams.normalize", "tokenizer"),
    # The end of an answer.
    _a(Use.HOOK, "managers.schedule_batch", "Req.update_finish_state", "new_accepted_len"),
    _a(Use.CALL, "managers.schedule_batch", "Req._check_vocab_boundary_finish", "new_accepted_tokens"),
    _a(Use.CALL, "managers.schedule_batch", "Req._check_token_based_finish", "new_accepted_tokens"),
    _a(Use.CALL, "managers.schedule_batch", "Req.tail_str", "new_accepted_len"),
    _a(Use.READ, "managers.schedule_batch", "Req.output_ids_through_stop"),
    _a(Use.READ, "managers.schedule_batch", "Req.finished_reason"),
    _a(Use.READ, "managers.schedule_batch", "Req.finished_len"),
    _a(Use.READ, "managers.schedule_batch", "Req.to_finish"),
    _a(Use.READ, "managers.schedule_batch", "Req.grammar"),
    _a(Use.READ, "managers.schedule_batch", "Req.reasoning_tokens"),
    _a(Use.CALL, "constrained.base_grammar_backend", "BaseGrammarObject.is_terminated", ""),
    _a(Use.READ, "sampling.sampling_params", "SamplingParams.max_new_tokens"),
    _a(Use.READ, "sampling.sampling_params", "SamplingParams.stop_strs"),
    _a(Use.READ, "sampling.sampling_params", "SamplingParams.stop_regex_strs"),
    _a(
        Use.HOOK, "session.session_controller", "Session._concat_token_arrays",
        "last_req req session_params",
    ),
    # The target's choice.
    _a(Use.OVERRIDE, "layers.sampler", "Sampler._sample_from_probs",
       "probs sampling_info positions simple_sampling_case"),
    _a(
        Use.CALL, "layers.sampler", "Sampler.forward",
        "logits_output sampling_info return_logprob top_logprobs_nums token_ids_logprobs positions "
        "logprob_logits",
    ),
    _a(Use.CALL, "utils.async_probe", "sanitize_nan_logits", "logits msg"),
    _a(
        Use.CALL, "layers.sampler", "sampling_from_probs_torch", "probs sampling_seed positions",
    ),
    _a(
        Use.CALL, "layers.sampler", "top_k_top_p_min_p_sampling_from_probs_torch",
        "probs top_ks top_ps min_ps need_min_p_sampling sampling_seed positions return_filtered_probs "
        "max_top_k",
    ),
    _a(Use.READ, "sampling.sampling_params", "TOP_K_ALL"),
    _a(Use.READ, "sampling.sampling_params", "SamplingParams.sampling_seed"),
    _a(Use.READ, "sampling.sampling_batch_info", "SamplingBatchInfo.temperatures"),
    _a(Use.READ, "sampling.sampling_batch_info", "SamplingBatchInfo.top_ps"),
    _a(Use.READ, "sampling.sampling_batch_info", "SamplingBatchInfo.top_ks"),
    _a(Use.READ, "sampling.sampling_batch_info", "SamplingBatchInfo.min_ps"),
    _a(Use.READ, "sampling.sampling_batch_info", "SamplingBatchInfo.sampling_seed"),
    _a(Use.READ, "sampling.sampling_batch_info", "SamplingBatchInfo.is_all_greedy"),
    _a(Use.READ, "sampling.sampling_batch_info", "SamplingBatchInfo.is_any_greedy"),
    _a(Use.READ, "sampling.sampling_batch_info", "SamplingBatchInfo.need_top_k_sampling"),
    _a(Use.READ, "sampling.sampling_batch_info", "SamplingBatchInfo.need_top_p_sampling"),
    _a(Use.READ, "sampling.sampling_batch_info", "SamplingBatchInfo.need_min_p_sampling"),
    _a(Use.READ, "sampling.sampling_batch_info", "SamplingBatchInfo.logit_bias"),
    _a(Use.READ, "sampling.sampling_batch_info", "SamplingBatchInfo.grammars"),
    _a(Use.READ, "sampling.sampling_batch_info", "SamplingBatchInfo.penalizer_orchestrator"),
    _a(Use.READ, "sampling.sampling_batch_info", "SamplingBatchInfo.acc_additive_penalties"),
    _a(Use.READ, "sampling.sampling_batch_info", "SamplingBatchInfo.acc_scaling_penalties"),
    _a(Use.READ, "sampling.sampling_batch_info", "SamplingBatchInfo.has_custom_logit_processor"),
    _a(
        Use.CALL, "speculative.spec_utils", "GrammarTree.from_device",
        "retrieve_next_token retrieve_next_sibling draft_token",
    ),
    _a(
        Use.CALL, "speculative.spec_utils", "build_grammar_vocab_mask",
        "reqs tree sampling_info device barrier",
    ),
    _a(Use.CALL, "constrained.base_grammar_backend", "GrammarMask.apply", "logits"),
    _a(Use.READ, "managers.schedule_batch", "ScheduleBatch.has_grammar"),
    _a(Use.READ, "managers.schedule_batch", "Req.origin_input_ids"),
    _a(Use.READ, "managers.schedule_batch", "Req.output_ids"),
    _a(Use.CALL, "utils.common", "async_h2d", "args dtype device"),
    _a(Use.READ, "model_executor.model_runner", "ModelRunner.sampler"),
    _a(Use.READ, "managers.schedule_batch", "ScheduleBatch.reqs"),
    _a(Use.READ, "managers.schedule_batch", "ScheduleBatch.device"),
    # The worker.
    _a(
        Use.OVERRIDE, "speculative.dflash_worker_v2", "DFlashWorkerV2.__init__",
        "server_args gpu_id nccl_port target_worker",
    ),
    _a(
        Use.OVERRIDE, "speculative.dflash_worker_v2", "DFlashWorkerV2.alloc_memory_pool",
        "memory_pool_config req_to_token_pool token_to_kv_pool_allocator",
    ),
    _a(Use.OVERRIDE, "speculative.dflash_worker_v2", "DFlashWorkerV2.init_attention_backends", ""),
    _a(Use.OVERRIDE, "speculative.dflash_worker_v2", "DFlashWorkerV2.init_cuda_graphs", ""),
    _a(Use.OVERRIDE, "speculative.dflash_worker_v2", "DFlashWorkerV2._maybe_build_draft_sampler", ""),
    _a(
        Use.OVERRIDE,
        "speculative.dflash_worker_v2",
        "DFlashWorkerV2._validate_phase1_sampling_support",
        "batch",
    ),
    _a(Use.OVERRIDE, "speculative.dflash_worker_v2", "DFlashWorkerV2.prewarm_sampling", ""),
    _a(
        Use.OVERRIDE, "speculative.dflash_worker_v2", "DFlashWorkerV2.forward_batch_generation",
        "batch on_publish grammar_barrier pp_proxy_tensors",
    ),
    _a(
        Use.OVERRIDE, "speculative.dflash_worker_v2", "DFlashWorkerV2._make_next_draft_input_prefill",
        "bonus_tokens seq_lens",
    ),
    _a(
        Use.OVERRIDE, "speculative.dflash_worker_v2", "DFlashWorkerV2._make_next_draft_input_decode",
        "bonus_tokens new_seq_lens",
    ),
    _a(
        Use.CALL, "speculative.dflash_worker_v2", "DFlashWorkerV2._append_target_hidden_to_draft_kv_by_loc",
        "target_hidden cache_loc positions cache_loc_2d commit_lens extend_lens",
    ),
    _a(Use.CALL, "speculative.dflash_worker_v2", "DFlashWorkerV2._draft_write_ids", "plan"),
    _a(Use.READ, "speculative.dflash_worker_v2", "DFlashWorkerV2._target_logits_processor"),
    _a(Use.READ, "speculative.dflash_worker_v2", "DFlashWorkerV2._fused_kv_helper"),
    Attribute(
        Use.READ, "sglang.kernels.ops.speculative.fused_kv_materialize",
        "FusedKVMaterializeHelper._workspace_capacity", None, (),
    ),
    _a(Use.READ, "model_executor.model_runner", "ModelRunner.capture_tail_hooks"),
    _a(Use.READ, "mem_cache.kv_index_translator", "KVIndexTranslator.is_translating"),
    _a(Use.READ, "model_executor.model_runner", "ModelRunnerOutput.can_run_graph"),
    _a(Use.READ, "speculative.dflash_worker_v2", "DFlashWorkerV2._tp_sync"),
    _a(Use.READ, "speculative.dflash_worker_v2", "DFlashWorkerV2._mask_token_id"),
    _a(Use.READ, "speculative.dflash_worker_v2", "DFlashWorkerV2._noise_embed_scale"),
    _a(Use.READ, "speculative.dflash_worker_v2", "DFlashWorkerV2._draft_block_spec_info"),
    _a(Use.READ, "speculative.dflash_worker_v2", "DFlashWorkerV2.selector"),
    _a(Use.READ, "speculative.dflash_worker_v2", "DFlashWorkerV2.lilicorr"),
    _a(Use.READ, "speculative.dflash_worker_v2", "DFlashWorkerV2.draft_model_runner"),
    _a(Use.READ, "speculative.dflash_worker_v2", "DFlashWorkerV2.draft_parallel_layout"),
    _a(Use.READ, "speculative.dflash_worker_v2", "DFlashWorkerV2.use_compact_draft_cache"),
    _a(
        Use.CALL, "speculative.dflash_worker_v2", "DFlashWorkerV2._compute_compact_draft_seq_lens", "seq_lens"
    ),
    _a(
        Use.CALL, "speculative.dflash_worker_v2", "DFlashWorkerV2._fill_compact_seq_lens_cpu_bound",
        "batch_seq_lens_cpu nxt_kv_lens_cpu out",
    ),
    _a(Use.CALL, "speculative.dflash_worker_v2", "DFlashWorkerV2._ensure_draft_block_buffers", "bs"),
    _a(
        Use.CALL, "speculative.dflash_worker_v2", "DFlashWorkerV2._rebuild_compact_draft_cache",
        "req_pool_indices prefix_lens draft_prefix_lens verify_out_cache_loc_2d bs block_size",
    ),
    _a(Use.READ, "speculative.dflash_worker_v2", "DFlashWorkerV2.model_runner"),
    _a(Use.READ, "speculative.dflash_worker_v2", "DFlashWorkerV2.device"),
    _a(Use.READ, "speculative.dflash_worker_v2", "DFlashWorkerV2.speculative_num_draft_tokens"),
    _a(
        Use.CALL, "model_executor.model_runner", "ModelRunner.forward",
        "forward_batch skip_attn_backend_init pp_proxy_tensors reinit_attn_backend split_forward_count",
    ),
    _a(Use.CALL, "model_executor.model_runner", "ModelRunner.prewarm_sampling", ""),
    _a(Use.READ, "model_executor.model_runner", "ModelRunner.decode_cuda_graph_runner"),
    _a(
        Use.CALL, "model_executor.runner.decode_cuda_graph_runner", "DecodeCudaGraphRunner.__init__",
        "model_runner attn_backend speculative_num_steps speculative_num_draft_tokens record_nolora_graph",
    ),
    _a(Use.READ, "model_executor.model_runner", "ModelRunner.model_config"),
    _a(Use.READ, "model_executor.model_runner", "ModelRunner.model"),
    _a(Use.READ, "model_executor.model_runner", "ModelRunner.kv_index_translator"),
    _a(Use.READ, "model_executor.model_runner", "ModelRunner.req_to_token_pool"),
    _a(Use.READ, "model_executor.model_runner", "ModelRunner.token_to_kv_pool"),
    _a(
        Use.CALL, "managers.tp_worker", "TpModelWorker.forward_batch_generation",
        "batch forward_batch pp_proxy_tensors is_verify skip_attn_backend_init capture_hidden_mode "
        "return_kv_loc_plan",
    ),
    _a(Use.READ, "managers.tp_worker", "TpModelWorker.model_runner"),
    _a(Use.READ, "managers.schedule_batch", "ScheduleBatch.forward_mode"),
    _a(Use.READ, "managers.schedule_batch", "ScheduleBatch.is_extend_in_batch"),
    _a(Use.READ, "managers.schedule_batch", "ScheduleBatch.req_pool_indices"),
    _a(Use.READ, "managers.schedule_batch", "ScheduleBatch.seq_lens"),
    _a(Use.READ, "managers.schedule_batch", "ScheduleBatch.seq_lens_cpu"),
    _a(Use.READ, "managers.schedule_batch", "ScheduleBatch.seq_lens_sum"),
    _a(Use.READ, "managers.schedule_batch", "ScheduleBatch.out_cache_loc"),
    _a(Use.READ, "managers.schedule_batch", "ScheduleBatch.spec_info"),
    _a(Use.READ, "managers.schedule_batch", "ScheduleBatch.sampling_info"),
    _a(Use.READ, "managers.schedule_batch", "ScheduleBatch.return_logprob"),
    _a(Use.READ, "managers.schedule_batch", "ScheduleBatch.can_run_decode_cuda_graph"),
    _a(Use.READ, "mem_cache.memory_pool", "ReqToTokenPool.req_to_token"),
    _a(
        Use.CALL, "mem_cache.kv_index_translator", "KVIndexTranslator.plan",
        "req_pool_indices seq_lens seq_lens_cpu write_virtual read_extent write_slots translated_writes",
    ),
    _a(Use.CALL, "mem_cache.kv_loc_plan", "KVLocPlan.bind", "batch reader cols"),
    _a(Use.CALL, "mem_cache.kv_loc_plan", "KVLocPlan.write_ids", "reader kind cols"),
    _a(Use.READ, "mem_cache.kv_loc_plan", "KVLocPlan.write_virtual"),
    _a(Use.CALL, "mem_cache.kv_loc_plan", "KVLocPlan.reads_from", "source seq_lens seq_lens_cpu read_extent"),
    _a(Use.CALL, "models.dflash", "candidate_topk", "hidden lm_head k with_partition"),
    _a(Use.CALL, "runtime_context", "get_parallel", ""),
    _a(Use.CALL, "distributed.parallel_state", "get_tp_group", ""),
    _a(Use.READ, "distributed.parallel_state", "GroupCoordinator.world_size"),
    _a(Use.READ, "distributed.parallel_state", "GroupCoordinator.cpu_group"),
    _a(Use.READ, "distributed.parallel_state", "GroupCoordinator.first_rank"),
    _a(Use.CALL, "speculative.dflash_utils", "is_dense_head_weight", "weight"),
    _a(Use.CALL, "layers.logits_processor", "should_apply_lm_head_quant_method", "lm_head quant_method"),
    _a(Use.READ, "layers.vocab_parallel_embedding", "VocabParallelEmbedding.org_vocab_size"),
    _a(Use.READ, "layers.vocab_parallel_embedding", "VocabParallelEmbedding.quant_method"),
    _a(Use.READ, "configs.model_config", "ModelConfig.hidden_size"),
    _a(Use.CALL, "lora.layers", "unwrap_lora_layer", "module"),
    _a(Use.CALL, "speculative.spec_utils", "draft_tp_context", "layout"),
    _a(
        Use.CALL, "layers.logprob_processor", "compute_spec_logprobs",
        "batch logits_output predict accept_index chain_stride",
    ),
    _a(Use.CALL, "layers.logits_processor", "LogitsProcessor.is_deferred_shard", "logits"),
    _a(Use.CALL, "layers.logits_processor", "LogitsProcessor.finish_deferred_gather", "logits"),
    _a(Use.READ, "layers.logits_processor", "LogitsProcessorOutput.next_token_logits"),
    _a(Use.READ, "layers.logits_processor", "LogitsProcessorOutput.hidden_states"),
    _a(Use.CALL, "speculative.spec_tp_sync", "SpecTpSync.sync", "site values"),
    _a(Use.READ, "speculative.spec_tp_sync", "SpecTpSyncSite.DFLASH_ACCEPT_GREEDY"),
    _a(Use.READ, "speculative.spec_tp_sync", "SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE"),
    _a(Use.READ, "managers.utils", "GenerationBatchResult.next_token_ids"),
    _a(Use.READ, "managers.utils", "GenerationBatchResult.logits_output"),
    _a(Use.READ, "managers.utils", "GenerationBatchResult.accept_lens"),
    _a(Use.READ, "managers.utils", "GenerationBatchResult.next_draft_input"),
    _a(Use.READ, "managers.utils", "GenerationBatchResult.speculative_num_draft_tokens"),
    _a(Use.READ, "managers.utils", "GenerationBatchResult.speculative_output_stride"),
    _a(Use.READ, "managers.utils", "GenerationBatchResult.new_seq_lens"),
    _a(Use.READ, "managers.utils", "GenerationBatchResult.can_run_cuda_graph"),
    _a(Use.READ, "managers.utils", "GenerationBatchResult.routed_experts_output"),
    _a(Use.READ, "managers.utils", "GenerationBatchResult.indexer_topk_output"),
    # What comes back of a round, and metrics.
    _a(
        Use.OVERRIDE, "managers.utils", "GenerationBatchResult.copy_to_cpu",
        "return_logprob return_hidden_states",
    ),
    _a(
        Use.HOOK, "managers.scheduler_components.batch_result_processor",
        "SchedulerBatchResultProcessor._resolve_spec_v2_tokens", "result batch",
    ),
    _a(
        Use.READ, "managers.scheduler_components.batch_result_processor",
        "SchedulerBatchResultProcessor.metrics_reporter",
    ),
    _a(
        Use.READ, "managers.scheduler_components.batch_result_processor",
        "SchedulerBatchResultProcessor.metrics_collector",
    ),
    _a(
        Use.READ, "managers.scheduler_components.metrics_reporter",
        "SchedulerMetricsReporter.current_scheduler_metrics_enabled",
    ),
    _a(Use.READ, "managers.utils", "GenerationBatchResult.num_correct_drafts_per_req_cpu"),
    _a(Use.READ, "managers.schedule_batch", "Req.is_retracted"),
    _a(Use.CALL, "managers.schedule_batch", "Req.finished", ""),
    _a(Use.CALL, "runtime_context", "get_observability", ""),
    _a(Use.READ, "observability.metrics_collector", "SchedulerMetricsCollector.labels"),
    _a(Use.READ, "observability.metrics_collector", "_StatLoggerDIMixin._counter_cls"),
    _a(Use.READ, "observability.metrics_collector", "_StatLoggerDIMixin._histogram_cls"),
    # Spec inputs.
    _a(
        Use.CALL, "speculative.dflash_info", "DFlashVerifyInput.prepare_for_verify",
        "batch target_worker defer_metadata_init",
    ),
    _a(Use.READ, "speculative.dflash_info", "DFlashVerifyInput.draft_token"),
    _a(Use.READ, "speculative.dflash_info", "DFlashVerifyInput.positions"),
    _a(Use.READ, "speculative.dflash_info", "DFlashVerifyInput.draft_token_num"),
    _a(Use.READ, "speculative.dflash_info", "DFlashVerifyInput.capture_hidden_mode"),
    _a(Use.READ, "speculative.dflash_info", "DFlashVerifyInput.kv_loc_plan"),
    _a(Use.READ, "speculative.dflash_info", "DFlashVerifyInput.kv_loc_cols"),
    _a(Use.OVERRIDE, "speculative.dflash_info_v2", "DFlashDraftInputV2.prepare_for_decode", "batch"),
    _a(Use.READ, "speculative.dflash_info_v2", "DFlashDraftInputV2.bonus_tokens"),
    _a(Use.READ, "speculative.dflash_info_v2", "DFlashDraftInputV2.nxt_kv_lens_cpu"),
    _a(Use.READ, "speculative.dflash_info_v2", "DFlashDraftInputV2.nxt_kv_lens_sum"),
    _a(Use.READ, "speculative.dflash_info_v2", "DFlashDraftInputV2.new_seq_lens"),
    _a(Use.READ, "speculative.dflash_info_v2", "DFlashDraftInputV2.topk_p"),
    _a(Use.READ, "speculative.dflash_info_v2", "DFlashDraftInputV2.topk_index"),
    _a(Use.READ, "speculative.dflash_info_v2", "DFlashDraftInputV2.hidden_states"),
    _a(Use.READ, "model_executor.forward_batch_info", "ForwardBatch.req_pool_indices"),
    _a(Use.READ, "model_executor.forward_batch_info", "ForwardBatch.forward_mode"),
    _a(Use.READ, "model_executor.forward_batch_info", "ForwardBatch.input_ids"),
    _a(Use.READ, "model_executor.forward_batch_info", "ForwardBatch.positions"),
    _a(Use.READ, "model_executor.forward_batch_info", "ForwardBatch.spec_algorithm"),
    _a(Use.READ, "model_executor.forward_batch_info", "ForwardBatch.capture_hidden_mode"),
    _a(Use.READ, "model_executor.forward_batch_info", "ForwardBatch.seq_lens"),
    _a(Use.READ, "model_executor.forward_batch_info", "ForwardBatch.seq_lens_cpu"),
    _a(Use.READ, "model_executor.forward_batch_info", "ForwardBatch.seq_lens_sum"),
    _a(Use.READ, "model_executor.forward_batch_info", "ForwardBatch.out_cache_loc"),
    _a(Use.READ, "model_executor.forward_batch_info", "ForwardBatch.batch_size"),
    _a(Use.READ, "model_executor.forward_batch_info", "ForwardBatch.spec_info"),
    _a(Use.READ, "model_executor.forward_batch_info", "ForwardBatch.input_embeds"),
    _a(Use.READ, "model_executor.forward_batch_info", "ForwardBatch.num_token_non_padded"),
    _a(Use.READ, "model_executor.forward_batch_info", "ForwardBatch.global_num_token_non_padded_cpu"),
    _a(Use.READ, "model_executor.forward_batch_info", "ForwardBatch.can_run_decode_cuda_graph"),
    _a(Use.READ, "model_executor.forward_batch_info", "ForwardMode.TARGET_VERIFY"),
    _a(Use.CALL, "model_executor.forward_batch_info", "ForwardMode.is_target_verify", ""),
    _a(Use.CALL, "model_executor.forward_batch_info", "ForwardMode.is_extend", "include_draft_extend_v2"),
    _a(Use.CALL, "model_executor.forward_batch_info", "ForwardMode.is_idle", ""),
    _a(Use.READ, "model_executor.forward_batch_info", "CaptureHiddenMode.FULL"),
    _a(Use.READ, "model_executor.forward_batch_info", "CaptureHiddenMode.NULL"),
    _a(Use.CALL, "model_executor.forward_batch_info", "enable_num_token_non_padded", ""),
    # The attention backend.
    _a(
        Use.OVERRIDE, "layers.attention.base_attn_backend", "AttentionBackend.init_forward_metadata",
        "forward_batch",
    ),
    _a(
        Use.OVERRIDE, "layers.attention.base_attn_backend", "AttentionBackend.forward",
        "q k v layer forward_batch save_kv_cache **kwargs",
    ),
    _a(
        Use.OVERRIDE, "layers.attention.base_attn_backend", "AttentionBackend.forward_extend",
        "q k v layer forward_batch save_kv_cache **kwargs",
    ),
    _a(
        Use.OVERRIDE,
        "layers.attention.base_attn_backend",
        "AttentionBackend.init_forward_metadata_out_graph",
        "forward_batch in_capture",
    ),
    _a(
        Use.OVERRIDE, "layers.attention.base_attn_backend", "AttentionBackend.init_forward_metadata_in_graph",
        "forward_batch",
    ),
    _a(
        Use.OVERRIDE, "layers.attention.base_attn_backend", "AttentionBackend.init_cuda_graph_state",
        "max_bs max_num_tokens",
    ),
    _a(
        Use.OVERRIDE,
        "layers.attention.base_attn_backend",
        "AttentionBackend.get_cuda_graph_seq_len_fill_value",
        "",
    ),
    _a(Use.OVERRIDE, "layers.attention.base_attn_backend", "AttentionBackend.shared_read_ends", "fm"),
    _a(
        Use.OVERRIDE,
        "layers.attention.base_attn_backend",
        "AttentionBackend.get_fused_kv_write_buffers",
        "layer forward_batch",
    ),
    _a(
        Use.OVERRIDE, "layers.attention.base_attn_backend", "AttentionBackend.glue_target_verify_metadata",
        "",
    ),
    _a(Use.OVERRIDE, "layers.attention.base_attn_backend", "AttentionBackend.glue_draft_metadata", ""),
    _a(Use.READ, "layers.attention.base_attn_backend", "SharedReadEnds.POST_REPLAY"),
    _a(Use.CALL, "runtime_context", "get_schedule", ""),
    _a(Use.READ, "model_executor.model_runner", "ModelRunner.is_draft_worker"),
    _a(Use.READ, "model_executor.model_runner", "ModelRunner.device"),
    _a(Use.OVERRIDE, "layers.attention.base_attn_backend", "AttentionBackend.needs_cpu_seq_lens"),
    _a(Use.OVERRIDE, "layers.attention.base_attn_backend", "AttentionBackend.verify_mask"),
    _a(Use.CALL, "mem_cache.memory_pool", "KVWriteLoc.for_batch", "forward_batch swa_loc full_loc"),
    _a(Use.CALL, "mem_cache.memory_pool", "MHATokenToKVPool.get_key_buffer", "layer_id"),
    _a(Use.CALL, "mem_cache.memory_pool", "MHATokenToKVPool.get_value_buffer", "layer_id"),
    _a(
        Use.CALL, "mem_cache.memory_pool", "MHATokenToKVPool.set_kv_buffer",
        "layer loc_info cache_k cache_v k_scale v_scale layer_id_override dcp_kv_mask",
    ),
    _a(Use.CALL, "mem_cache.memory_pool", "MHATokenToKVPool.move_kv_cache", "tgt_loc src_loc"),
    _a(
        Use.CALL, "mem_cache.memory_pool", "MLATokenToKVPool.set_mla_kv_buffer",
        "layer loc_info cache_k_nope cache_k_rope layer_id_override",
    ),
    _a(Use.CALL, "mem_cache.memory_pool", "MLATokenToKVPool.get_key_buffer", "layer_id"),
    _a(Use.CALL, "mem_cache.memory_pool", "MLATokenToKVPool.get_value_buffer", "layer_id"),
    _a(Use.CALL, "mem_cache.memory_pool", "MLATokenToKVPool.move_kv_cache", "tgt_loc src_loc"),
    _a(Use.READ, "mem_cache.memory_pool", "MLATokenToKVPool.kv_buffer"),
    _a(Use.READ, "mem_cache.memory_pool", "MHATokenToKVPool.use_hnd"),
    _a(Use.READ, "mem_cache.memory_pool", "KVCache.dtype"),
    _a(Use.READ, "mem_cache.base_swa_memory_pool", "BaseSWAKVPool"),
    _a(Use.READ, "mem_cache.swa_memory_pool", "SWAKVPool.layers_mapping"),
    _a(Use.READ, "mem_cache.swa_memory_pool", "SWAKVPool.full_to_swa_index_mapping"),
    _a(Use.READ, "mem_cache.swa_memory_pool", "SWAKVPool.full_kv_pool"),
    _a(Use.READ, "mem_cache.swa_memory_pool", "SWAKVPool.swa_kv_pool"),
    _a(Use.CALL, "mem_cache.swa_memory_pool", "SWAKVPool.translate_loc_from_full_to_swa", "kv_indices"),
    _a(
        Use.CALL, "mem_cache.swa_memory_pool", "SWAKVPool.set_kv_buffer",
        "layer loc_info cache_k cache_v k_scale v_scale",
    ),
    _a(
        Use.CALL, "mem_cache.swa_memory_pool", "SWAKVPool.set_mla_kv_buffer",
        "layer loc_info cache_k_nope cache_k_rope",
    ),
    _a(Use.CALL, "mem_cache.swa_memory_pool", "SWAKVPool.get_key_buffer", "layer_id"),
    _a(Use.CALL, "mem_cache.swa_memory_pool", "SWAKVPool.get_value_buffer", "layer_id"),
    _a(Use.CALL, "mem_cache.swa_memory_pool", "SWAKVPool.move_kv_cache", "tgt_loc src_loc"),
    _a(
        Use.CALL, "mem_cache.memory_pool", "MLATokenToKVPool.set_kv_buffer",
        "layer loc_info cache_k cache_v layer_id_override",
    ),
    _a(Use.READ, "layers.radix_attention", "AttentionType.ENCODER_ONLY"),
    _a(Use.READ, "layers.radix_attention", "RadixAttention.layer_id"),
    _a(Use.READ, "layers.radix_attention", "RadixAttention.sliding_window_size"),
    _a(Use.READ, "layers.radix_attention", "RadixAttention.use_irope"),
    _a(Use.READ, "layers.radix_attention", "RadixAttention.xai_temperature_len"),
    _a(Use.READ, "layers.radix_attention", "RadixAttention.scaling"),
    _a(Use.READ, "layers.radix_attention", "RadixAttention.k_scale"),
    _a(Use.READ, "layers.radix_attention", "RadixAttention.v_scale"),
    _a(Use.READ, "layers.radix_attention", "RadixAttention.k_scale_float"),
    _a(Use.READ, "layers.radix_attention", "RadixAttention.v_scale_float"),
    _a(Use.READ, "layers.radix_attention", "RadixAttention.logit_cap"),
    _a(Use.READ, "layers.radix_attention", "RadixAttention.attn_type"),
    _a(Use.READ, "layers.radix_attention", "RadixAttention.tp_q_head_num"),
    _a(Use.READ, "layers.radix_attention", "RadixAttention.tp_k_head_num"),
    _a(Use.READ, "layers.radix_attention", "RadixAttention.qk_head_dim"),
    _a(Use.READ, "layers.radix_attention", "RadixAttention.v_head_dim"),
    # The CPU platform.
    _a(Use.READ, "environ", "Envs.SGLANG_PLATFORM"),
    _a(Use.READ, "environ", "envs"),
    _a(Use.READ, "plugins.hook_registry", "HookType.AFTER"),
    _a(Use.READ, "platforms.cpu", "CpuDeviceMixin"),
    _a(Use.READ, "platforms.device_mixin", "PlatformEnum.OOT"),
    _a(Use.READ, "platforms.interface", "KVPoolKind"),
    _a(Use.OVERRIDE, "platforms.device_mixin", "DeviceMixin._enum"),
    _a(Use.OVERRIDE, "platforms.interface", "SRTPlatform.capabilities"),
    _a(Use.READ, "platforms.interface", "PlatformCapabilities.supports_triton"),
    _a(Use.READ, "platforms.interface", "PlatformCapabilities.graph_capture"),
    _a(Use.OVERRIDE, "platforms.interface", "SRTPlatform.apply_server_args_defaults", "server_args"),
    _a(Use.OVERRIDE, "platforms.interface", "SRTPlatform.get_dispatch_key_name", ""),
    _a(Use.OVERRIDE, "platforms.interface", "SRTPlatform.get_kv_pool_cls", "kind"),
    _a(Use.OVERRIDE, "platforms.interface", "SRTPlatform.supports_speculative_algorithm", "algorithm"),
    _a(
        Use.OVERRIDE, "platforms.interface", "SRTPlatform.supports_speculative_draft_attention_backend",
        "algorithm backend",
    ),
    _a(
        Use.OVERRIDE, "platforms.interface", "SRTPlatform.get_default_speculative_draft_attention_backend",
        "algorithm",
    ),
    _a(Use.OVERRIDE, "platforms.interface", "SRTPlatform.get_speculative_cache_locs_fn", ""),
    _a(Use.OVERRIDE, "mem_cache.memory_pool", "MHATokenToKVPool._init_kv_copy_and_warmup", ""),
    _a(Use.OVERRIDE, "mem_cache.memory_pool", "MHATokenToKVPool._move_kv_cache_impl", "tgt_loc src_loc"),
    _a(Use.CALL, "mem_cache.memory_pool", "move_kv_cache_native", "k_buffer v_buffer tgt_loc src_loc"),
    _a(Use.READ, "mem_cache.memory_pool", "MHATokenToKVPool.k_buffer"),
    _a(Use.READ, "mem_cache.memory_pool", "MHATokenToKVPool.v_buffer"),
    _a(Use.READ, "mem_cache.memory_pool", "MHATokenToKVPool._kv_copy_config"),
    _a(Use.HOOK, "layers.sampler", "murmur_hash32"),
    _a(
        Use.HOOK, "mem_cache.allocation", "assign_req_to_token_pool_func",
        "req_pool_indices req_to_token start_offset end_offset out_cache_loc batch_size",
    ),
    _a(
        Use.HOOK, "mem_cache.allocation", "get_last_loc",
        "req_to_token req_pool_indices_tensor prefix_lens_tensor",
    ),
    _a(
        Use.CALL, "mem_cache.allocation", "get_last_loc_torch",
        "req_to_token req_pool_indices_tensor prefix_lens_tensor",
    ),
    _a(
        Use.HOOK, "arg_groups.model_override_base", "get_default_attn_backend",
        "server_args use_mla_backend model_config",
    ),
    _a(
        Use.HOOK, "model_executor.model_runner", "ModelRunner._extend_forward_kwargs",
        "forward_batch pp_proxy_tensors",
    ),
    _a(Use.READ, "model_executor.model_runner", "ModelRunner.dtype"),
    _a(Use.READ, "model_executor.forward_batch_info", "ForwardBatch.replace_embeds"),
    # The process that forks servers for tests and the demo.
    _a(Use.HOOK, "entrypoints.engine", "_set_envs_and_config", "server_args"),
    # `ddtree doctor`, which loads the plugin as a server would.
    _a(Use.CALL, "plugins", "load_plugins", ""),
)
