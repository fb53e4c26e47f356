"""The counter of a round's waits, on traces made up for it."""

from round_trace import PAGEABLE, host_waits, rounds


def event(name: str, category: str = "cuda_runtime", phase: str = "X") -> dict:
    return {"name": name, "cat": category, "ph": phase, "ts": 0, "dur": 1}


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


def test_a_round_is_two_graphs():
    launches = [event("cudaGraphLaunch") for _ in range(6)]
    assert rounds({"traceEvents": [*launches, event("cudaLaunchKernel")]}) == 3
