"""What a patched port calls: masks read from SGLang's, graphs, and refusals where a port is not as expected.

tests/unit/test_in_tree_patch.py runs a whole patched port; here are the cases that one does not meet.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_ddtree_patch.errors import ConfigurationError
from sglang_ddtree_patch.in_tree.backend import InTreeVerifyBackend, block_masks, in_front_of, pack_masks
from sglang_ddtree_patch.in_tree.commit import committing, move_rows
from sglang_ddtree_patch.kernels.attention.reference import tree_attention_reference
from sglang_ddtree_patch.kernels.tree.build import ancestor_masks, chain_masks, unpack_masks

VERIFY = SimpleNamespace(is_target_verify=lambda: True, is_idle=lambda: False)
PREFILL = SimpleNamespace(is_target_verify=lambda: False)
HEADS, KEY_DIM, SLOTS = 2, 16, 64


def random_trees(batch: int, width: int) -> torch.Tensor:
    """[batch, width, width] bool: row i sees its ancestors and itself."""
    generator = torch.Generator().manual_seed(width)
    parents = torch.stack(
        [
            torch.tensor(
                [-1, *(int(torch.randint(0, row, (), generator=generator)) for row in range(1, width))]
            )
            for _ in range(batch)
        ]
    )
    return unpack_masks(ancestor_masks(parents, max_depth=width))


def flat_mask(visible: torch.Tensor, prefix_lens: list[int]) -> torch.Tensor:
    """As SGLang lays it out: request after request, [width, prefix + width]."""
    rows = [
        torch.cat([torch.ones(tree.shape[0], prefix, dtype=torch.bool), tree], dim=1).flatten()
        for tree, prefix in zip(visible, prefix_lens, strict=True)
    ]
    return torch.cat(rows)


@pytest.mark.parametrize("width", [1, 5, 63, 64, 65, 130])
def test_a_mask_over_all_keys_becomes_the_trees_bits(width):
    visible, prefix_lens = random_trees(3, width), [0, 7, 64]
    masks = block_masks(flat_mask(visible, prefix_lens), torch.tensor(prefix_lens), width)
    assert torch.equal(unpack_masks(masks), visible)
    assert torch.equal(pack_masks(visible), masks)


# The backend.


class Wrapped:
    """Notes what it is asked."""

    extra = "the wrapped backend's"

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def note(*args, **kwargs):
            self.calls.append(name)
            return name

        return note


def runner(**changes) -> SimpleNamespace:
    pool = SimpleNamespace(
        k=torch.randn(SLOTS, 1, KEY_DIM),
        get_key_buffer=lambda layer: pool.k,
        get_value_buffer=lambda layer: pool.k[..., :8],
        set_kv_buffer=lambda layer, loc, k, v: pool.k.__setitem__(loc, k),
    )
    table = torch.arange(SLOTS, dtype=torch.int32).view(2, SLOTS // 2)
    return SimpleNamespace(
        **{
            "server_args": SimpleNamespace(speculative_algorithm="DDTREE", page_size=16),
            "is_draft_worker": False,
            "device": "cpu",
            "token_to_kv_pool": pool,
            "req_to_token_pool": SimpleNamespace(req_to_token=table),
            **changes,
        }
    )


LAYER = SimpleNamespace(
    layer_id=0, scaling=0.25, logit_cap=0.0, tp_q_head_num=HEADS, qk_head_dim=KEY_DIM, v_head_dim=8,
    sliding_window_size=-1,
)  # fmt: skip


def verify_batch(width: int, prefix_lens: list[int], visible: torch.Tensor) -> SimpleNamespace:
    lens = torch.tensor(prefix_lens)
    starts = torch.tensor([0, SLOTS // 2])[: len(lens)] + lens
    return SimpleNamespace(
        forward_mode=VERIFY,
        seq_lens=lens,
        req_pool_indices=torch.arange(len(lens)),
        out_cache_loc=(starts[:, None] + torch.arange(width)).flatten(),
        spec_info=SimpleNamespace(
            custom_mask=flat_mask(visible, prefix_lens),
            draft_token_num=width,
            draft_token=torch.zeros(len(lens) * width),
        ),
    )


def test_a_draft_worker_and_another_algorithm_keep_their_backend():
    wrapped = Wrapped()
    assert in_front_of(runner(is_draft_worker=True), wrapped) is wrapped
    for algorithm in ("DFLASH", None):
        args = SimpleNamespace(speculative_algorithm=algorithm, page_size=1)
        assert in_front_of(runner(server_args=args), wrapped) is wrapped
    assert isinstance(in_front_of(runner(), wrapped), InTreeVerifyBackend)


def test_everything_but_a_masked_verify_is_the_wrapped_backends():
    wrapped = Wrapped()
    backend = in_front_of(runner(), wrapped)
    assert backend.extra == "the wrapped backend's"
    chain = verify_batch(3, [4], random_trees(1, 3))
    chain.spec_info.custom_mask = None
    for batch in (SimpleNamespace(forward_mode=PREFILL, spec_info=None), chain):
        backend.init_forward_metadata(batch)
        assert backend.forward(None, None, None, LAYER, batch) == "forward"
    backend.init_forward_metadata_capture_cuda_graph(1, 1, None, None, None, PREFILL, None)
    backend.init_forward_metadata_replay_cuda_graph(1, None, None, 1, None, PREFILL, None, None)
    assert wrapped.calls == [
        "init_forward_metadata", "forward", "init_forward_metadata", "forward",
        "init_forward_metadata_capture_cuda_graph", "init_forward_metadata_replay_cuda_graph",
    ]  # fmt: skip


@pytest.mark.parametrize("apart", [False, True], ids=["whole keys", "rotary parts apart"])
def test_a_masked_verify_writes_the_block_and_attends_along_the_tree(apart):
    engine, width, prefix_lens = runner(), 6, [5, 17]
    visible = random_trees(2, width)
    batch = verify_batch(width, prefix_lens, visible)
    backend = in_front_of(engine, Wrapped())
    backend.init_forward_metadata(batch)
    query, keys = torch.randn(2 * width, HEADS, KEY_DIM), torch.randn(2 * width, 1, KEY_DIM)
    if apart:
        pool = engine.token_to_kv_pool
        pool.set_mla_kv_buffer = lambda layer, loc, k, r: pool.k.__setitem__(loc, torch.cat([k, r], -1))
        found = backend.forward(
            query[..., :8].flatten(1), keys[..., :8], None, LAYER, batch,
            q_rope=query[..., 8:], k_rope=keys[..., 8:],
        )  # fmt: skip
    else:
        found = backend.forward(query.flatten(1), keys, None, LAYER, batch)
    cache = engine.token_to_kv_pool.k
    assert torch.equal(cache[batch.out_cache_loc], keys)
    expected = tree_attention_reference(
        query, cache, cache[..., :8], engine.req_to_token_pool.req_to_token, batch.req_pool_indices,
        batch.seq_lens, pack_masks(visible), softmax_scale=0.25,
    )  # fmt: skip
    assert torch.equal(found, expected.flatten(1))


def test_a_replayed_graph_reads_the_live_masks_where_capture_found_them():
    backend, width = in_front_of(runner(), Wrapped()), 4
    backend.init_cuda_graph_state(2, 2 * width)
    backend.init_forward_metadata_capture_cuda_graph(2, 8, None, None, None, VERIFY, None)
    captured = backend._masks
    assert torch.equal(captured, chain_masks(2, width, torch.device("cpu")))
    visible = random_trees(1, width)
    batch = verify_batch(width, [9], visible)
    padded = torch.tensor([9, 1])
    backend.init_forward_metadata_replay_cuda_graph(2, None, padded, 10, None, VERIFY, batch.spec_info, None)
    assert torch.equal(captured[:1], pack_masks(visible))
    assert torch.equal(captured[1:], chain_masks(1, width, torch.device("cpu")))
    batch.spec_info.custom_mask = None
    backend.init_forward_metadata_replay_cuda_graph(2, None, padded, 10, None, VERIFY, batch.spec_info, None)
    assert torch.equal(captured, chain_masks(2, width, torch.device("cpu")))


@pytest.mark.parametrize(
    ("changes", "extras", "words"),
    [({"sliding_window_size": 128}, {}, "a sliding window"), ({}, {"sinks": torch.ones(1)}, "sinks")],
    ids=["window", "sinks"],
)
def test_a_layer_that_a_tree_cannot_be_verified_in_is_refused(changes, extras, words):
    backend, batch = in_front_of(runner(), Wrapped()), verify_batch(3, [4], random_trees(1, 3))
    backend.init_forward_metadata(batch)
    layer = SimpleNamespace(**{**vars(LAYER), **changes})
    with pytest.raises(ConfigurationError, match=rf"attends with {words}.*DFLASH"):
        backend.forward(torch.zeros(3, 32), None, None, layer, batch, **extras)


# The commit.


class Allocator:
    """Remembers what was freed."""

    def __init__(self, pool):
        self.pool, self.freed = pool, []

    def get_kvcache(self):
        return self.pool

    def free(self, slots):
        self.freed += slots.tolist()


def MLATokenToKVPool(buffer: torch.Tensor):
    """An object of that class's name."""
    return type("MLATokenToKVPool", (), {"kv_buffer": [buffer]})()


