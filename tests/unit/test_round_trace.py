"""The counters of a round's waits and launches, on traces made up for them."""

from round_trace import DDTREE_GRAPHS, DFLASH_GRAPHS, PAGEABLE, host_costs, host_waits, rounds


def event(name: str, category: str = "cuda_runtime", phase: str = "X", ts: float = 0) -> dict:
    return {"name": name, "cat": category, "ph": phase, "ts": ts, "dur": 1}


def test_calls_that_wait_are_counted_and_others_are_not():
    trace = {
        "traceEvents": [
            event("cudaStreamSynchronize"),
            event("cudaEventSynchronize"),
            event("cudaEventSynchronize"),
            event("cuCtxSynchronize", "cuda_driver"),
            event("cudaMemcpy"),
            event("cudaMemcpyAsync"),
            event("cudaEventQuery"),
            event("cudaStreamWaitEvent"),
            event("cudaLaunchKernel"),
            event("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy"),
            event(PAGEABLE, "gpu_memcpy"),
            event("cudaStreamSynchronize", "user_annotation"),
            event("cudaStreamSynchronize", phase="i"),
        ]
    }
    assert host_waits(trace) == {
        "cudaStreamSynchronize": 1,
        "cudaEventSynchronize": 2,
        "cuCtxSynchronize": 1,
        "cudaMemcpy": 1,
        PAGEABLE: 1,
    }


def test_a_round_is_as_many_graphs_as_its_algorithm_has():
    launches = [event("cudaGraphLaunch") for _ in range(6)]
    trace = {"traceEvents": [*launches, event("cudaLaunchKernel")]}
    assert (rounds(trace, DFLASH_GRAPHS), rounds(trace, DDTREE_GRAPHS)) == (3, 2)


def test_what_is_launched_counts_for_the_graph_that_comes_next():
    calls, now = [], 0.0
    for _ in range(4):
        for name, gap in (
            ("cuLaunchKernelEx", 5), ("cudaMemcpyAsync", 7), ("cudaEventRecord", 1), ("cudaGraphLaunch", 2),
            ("cudaLaunchKernel", 3), ("cudaGraphLaunch", 4), ("cudaGraphLaunch", 10),
        ):  # fmt: skip
            now += gap
            calls.append(event(name, ts=now))
    calls.reverse()  # a trace is in no order
    calls.append(event("cudaLaunchKernel", "cpu_op", ts=1.0))
    assert host_costs({"traceEvents": calls}, DDTREE_GRAPHS) == {
        "to draft": {"launches": 3, "microseconds": 15},
        "to verify": {"launches": 2, "microseconds": 7},
        "to commit": {"launches": 1, "microseconds": 10},
        "round": {"launches": 6, "microseconds": 32},
    }
