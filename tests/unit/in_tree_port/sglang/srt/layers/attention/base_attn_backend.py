"""What a backend answers."""

from __future__ import annotations


class AttentionBackend:
    def init_forward_metadata(self, forward_batch):
        raise NotImplementedError

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int):
        raise NotImplementedError

    def init_forward_metadata_capture_cuda_graph(
        self, bs, num_tokens, req_pool_indices, seq_lens, encoder_lens, forward_mode, spec_info
    ):
        raise NotImplementedError

    def init_forward_metadata_replay_cuda_graph(
        self, bs, req_pool_indices, seq_lens, seq_lens_sum, encoder_lens, forward_mode, spec_info,
        seq_lens_cpu,
    ):  # fmt: skip
        raise NotImplementedError

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        raise NotImplementedError