def one_request(prefix: int, width: int, first_slot: int) -> SimpleNamespace:
    """A batch of one request whose block lies behind `prefix`; slot s holds the value s."""
    table = torch.zeros(1, 128, dtype=torch.int32)
    block = first_slot + torch.arange(width)
    table[0, prefix : prefix + width] = block
    return SimpleNamespace(
        forward_mode=VERIFY,
        seq_lens=torch.tensor([prefix]),
        req_pool_indices=torch.tensor([0]),
        out_cache_loc=block,
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        token_to_kv_pool_allocator=Allocator(MLATokenToKVPool(torch.arange(256.0)[:, None, None].clone())),
    )


class PortVerify:
    """A port's step: accepts the rows of `path`, for pages of one slot."""

    def __init__(self, batch, path):
        self.batch, self.path, self.page_sizes = batch, path, []

    def verify(self, page_size):
        batch, block = self.batch, self.batch.out_cache_loc
        self.page_sizes.append(page_size)
        kept = block[self.path]
        batch.token_to_kv_pool_allocator.free(block[~torch.isin(block, kept)])
        start = int(batch.seq_lens)
        batch.req_to_token_pool.req_to_token[0, start : start + len(kept)] = kept.int()
        batch.out_cache_loc = kept
        batch.seq_lens.add_(len(kept))
        return "bonus"


