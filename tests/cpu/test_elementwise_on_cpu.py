"""The elementwise kernels run on the CPU (tests/host/cuda_on_cpu.h) through the GPU tests, at small shapes.

The public ops are called as on a GPU; only the launch goes to the kernel files compiled by g++.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mini_deepinfer.ops import _dispatch, elementwise
from tests.gpu import test_elementwise as gpu
from tests.host.build import library
from tests.inputs import far_apart, generator, normal
from tests.numerics import assert_bitwise

CPU = torch.device("cpu")
SOURCES = [f"csrc/elementwise/{name}.cu" for name in ("rmsnorm_quant", "rope", "hc_mix", "hc_expand", "hc_expand_mix", "engram_gate")]


def _arguments(values: tuple[Any, ...]) -> list[Any]:
    """Tensors become addresses, ints 64-bit (the callee takes what it needs of a register), floats 32-bit."""
    convert: dict[type, Callable[[Any], Any]] = {float: ctypes.c_float, Tensor: lambda t: ctypes.c_void_p(t.data_ptr())}
    return [
        ctypes.c_void_p(0) if v is None else convert.get(type(v), lambda v: ctypes.c_int64(int(v)))(v) for v in values
    ]


def launch(op: str, impl: str, *args: Any) -> None:
    """What _dispatch.call does, with the kernels of this machine's CPU."""
    kernels = library("elementwise", SOURCES)
    name = op.removeprefix("elementwise.")

    def run(function: str, *values: Any) -> None:
        getattr(kernels, f"run_{function}")(*_arguments(values))

    def row(x=None, streams=None, pre=None, weight=None, eps=0.0, out=None, codes=None, scale=None) -> None:
        source = x if streams is None else streams
        folded = scale is not None and scale.dtype == torch.float32
        run(
            "row", source.shape[0], source.shape[-1], x, 0 if x is None else x.stride(0), streams, pre,
            0 if streams is None else streams.shape[1], weight, weight is not None and weight.dtype == torch.float32,
            eps, out, codes, None if folded else scale, scale if folded else None,
        )  # fmt: skip

    if name in ("rmsnorm", "rmsnorm_quant"):
        x, weight, eps, *outputs = args
        row(x, None, None, weight, eps, *outputs)
    elif name in ("act_quant", "act_quant_folded"):
        row(args[0], codes=args[1], scale=args[2])
    elif name == "hc_collapse":
        row(None, args[0], args[1], out=args[2])
    elif name in ("hc_collapse_norm", "hc_collapse_norm_quant"):
        row(None, *args)
    elif name == "fold_scales":
        run(name, *args[0].shape, *args)
    elif name == "rope":
        x, positions, table, inverse, out = args
        run(name, *x.shape, 2 * table.shape[1], x, x.stride(0), out, out.stride(0), positions, table, inverse)
    elif name == "rope_quant":
        x, positions, table, inverse, codes, scale = args
        folded = scale.dtype == torch.float32
        run(
            name, *codes.shape, x.shape[2], 2 * table.shape[1], x, positions, table, inverse, codes,
            None if folded else scale, scale if folded else None,
        )  # fmt: skip
    elif name == "hc_mix":
        run(name, *args[0].shape, *args)
    elif name in ("hc_expand", "hc_expand_mix"):
        y, streams, *rest = args
        run(name, *streams.shape, y, y.stride(0), streams, *rest)
    elif name == "hc_expand_mix_norm_quant":
        y, streams, *rest = args
        *rest, weight, keep_x, workspace, out, x, codes, scale, pre, post, comb = rest
        folded = scale.dtype == torch.float32
        run(
            name, *streams.shape, y, y.stride(0), streams, *rest, weight, weight.dtype == torch.float32, keep_x, workspace,
            out, x, codes, None if folded else scale, scale if folded else None, pre, post, comb,
        )  # fmt: skip
    elif name == "engram_gate":
        streams, z, *rest = args
        run(name, *streams.shape, streams, z, z.stride(0), *rest)
    else:
        raise NotImplementedError(op)


@pytest.fixture(autouse=True)
def kernels_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (elementwise.rows, elementwise.streams):
        monkeypatch.setattr(module, "select", lambda op, tensor, *, impl=None, compute_dtype=None: impl or "portable")
        monkeypatch.setattr(module, "call", launch)
    monkeypatch.setattr(gpu, "call", launch)
    monkeypatch.setattr(gpu, "implementations", lambda op: ("portable",))


