"""Plain-PyTorch definitions of every op: what the kernels are compared with."""
