"""The backend on real KV pools: what it writes and attends to, layer by layer."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel

from sglang_ddtree_patch.attention import backend
from sglang_ddtree_patch.attention.backend import DDTreeVerifyBackend
from sglang_ddtree_patch.cpu.kv_pool import CpuMHATokenToKVPool
from sglang_ddtree_patch.kernels.attention.reference import tree_attention_reference
from sglang_ddtree_patch.kernels.tree.build import ancestor_masks
from sglang_ddtree_patch.round.verify_input import TreeVerifyInput

HEADS, KV_HEADS, DIM = 4, 2, 16
PREFIX, ROWS, PAGE = 37, 6, 8
SLOTS = 64
SCALE = DIM**-0.5
POOL = {
    "page_size": PAGE, "dtype": torch.float32, "head_num": KV_HEADS, "head_dim": DIM, "device": "cpu",
    "enable_memory_saver": False,
}  # fmt: skip
PARENTS = torch.tensor([[-1, 0, 0, 1, 3, 3]])


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    """What the backend asks SGLang's running server for."""
    monkeypatch.setattr(backend, "get_schedule", lambda: SimpleNamespace(page_size=PAGE))
    monkeypatch.setattr(backend, "get_spec", lambda: SimpleNamespace(speculative_num_draft_tokens=ROWS))
    with get_parallel().override(dcp_enabled=False, attn_dcp_size=1, attn_dcp_rank=0):
        yield


class Round:
    """One request behind a prefix, its slots dealt page by page, and a block to verify."""

    def __init__(self, pool: object, *layers: RadixAttention):
        generator = torch.Generator().manual_seed(0)
        self.pool = pool
        self.draw = lambda *shape: torch.randn(shape, generator=generator)
        pages = torch.tensor([5, 2, 7, 1, 4, 3])
        self.slots = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()
        table = torch.zeros((2, 64), dtype=torch.int32)
        table[1, : len(self.slots)] = self.slots.int()
        self.table = table
        runner = SimpleNamespace(
            model=torch.nn.Sequential(*layers), token_to_kv_pool=pool, device="cpu", is_draft_worker=False,
            req_to_token_pool=SimpleNamespace(req_to_token=table),
        )  # fmt: skip
        self.backend = DDTreeVerifyBackend(runner, wrapped=None)
        self.masks = ancestor_masks(PARENTS, max_depth=ROWS)
        self.batch = SimpleNamespace(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=1,
            input_ids=torch.zeros(ROWS),
            req_pool_indices=torch.tensor([1]),
            seq_lens=torch.tensor([PREFIX]),
            out_cache_loc=self.slots[PREFIX : PREFIX + ROWS],
            out_cache_loc_is_physical=True,
            spec_info=self.tree_input(),
        )
        self.backend.init_forward_metadata(self.batch)

    def tree_input(self) -> TreeVerifyInput:
        spec_info = object.__new__(TreeVerifyInput)
        spec_info.tree_masks = self.masks
        return spec_info

    def attend(self, layer: RadixAttention, prefix_keys, prefix_values, **extras) -> tuple[torch.Tensor, ...]:
        """Verify a block behind a prefix in the pool: queries, all keys and values, and the result."""
        keys = torch.cat([prefix_keys, self.draw(ROWS, KV_HEADS, DIM)])
        values = torch.cat([prefix_values, self.draw(ROWS, KV_HEADS, DIM)])
        query = self.draw(ROWS, HEADS * DIM)
        out = self.backend.forward(
            query, keys[PREFIX:].clone(), values[PREFIX:].clone(), layer, self.batch, **extras
        )
        return query.view(ROWS, HEADS, DIM), keys, values, out.view(ROWS, HEADS, DIM)

    def expected(self, query, keys, values, **options) -> torch.Tensor:
        places = torch.arange(len(keys), dtype=torch.int32)[None]
        first, length = torch.tensor([0]), torch.tensor([PREFIX])
        return tree_attention_reference(
            query, keys, values, places, first, length, self.masks, softmax_scale=SCALE, **options
        )


