"""Public ops of this stage; kernels are dispatched here once they exist."""

from mini_deepinfer.ops.reference.moe import *  # noqa: F403
