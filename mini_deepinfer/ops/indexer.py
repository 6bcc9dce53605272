"""Public ops of this stage; kernels are dispatched here once they exist."""

from mini_deepinfer.ops.reference.indexer import *  # noqa: F403
