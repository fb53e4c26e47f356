"""A toy engine with SGLang's names and a DDTREE port of its own, for the tests of `ddtree patch`.

It runs on a CPU in seconds: a two-layer model with random weights, a paged KV pool, a page table, two
attention backends (one takes masks, one does not) and SGLang's first speculative schema. The port is the
kind that `ddtree patch` has to deal with: pages of one slot, the Triton backend, slots exchanged on commit.
"""