def layer(**settings) -> RadixAttention:
    return RadixAttention(HEADS, DIM, SCALE, KV_HEADS, **{"layer_id": 0, **settings})


def test_windows_and_sinks_of_a_layer_reach_its_attention():
    one = layer(sliding_window_size=9)
    verify = Round(CpuMHATokenToKVPool(size=SLOTS, layer_num=1, **POOL), one)
    prefix = verify.draw(PREFIX, KV_HEADS, DIM), verify.draw(PREFIX, KV_HEADS, DIM)
    verify.pool.set_kv_buffer(one, verify.slots[:PREFIX], *(part.clone() for part in prefix))
    sinks = verify.draw(HEADS)
    query, keys, values, out = verify.attend(one, *prefix, sinks=sinks)
    torch.testing.assert_close(out, verify.expected(query, keys, values, window=9, sinks=sinks))
    assert not torch.allclose(out, verify.expected(query, keys, values, sinks=sinks))
    assert not torch.allclose(out, verify.expected(query, keys, values, window=9))


def test_without_a_tree_a_drafters_rows_see_their_whole_block_within_the_window():
    """As SGLang's other backends treat an encoder layer: the window reaches both ways."""
    one = layer(sliding_window_size=3, attn_type=AttentionType.ENCODER_ONLY)
    verify = Round(CpuMHATokenToKVPool(size=SLOTS, layer_num=1, **POOL), one)
    verify.masks = verify.batch.spec_info.tree_masks = None
    verify.backend.init_forward_metadata(verify.batch)
    prefix = verify.draw(PREFIX, KV_HEADS, DIM), verify.draw(PREFIX, KV_HEADS, DIM)
    verify.pool.set_kv_buffer(one, verify.slots[:PREFIX], *(part.clone() for part in prefix))
    query, keys, values, out = verify.attend(one, *prefix)
    torch.testing.assert_close(out, verify.expected(query, keys, values, window=3))


def test_each_layer_of_a_hybrid_writes_and_reads_its_own_pool():
    """The pools deal their slots differently, and pages that left the window belong to nobody."""
    full, window = layer(layer_id=0), layer(layer_id=1, sliding_window_size=9)
    pool = SWAKVPool(
        size=SLOTS, size_swa=SLOTS, swa_attention_layer_ids=[1], full_attention_layer_ids=[0],
        token_to_kv_pool_class=CpuMHATokenToKVPool, **POOL,
    )  # fmt: skip
    slot_map = torch.zeros(SLOTS + PAGE + 1, dtype=torch.int64)
    # Pages of position 24 and behind: where the slot table has them, and where the window pool does.
    for page, own in ((1, 6), (4, 8), (3, 2)):
        slot_map[page * PAGE : (page + 1) * PAGE] = torch.arange(own * PAGE, (own + 1) * PAGE)
    pool.register_mapping(slot_map)
    verify = Round(pool, full, window)
    for one, options in ((full, {}), (window, {"window": 9})):
        prefix = verify.draw(PREFIX, KV_HEADS, DIM), verify.draw(PREFIX, KV_HEADS, DIM)
        live = 24 if one is window else 0
        target = pool.swa_kv_pool if one is window else pool.full_kv_pool
        slots = slot_map[verify.slots] if one is window else verify.slots
        target.k_buffer[0].fill_(torch.nan)
        target.v_buffer[0].fill_(torch.nan)
        target.k_buffer[0][slots[live:PREFIX]] = prefix[0][live:]
        target.v_buffer[0][slots[live:PREFIX]] = prefix[1][live:]
        query, keys, values, out = verify.attend(one, *prefix)
        torch.testing.assert_close(out, verify.expected(query, keys, values, **options))
        assert torch.equal(target.k_buffer[0][slots[PREFIX : PREFIX + ROWS]], keys[PREFIX:])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_float8_pool_is_written_and_read_with_the_layers_scales(dtype):
    one = layer()
    one.k_scale, one.v_scale = torch.tensor(0.25), torch.tensor(2.0)
    one.k_scale_float, one.v_scale_float = 0.25, 2.0
    verify = Round(CpuMHATokenToKVPool(size=SLOTS, layer_num=1, **{**POOL, "dtype": dtype}), one)
    prefix = verify.draw(PREFIX, KV_HEADS, DIM), verify.draw(PREFIX, KV_HEADS, DIM)
    verify.pool.set_kv_buffer(
        one, verify.slots[:PREFIX], *(part.clone() for part in prefix), one.k_scale, one.v_scale
    )
    query, keys, values, out = verify.attend(one, *prefix)
    stored_keys = (keys / 0.25).to(dtype).float() * 0.25
    stored_values = (values / 2.0).to(dtype).float() * 2.0
    torch.testing.assert_close(out, verify.expected(query, stored_keys, stored_values))
    assert not torch.allclose(out, verify.expected(query, keys, values), rtol=1e-3)