QUANT_SHAPES = [(1, 32), (33, 128), (5, 1280), (3, 5120), (2, 16384)]
CASES: list[tuple[Callable, tuple]] = [
    *((gpu.test_act_quant_bitwise, shape) for shape in QUANT_SHAPES),
    *((gpu.test_act_quant_folded_bitwise, shape) for shape in QUANT_SHAPES),
    *((gpu.test_fold_scales_bitwise, shape) for shape in QUANT_SHAPES[:4]),
    (gpu.test_fold_scales_every_code_and_scale, ()),
    (gpu.test_zero_group_rows, ()),
    *((gpu.test_non_finite_stays_in_its_group, (value,)) for value in (float("nan"), float("inf"))),
    (gpu.test_strided_rows, ()),
    *((gpu.test_rmsnorm, (*shape, torch.bfloat16)) for shape in QUANT_SHAPES),
    (gpu.test_rmsnorm, (5, 512, torch.float32)),
    *((gpu.test_rmsnorm_extremes, (scale,)) for scale in (0.0, 1e-38, 1e18)),
    *((gpu.test_rmsnorm_quant_is_the_composition, (*shape, folded)) for shape in QUANT_SHAPES for folded in (False, True)),
    *((gpu.test_rope_bitwise, (*shape, inverse)) for shape in ((33, 3, 128, 64), (7, 2, 10, 6), (2, 1, 2144, 64))
      for inverse in (False, True)),
    (gpu.test_rope_strided_and_non_finite, ()),
    *((gpu.test_rope_quant_is_the_composition, (*shape, inverse, folded)) for inverse in (False, True) for folded in (False, True)
      for shape in ((3, 64, 512, 64, 8), (33, 4, 64, 64, 2), (7, 6, 96, 16, 3), (5, 6, 160, 0, 2))),
    *((gpu.test_hc_mix_against_float64, (n, *shape)) for n in (1, 2, 3, 4) for shape in ((1, 64), (33, 8), (40, 328))),
    (gpu.test_hc_mix_sinkhorn_vector, ()),
    *((gpu.test_hc_mix_iterations, (iters,)) for iters in (1, 2, 20)),
    (gpu.test_hc_mix_nan_stays_in_its_token, ()),
    *((gpu.test_hc_collapse, (n, *shape)) for n in (1, 2, 3, 4) for shape in ((1, 32), (5, 1280), (2, 5120))),
    (gpu.test_hc_collapse_first_layer_is_stream_zero, ()),
    (gpu.test_hc_expand_orientation, ()),
    *((gpu.test_hc_expand, (n, *shape)) for n in (1, 2, 3, 4) for shape in ((1, 8), (3, 5120), (33, 328))),
    (gpu.test_hc_exact_on_integers, ()),
    *((gpu.test_hc_expand_mix_is_the_composition, (n, *shape)) for n in (1, 2, 3, 4) for shape in ((1, 64), (37, 8), (19, 352))),
    *((gpu.test_engram_gate, (n, *shape)) for n in (1, 2, 3, 4) for shape in ((1, 8), (3, 5120), (9, 328))),
    (gpu.test_engram_gate_of_zero_dot, ()),
    *((gpu.test_nothing_is_written_outside, shape) for shape in ((1, 32), (5, 1312))),
    *((gpu.test_twice_alone_and_empty, (op,)) for op in gpu.OPS),
]  # fmt: skip


@pytest.mark.parametrize("test, args", CASES, ids=[f"{test.__name__[5:]}-{'-'.join(map(str, args))}" for test, args in CASES])
def test_kernel_on_the_cpu(test: Callable, args: tuple) -> None:
    test(CPU, *args)


@pytest.mark.slow
def test_hc_mix_of_many_tokens_does_not_depend_on_the_batch() -> None:
    """More than one tile a warp: blocks take several tiles once there are more than 128 of them."""
    tokens = 32 * 128 * 9 + 5
    inputs = gpu.mix_inputs(tokens, 1, 8)
    whole = gpu.run_mix(inputs, CPU, iters=1)
    for start, stop in ((0, 1), (4000, 4100), (tokens - 3, tokens)):
        part = gpu.run_mix({**inputs, "streams": inputs["streams"][start:stop].contiguous()}, CPU, iters=1)
        for out, wanted in zip(part, whole):
            assert torch.equal(out, wanted[start:stop])
    for out, exact in zip(whole, gpu.exact_mix(inputs, iters=1)):
        assert float((out.double() - exact).abs().max()) <= 3e-6


@pytest.mark.parametrize("op", sorted(op for op in _dispatch.SELF_TESTS if op.startswith("elementwise.") and "fp" not in op))
def test_self_tests(op: str) -> None:
    """The kernel is within the bound of its self-test, which notices another kernel's output."""
    test = _dispatch.SELF_TESTS[op]
    got, wanted = test.run(test.make(CPU), "portable"), test.run(test.make(CPU), "reference")
    assert _dispatch.difference(got, wanted) <= test.bound
    first = got[0] if isinstance(got, tuple) else got
    first.view(torch.uint8)[-1].fill_(0x3F)
    assert _dispatch.difference(got, wanted) > test.bound


def test_rows_further_than_2_31_elements_apart() -> None:
    """Three rows, the last one 2^31 elements behind the first: no row stride is multiplied in 32 bits."""
    g = generator(1)
    x, weight, stride = normal(g, 3, 320), normal(g, 320), 2**30
    far = far_apart(x, stride)
    for op, args in ((elementwise.act_quant, ()), (elementwise.act_quant_folded, ()), (elementwise.rmsnorm, (weight, 1e-20))):
        assert_same(op(far, *args), op(x, *args))
    assert_same(elementwise.rmsnorm_quant(far, weight, 1e-20, folded=True), elementwise.rmsnorm_quant(x, weight, 1e-20, folded=True))
    streams, coefficients = normal(g, 3, 4, 64), (torch.rand(3, 4, generator=g), torch.rand(3, 4, 4, generator=g))
    assert_same(elementwise.hc_expand(far[:, :64], streams, *coefficients), elementwise.hc_expand(x[:, :64], streams, *coefficients))
    gates = (normal(g, 4, 64), normal(g, 4, 64), 1e-20)
    assert_same(elementwise.engram_gate(streams, far, *gates), elementwise.engram_gate(streams, x, *gates))
    heads, positions, table = x.view(3, 5, 64), torch.tensor([2, 0, 1], dtype=torch.int32), torch.randn(3, 16, 2, generator=g)
    wanted, far_heads = elementwise.rope(heads, positions, table), far.view(3, 5, 64)
    assert_same(elementwise.rope(far_heads, positions, table), wanted)
    assert_same(elementwise.rope(far_heads, positions, table, out=far_heads), wanted)  # changes `far`


def assert_same(got: Tensor | tuple[Tensor, ...], wanted: Tensor | tuple[Tensor, ...]) -> None:
    for one, other in zip(got, wanted, strict=True) if isinstance(got, tuple) else [(got, wanted)]:
        assert_bitwise(one, other, "rows far apart")
