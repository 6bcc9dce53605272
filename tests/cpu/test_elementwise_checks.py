"""Wrong input of the elementwise ops never reaches the compiled library, and right input reaches it once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mini_deepinfer.ops import elementwise

MODULES = (elementwise.rows, elementwise.streams)  # where the ops look up select and call
T, N, STREAMS = 3, 64, 4
MIXES = 2 * STREAMS + STREAMS * STREAMS


def bf16(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bfloat16)


def f32(*shape: int) -> Tensor:
    return torch.ones(shape)


def u8(*shape: int) -> Tensor:
    return torch.full(shape, 127, dtype=torch.uint8)


def fp8(*shape: int) -> Tensor:
    return bf16(*shape).to(torch.float8_e4m3fn)


def valid(op: str) -> dict[str, Any]:
    """Right arguments of every op, by name."""
    streams, x, weight, pre = bf16(T, STREAMS, N), bf16(T, N), bf16(N), f32(T, STREAMS)
    norm = {"weight": weight, "eps": 1e-20}
    gate_weight = bf16(STREAMS, N)
    return {
        "rmsnorm": {"x": x, **norm},
        "act_quant": {"x": x},
        "act_quant_folded": {"x": x},
        "rmsnorm_quant": {"x": x, **norm, "folded": False},
        "fold_scales": {"codes": fp8(T, N), "scale": u8(T, N // 32)},
        "rope": {"x": bf16(T, 2, N), "positions": torch.zeros(T, dtype=torch.int32), "table": f32(8, 16, 2)},
        "rope_quant": {
            "x": bf16(T, 2, N), "positions": torch.zeros(T, dtype=torch.int32), "table": f32(8, 16, 2), "groups": 2,
            "folded": True,
        },
        "hc_mix": {
            "streams": streams, "fn": f32(MIXES, STREAMS * N), "base": f32(MIXES), "scale": f32(3),
            "sinkhorn_iters": 20, "hc_eps": 1e-6, "norm_eps": 1e-20,
        },
        "hc_collapse": {"streams": streams, "pre": pre},
        "hc_collapse_norm": {"streams": streams, "pre": pre, **norm},
        "hc_collapse_norm_quant": {"streams": streams, "pre": pre, **norm, "folded": True},
        "hc_expand": {"y": x, "streams": streams, "post": pre, "comb": f32(T, STREAMS, STREAMS)},
        "hc_expand_mix": {
            "y": x, "streams": streams, "last_pre": pre, "last_post": pre, "last_comb": f32(T, STREAMS, STREAMS),
            "fn": f32(MIXES, STREAMS * N), "base": f32(MIXES), "scale": f32(3),
            "sinkhorn_iters": 20, "hc_eps": 1e-6, "norm_eps": 1e-20,
        },
        "hc_expand_mix_norm_quant": {
            "y": x, "streams": streams, "last_pre": pre, "last_post": pre, "last_comb": f32(T, STREAMS, STREAMS),
            "fn": f32(MIXES, STREAMS * N), "base": f32(MIXES), "scale": f32(3),
            "sinkhorn_iters": 20, "hc_eps": 1e-6, "norm_eps": 1e-20, "norm_weight": weight, "folded": True,
        },
        "engram_gate": {
            "streams": streams, "z": bf16(T, (STREAMS + 1) * N), "q_weight": gate_weight, "k_weight": gate_weight,
            "eps": 1e-20,
        },
    }[op]  # fmt: skip


OPS = (
    "rmsnorm", "act_quant", "act_quant_folded", "rmsnorm_quant", "fold_scales", "rope", "rope_quant", "hc_mix",
    "hc_collapse", "hc_collapse_norm", "hc_collapse_norm_quant", "hc_expand", "hc_expand_mix",
    "hc_expand_mix_norm_quant", "engram_gate",
)  # fmt: skip

# op, the argument that is wrong, the error, and what the message must name
WRONG: list[tuple[str, str, Callable[[], Any], type[Exception], str]] = [
    ("rmsnorm", "x", lambda: bf16(T, 2, N), ValueError, r"x must be .*\[T, N\], got .*\[3, 2, 64\]"),
    ("rmsnorm", "x", lambda: bf16(T, N).half(), TypeError, r"x must be bfloat16 or float32 \[T, N\], got float16"),
    ("rmsnorm", "weight", lambda: bf16(N + 1), ValueError, r"weight must be .*\[N=64\], got .*\[65\]"),
    ("rmsnorm", "eps", lambda: -1.0, ValueError, "eps must be >= 0, got -1.0"),
    ("rmsnorm", "eps", lambda: float("nan"), ValueError, "eps must be >= 0, got nan"),
    ("act_quant", "x", lambda: bf16(T, 48), ValueError, "multiple of 32 columns .* got 48"),
    ("act_quant", "x", lambda: bf16(T, 0), ValueError, "positive multiple of 32"),
    ("act_quant_folded", "x", lambda: bf16(T, 33), ValueError, "multiple of 32 columns .* got 33"),
    ("act_quant_folded", "x", lambda: torch.ones(T, N, dtype=torch.int32), TypeError, "got int32"),
    ("rmsnorm_quant", "x", lambda: bf16(T, 40), ValueError, "multiple of 32"),
    ("rmsnorm_quant", "weight", lambda: u8(N), TypeError, "weight must be bfloat16 or float32"),
    ("fold_scales", "codes", lambda: u8(T, N), TypeError, "codes must be float8_e4m3fn"),
    ("fold_scales", "scale", lambda: u8(T, 3), ValueError, r"scale must be .*\[T=3, K/32=2\], got .*\[3, 3\]"),
    ("fold_scales", "scale", lambda: f32(T, 2), TypeError, "scale must be uint8"),
    ("rope", "x", lambda: bf16(T, N), ValueError, r"x must be .*\[T, h, d\]"),
    ("rope", "x", lambda: bf16(T, 2, 30), ValueError, r"at least R=32 \(table\), got 30"),
    ("rope", "x", lambda: bf16(T, 2, 63), ValueError, "even head dim"),
    ("rope", "positions", lambda: torch.zeros(T, dtype=torch.int64), TypeError, "positions must be int32"),
    ("rope", "positions", lambda: torch.zeros(T + 1, dtype=torch.int32), ValueError, r"positions must be .*\[T=3\]"),
    ("rope", "table", lambda: f32(8, 16, 3), ValueError, r"table must be .*\[P, R/2, 2\], got .*\[8, 16, 3\]"),
    ("rope", "table", lambda: bf16(8, 16, 2), TypeError, "table must be float32"),
    ("rope", "out", lambda: bf16(T, 2, N + 2), ValueError, "out must be"),
    ("rope", "out", lambda: f32(T, 2, N), TypeError, "out must be bfloat16"),
    ("rope_quant", "x", lambda: bf16(T, 2, 30), ValueError, r"at least R=32 \(table\), got 30"),
    ("rope_quant", "x", lambda: bf16(T, 2, 40), ValueError, "a group of heads of x must have a positive multiple of 32"),
    ("rope_quant", "positions", lambda: torch.zeros(T + 1, dtype=torch.int32), ValueError, r"positions must be .*\[T=3\]"),
    ("rope_quant", "table", lambda: bf16(8, 16, 2), TypeError, "table must be float32"),
    ("rope_quant", "groups", lambda: 3, ValueError, "groups must divide the h=2 heads of x, got 3"),
    ("rope_quant", "groups", lambda: 0, ValueError, "groups must divide the h=2 heads of x, got 0"),
    ("hc_mix", "streams", lambda: bf16(T, 5, N), ValueError, "n = 1..4 streams, got n=5"),
    ("hc_mix", "streams", lambda: bf16(T, 0, N), ValueError, "n = 1..4 streams, got n=0"),
    ("hc_mix", "fn", lambda: f32(MIXES, N), ValueError, r"fn must be .*\[2n\+n\*n=24, n\*N=256\], got .*\[24, 64\]"),
    ("hc_mix", "fn", lambda: bf16(MIXES, STREAMS * N), TypeError, "fn must be float32"),
    ("hc_mix", "base", lambda: f32(8), ValueError, r"base must be .*\[2n\+n\*n=24\]"),
    ("hc_mix", "scale", lambda: f32(24), ValueError, "scale must be"),
    ("hc_mix", "sinkhorn_iters", lambda: 0, ValueError, "sinkhorn_iters must be >= 1, got 0"),
    ("hc_mix", "hc_eps", lambda: -1e-6, ValueError, "hc_eps must be >= 0"),
    ("hc_mix", "norm_eps", lambda: -1e-6, ValueError, "norm_eps must be >= 0"),
    ("hc_collapse", "streams", lambda: bf16(T, N), ValueError, r"streams must be .*\[T, n, N\]"),
    ("hc_collapse", "pre", lambda: f32(T, 3), ValueError, r"pre must be .*\[T=3, n=4\], got .*\[3, 3\]"),
    ("hc_collapse", "pre", lambda: bf16(T, STREAMS), TypeError, "pre must be float32"),
    ("hc_collapse_norm", "pre", lambda: f32(T + 1, STREAMS), ValueError, "pre must be"),
    ("hc_collapse_norm", "weight", lambda: bf16(2 * N), ValueError, "weight must be"),
    ("hc_collapse_norm_quant", "streams", lambda: bf16(T, STREAMS, 40), ValueError, "multiple of 32"),
    ("hc_expand", "y", lambda: f32(T, N), TypeError, "y must be bfloat16"),
    ("hc_expand", "y", lambda: bf16(T, 2 * N), ValueError, "y must be"),
    ("hc_expand", "post", lambda: f32(T, STREAMS, 1), ValueError, "post must be"),
    ("hc_expand", "comb", lambda: f32(T, STREAMS, 3), ValueError, "comb must be"),
    ("hc_expand", "out", lambda: bf16(T, STREAMS, 2 * N), ValueError, "out must be"),
    ("hc_expand_mix", "y", lambda: bf16(T, N + 32), ValueError, "y must be"),
    ("hc_expand_mix", "last_pre", lambda: f32(T, 3), ValueError, "last_pre must be"),
    ("hc_expand_mix", "last_post", lambda: bf16(T, STREAMS), TypeError, "last_post must be float32"),
    ("hc_expand_mix", "last_comb", lambda: f32(T, STREAMS), ValueError, "last_comb must be"),
    ("hc_expand_mix", "fn", lambda: f32(3, 4), ValueError, "fn must be"),
    ("hc_expand_mix", "sinkhorn_iters", lambda: 0, ValueError, "sinkhorn_iters must be >= 1"),
    ("hc_expand_mix", "out", lambda: bf16(T, N), ValueError, "out must be"),
    ("hc_expand_mix_norm_quant", "norm_weight", lambda: bf16(N + 32), ValueError, "norm_weight must be"),
    ("hc_expand_mix_norm_quant", "y", lambda: f32(T, N), TypeError, "y must be bfloat16"),
    ("engram_gate", "z", lambda: bf16(T, STREAMS * N), ValueError, r"z must be .*\[T=3, \(n\+1\)\*N=320\], got .*\[3, 256\]"),
    ("engram_gate", "q_weight", lambda: bf16(N), ValueError, r"q_weight must be .*\[n=4, N=64\]"),
    ("engram_gate", "k_weight", lambda: u8(STREAMS, N), TypeError, "k_weight must be"),
    ("engram_gate", "eps", lambda: -1.0, ValueError, "eps must be >= 0"),
    ("engram_gate", "out", lambda: bf16(T, N), ValueError, "out must be"),
]


def choose(monkeypatch: pytest.MonkeyPatch, impl: str) -> None:
    for module in MODULES:
        monkeypatch.setattr(module, "select", lambda *args, **kwargs: impl)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...]]]:
    """The compiled library is replaced by a list of the calls that reach it."""
    seen: list[tuple[str, tuple[Any, ...]]] = []
    choose(monkeypatch, "portable")
    for module in MODULES:
        monkeypatch.setattr(module, "call", lambda op, impl, *args: seen.append((op, args)))
    return seen


@pytest.mark.parametrize("op, name, value, error, message", WRONG, ids=[f"{w[0]}-{w[1]}-{i}" for i, w in enumerate(WRONG)])
def test_wrong_input(calls: list, op: str, name: str, value: Callable, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^elementwise.{op}: .*{message}"):
        getattr(elementwise, op)(**{**valid(op), name: value()})
    assert calls == []


@pytest.mark.parametrize("op", OPS)
def test_right_input_is_launched_once(calls: list, op: str) -> None:
    outputs = getattr(elementwise, op)(**valid(op))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    ((name, args),) = calls
    assert name == f"elementwise.{op}"
    assert [id(o) for o in outputs] == [id(a) for a in args[-len(outputs) :]], "outputs are the last arguments, in order"


@pytest.mark.parametrize("op", OPS)
def test_no_tokens_no_launch(calls: list, op: str) -> None:
    per_token = [name for name, v in valid(op).items() if isinstance(v, Tensor) and v.shape[0] == T and name != "scale"]
    empty = {name: valid(op)[name][:0] for name in per_token}
    if op == "fold_scales":
        empty["scale"] = u8(0, N // 32)
    outputs = getattr(elementwise, op)(**{**valid(op), **empty})
    assert calls == []
    for out in outputs if isinstance(outputs, tuple) else (outputs,):
        assert out.shape[0] == 0


@pytest.mark.parametrize("op", OPS)
def test_reference_on_the_cpu(op: str) -> None:
    """On CPU tensors every op runs its definition, in bfloat16 and in float32, and the launched shapes are its shapes."""
    for dtype in (torch.bfloat16, torch.float32):
        args = {name: v.to(dtype) if isinstance(v, Tensor) and v.dtype == torch.bfloat16 else v for name, v in valid(op).items()}
        outputs = getattr(elementwise, op)(**args)
        for out in outputs if isinstance(outputs, tuple) else (outputs,):
            assert out.shape[0] == T and out.float().isfinite().all()


def test_shapes_of_the_launch_are_those_of_the_reference(calls: list, monkeypatch: pytest.MonkeyPatch) -> None:
    for op in OPS:
        launched = getattr(elementwise, op)(**valid(op))
        choose(monkeypatch, "reference")
        wanted = getattr(elementwise, op)(**valid(op))
        choose(monkeypatch, "portable")
        if isinstance(wanted, Tensor):
            launched, wanted = (launched,), (wanted,)
        assert [(o.shape, o.dtype) for o in launched] == [(o.shape, o.dtype) for o in wanted], op


def test_in_place_arguments_are_passed_on(calls: list) -> None:
    for op, name in (("rope", "x"), ("hc_expand", "streams"), ("engram_gate", "streams")):
        args = valid(op)
        assert getattr(elementwise, op)(**args, out=args[name]) is args[name]
        assert calls[-1][1][-1] is args[name]
    args = valid("hc_expand_mix")
    assert elementwise.hc_expand_mix(**args, out=args["streams"])[0] is args["streams"]
    assert calls[-1][1][-5] is args["streams"]


def test_rope_quant_is_rope_and_act_quant() -> None:
    g = torch.Generator().manual_seed(1)
    x, positions = torch.randn(5, 6, N, generator=g).bfloat16(), torch.arange(5, dtype=torch.int32)
    table = torch.randn(8, 16, 2, generator=g)
    rotated = elementwise.rope(x, positions, table, inverse=True)
    for folded, quant in ((False, elementwise.act_quant), (True, elementwise.act_quant_folded)):
        codes, scale = elementwise.rope_quant(x, positions, table, 3, inverse=True, folded=folded)
        assert codes.shape == (5, 3, 2 * N)
        for group in range(3):
            wanted = quant(rotated[:, 2 * group : 2 * group + 2].flatten(1))
            assert torch.equal(codes[:, group].view(torch.uint8), wanted[0].view(torch.uint8))
            assert torch.equal(scale[:, group], wanted[1])


def test_fused_references_are_the_compositions() -> None:
    g = torch.Generator().manual_seed(0)
    streams, weight = torch.randn(5, 4, N, generator=g).bfloat16(), torch.randn(N, generator=g).bfloat16()
    pre = torch.rand(5, 4, generator=g)
    x = elementwise.hc_collapse(streams, pre)
    y = elementwise.rmsnorm(x, weight, 1e-20)
    assert torch.equal(elementwise.hc_collapse_norm(streams, pre, weight, 1e-20), y)
    for folded, quant in ((False, elementwise.act_quant), (True, elementwise.act_quant_folded)):
        codes, scale = quant(y)
        for got in (
            elementwise.rmsnorm_quant(x, weight, 1e-20, folded=folded),
            elementwise.hc_collapse_norm_quant(streams, pre, weight, 1e-20, folded=folded),
        ):
            assert torch.equal(got[0], y) and torch.equal(got[2], scale)
            assert torch.equal(got[1].view(torch.uint8), codes.view(torch.uint8))