@pytest.mark.parametrize("apart", [False, True], ids=["one key", "latent and rotary part apart"])
def test_a_float8_pool_of_latents_is_written_and_read(apart):
    """MLA: the value is the front of the key, and query and key may come in two parts."""
    latent, rotary = 32, 16
    one = RadixAttention(HEADS, latent + rotary, SCALE, 1, layer_id=0, v_head_dim=latent)
    pool = MLATokenToKVPool(
        size=SLOTS, page_size=PAGE, dtype=torch.float8_e4m3fn, kv_lora_rank=latent, qk_rope_head_dim=rotary,
        layer_num=1, device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    verify = Round(pool, one)
    keys = verify.draw(PREFIX + ROWS, 1, latent + rotary)
    pool.set_kv_buffer(one, verify.slots[:PREFIX], keys[:PREFIX], None)
    query, block = verify.draw(ROWS, HEADS, latent + rotary), keys[PREFIX:]
    if apart:
        out = verify.backend.forward(
            query[..., :latent].flatten(1), block[..., :latent], block[..., :latent], one, verify.batch,
            q_rope=query[..., latent:], k_rope=block[..., latent:],
        )  # fmt: skip
    else:
        out = verify.backend.forward(query.flatten(1), block, block[..., :latent], one, verify.batch)
    stored = keys.to(torch.float8_e4m3fn).float()
    expected = verify.expected(query, stored, stored[..., :latent])
    torch.testing.assert_close(out.view(ROWS, HEADS, latent), expected)


def test_each_width_has_masks_of_its_own_for_its_graphs():
    """What graphs of one width have captured by address must outlive the capture of another width."""
    verified = Round(CpuMHATokenToKVPool(size=SLOTS, layer_num=1, **POOL), layer())
    verified.backend.init_cuda_graph_state(max_bs=2, max_num_tokens=2 * ROWS)
    buffers = verified.backend._mask_buffers
    wide = buffers[ROWS]
    verified.backend.init_cuda_graph_state(max_bs=2, max_num_tokens=2 * 3)
    assert buffers[ROWS] is wide
    narrow_before = buffers[3].clone()
    verified.backend.init_forward_metadata_out_graph(verified.batch)
    assert torch.equal(wide[0], verified.masks[0])
    assert torch.equal(buffers[3], narrow_before)
    assert verified.backend._tree_masks.data_ptr() == wide.data_ptr()

    verified.masks = ancestor_masks(PARENTS[:, :3], max_depth=3)
    verified.batch.input_ids, verified.batch.spec_info = torch.zeros(3), verified.tree_input()
    verified.backend.init_forward_metadata_out_graph(verified.batch)
    assert torch.equal(buffers[3][0], verified.masks[0])
    assert verified.backend._tree_masks.data_ptr() == buffers[3].data_ptr()
