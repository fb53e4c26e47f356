"""Which of SGLang's graph runners verify a width; capture itself needs a GPU (test_gpu_chosen_widths.py)."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

from sglang_ddtree_patch.round import verify_graphs
from sglang_ddtree_patch.round.verify_graphs import VerifyGraphs


class Settings:
    """Stands for SGLang's settings of the running server."""

    speculative_num_draft_tokens = 12

    @contextlib.contextmanager
    def override(self, speculative_num_draft_tokens):
        self.speculative_num_draft_tokens = speculative_num_draft_tokens
        yield
        del self.speculative_num_draft_tokens


SETTINGS = Settings()


class Runner:
    """Stands for SGLang's DecodeCudaGraphRunner, which captures as it is built."""

    def __init__(self, target, speculative_num_draft_tokens):
        self.width = speculative_num_draft_tokens
        self.width_of_the_server = SETTINGS.speculative_num_draft_tokens


def test_every_width_is_captured_as_if_it_were_the_servers_and_has_its_own_graphs(monkeypatch):
    monkeypatch.setattr(verify_graphs, "get_spec", lambda: SETTINGS)
    target = SimpleNamespace(decode_cuda_graph_runner=Runner(None, 12))
    largest = target.decode_cuda_graph_runner
    graphs = VerifyGraphs(target, (1, 2, 4, 8, 12))
    for width in (4, 12, 1, 8, 2):
        graphs.use(width)
        used = target.decode_cuda_graph_runner
        assert (used.width, used.width_of_the_server) == (width, width)
    graphs.use(12)
    assert target.decode_cuda_graph_runner is largest


def test_where_nothing_is_captured_every_width_runs_without_graphs():
    target = SimpleNamespace(decode_cuda_graph_runner=None)
    graphs = VerifyGraphs(target, (1, 2, 4))
    for width in (1, 4):
        graphs.use(width)
        assert target.decode_cuda_graph_runner is None


def test_graphs_that_sglang_captures_anew_are_the_only_ones_that_run(monkeypatch, caplog):
    """With new weights it may be asked to. Its attention backend then has other buffers for that width."""
    monkeypatch.setattr(verify_graphs, "get_spec", lambda: SETTINGS)
    target = SimpleNamespace(decode_cuda_graph_runner=Runner(None, 12))
    graphs = VerifyGraphs(target, (4, 12))
    graphs.use(4)
    target.decode_cuda_graph_runner = anew = Runner(target, 12)
    for width, runs in ((4, None), (12, anew), (4, None), (12, anew)):
        graphs.use(width)
        assert target.decode_cuda_graph_runner is runs
    assert caplog.text.count("captured its CUDA graphs anew") == 1