def test_accepted_rows_move_to_the_front_and_whole_pages_behind_are_freed():
    batch = one_request(prefix=14, width=40, first_slot=30)  # pages of 16: 30, 31 | 32..47 | 48..63 | 64..69
    port = PortVerify(batch, [0, 3, 7, 8])
    assert committing(port, batch, 16)(page_size=1) == "bonus"
    allocator = batch.token_to_kv_pool_allocator
    moved = allocator.pool.kv_buffer[0].flatten()
    assert moved[30:34].tolist() == [30, 33, 37, 38]
    assert moved[34:70].tolist() == list(range(34, 70))
    assert batch.req_to_token_pool.req_to_token[0, 14:18].tolist() == [30, 31, 32, 33]
    assert batch.out_cache_loc.tolist() == [30, 31, 32, 33]
    assert allocator.freed == list(range(48, 70))
    assert "free" not in vars(allocator)


def test_slots_that_are_not_of_the_block_are_freed_as_asked():
    batch = one_request(prefix=16, width=4, first_slot=32)
    port = PortVerify(batch, [0])
    verify = port.verify

    def verify_and_free_another(page_size):
        batch.token_to_kv_pool_allocator.free(torch.tensor([100]))
        return verify(page_size)

    port.verify = verify_and_free_another
    committing(port, batch, 16)(page_size=1)
    assert batch.token_to_kv_pool_allocator.freed == [100]


def test_pages_of_one_slot_and_idle_batches_are_the_ports_own():
    batch = one_request(prefix=16, width=4, first_slot=32)
    port = PortVerify(batch, [0])
    assert committing(port, batch, 1) == port.verify
    batch.forward_mode = SimpleNamespace(is_idle=lambda: True)
    assert committing(port, batch, 16) == port.verify


def test_a_block_out_of_page_order_is_refused_before_anything_is_done():
    batch = one_request(prefix=16, width=4, first_slot=33)
    port = PortVerify(batch, [0])
    with pytest.raises(ConfigurationError, match="does not allocate the verify block in whole pages"):
        committing(port, batch, 16)(page_size=1)
    assert port.page_sizes == []


@pytest.mark.parametrize("path", [[0, 1, 0], []], ids=["rows backwards", "no new length"])
def test_a_port_that_leaves_something_else_behind_is_refused(path):
    batch = one_request(prefix=16, width=8, first_slot=32)
    with pytest.raises(ConfigurationError, match="cannot be taken over"):
        committing(PortVerify(batch, path), batch, 16)(page_size=1)
    assert "free" not in vars(batch.token_to_kv_pool_allocator)


def test_a_pool_of_another_layout_is_refused_with_what_works():
    with pytest.raises(ConfigurationError, match=r"rows in a SimpleNamespace yet: .* --page-size 1"):
        move_rows(SimpleNamespace(), torch.zeros(1, 1), torch.zeros(1, 1))
