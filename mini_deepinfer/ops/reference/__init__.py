"""Plain-PyTorch definitions of every op: what the kernels are compared with."""

from mini_deepinfer.ops.reference import attention, elementwise, indexer, linear, moe, number_formats

__all__ = ["attention", "elementwise", "indexer", "linear", "moe", "number_formats"]
