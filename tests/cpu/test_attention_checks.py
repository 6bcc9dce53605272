"""The attention ops' checks: wrong input is refused with both sides named, before any kernel; right input runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mini_deepinfer.ops import attention, elementwise
from mini_deepinfer.ops.reference import attention as reference

D = 64


def sparse_inputs() -> dict[str, Any]:
    return {
        "q": torch.randn(3, 4, D),
        "window": reference.pack_window(torch.randn(8, D)),
        "window_idx": torch.zeros(3, 5, dtype=torch.int32),
        "compressed": reference.pack_compressed(torch.randn(9, D)),
        "compressed_idx": torch.zeros(3, 6, dtype=torch.int32),
        "compressed_len": torch.zeros(3, dtype=torch.int32),
        "sink": torch.zeros(4),
        "softmax_scale": D**-0.5,
    }


@pytest.fixture(autouse=True)
def no_reference(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Wrong input must not reach an implementation."""
    if "refuse" in request.node.name:

        def reached(*args: Any, **kwargs: Any) -> None:
            raise AssertionError("wrong input reached the implementation")

        for name in ("sparse", "write_window", "write_normed_window", "write_compressed", "compress"):
            monkeypatch.setattr(reference, name, reached)
        monkeypatch.setattr(attention, "call", reached)


WRONG_SPARSE = {
    "q dtype": ({"q": torch.zeros(3, 4, D, dtype=torch.float16)}, TypeError, r"q must be bfloat16 or float32 .* got float16"),
    "q rank": ({"q": torch.zeros(3, D)}, ValueError, r"q must be .*\[T, H, D\], got .*\[3, 64\]"),
    "D": ({"q": torch.zeros(3, 4, 48)}, ValueError, r"D a positive multiple of 32, got D=48"),
    "window width": ({"window": torch.zeros(8, 64, dtype=torch.uint8)}, ValueError, r"window must be uint8 \[Sw, row bytes=66\], got"),
    "window dtype": ({"window": torch.zeros(8, 66)}, TypeError, r"window must be uint8"),
    "lanes dtype": ({"window_idx": torch.zeros(3, 5, dtype=torch.int64)}, TypeError, r"window_idx must be int32 \[T=3, W\], got int64"),
    "lanes rows": ({"window_idx": torch.zeros(2, 5, dtype=torch.int32)}, ValueError, r"window_idx must be .*\[T=3, W\], got .*\[2, 5\]"),
    "no pool": ({"compressed": None}, ValueError, r"compressed and compressed_idx must be given together"),
    "no lanes": ({"compressed_idx": None}, ValueError, r"compressed and compressed_idx must be given together"),
    "length alone": ({"compressed": None, "compressed_idx": None}, ValueError, r"compressed_len needs compressed"),
    "compressed width": ({"compressed": torch.zeros(9, 40, dtype=torch.uint8)}, ValueError, r"compressed must be .*\[Sc, row bytes=36\]"),
    "length shape": ({"compressed_len": torch.zeros(4, dtype=torch.int32)}, ValueError, r"compressed_len must be .*\[T=3\], got .*\[4\]"),
    "sink dtype": ({"sink": torch.zeros(4, dtype=torch.bfloat16)}, TypeError, r"sink must be float32 \[H=4\]"),
    "sink shape": ({"sink": torch.zeros(5)}, ValueError, r"sink must be .*\[H=4\], got .*\[5\]"),
    "out dtype": ({"out": torch.zeros(3, 4, D, dtype=torch.bfloat16)}, TypeError, r"out must be float32"),
    "out shape": ({"out": torch.zeros(3, 5, D)}, ValueError, r"out must be .*\[T=3, H=4, D=64\], got .*\[3, 5, 64\]"),
    "device": ({"sink": torch.zeros(4, device="meta")}, ValueError, r"sink must be on cpu like the first operand, got meta"),
}


@pytest.mark.parametrize("wrong", WRONG_SPARSE)
def test_sparse_refuses(wrong: str) -> None:
    change, error, message = WRONG_SPARSE[wrong]
    with pytest.raises(error, match="attention.sparse: .*" + message):
        attention.sparse(**{**sparse_inputs(), **change})


def test_sparse_runs_on_the_cpu() -> None:
    inputs = sparse_inputs()
    inputs["compressed_len"] += 4
    got = attention.sparse(**inputs)
    assert torch.equal(got, reference.sparse(*inputs.values()))
    out = torch.empty_like(got)
    assert attention.sparse(**inputs, out=out) is out and torch.equal(out, got)
    nothing = {**inputs, "compressed": None, "compressed_idx": None, "compressed_len": None}
    assert attention.sparse(**nothing).shape == (3, 4, D)
    empty = {**inputs, **{key: inputs[key][:0] for key in ("q", "window_idx", "compressed_idx", "compressed_len")}}
    assert attention.sparse(**empty).shape == (0, 4, D)


def test_sparse_kernel_sizes_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """D and H that no kernel takes are refused with the way out, before the launch."""
    monkeypatch.setattr(attention, "select", lambda *args, **kwargs: "portable")
    monkeypatch.setattr(attention, "call", lambda *args: pytest.fail("reached the kernel"))
    with pytest.raises(ValueError, match=r"D=512 and H a multiple of 4 from 4 to 128, got D=64 H=4\. MDI_OPS=attention.sparse=reference"):
        attention.sparse(**sparse_inputs())


@pytest.mark.parametrize(("name", "width"), [("window", 66), ("compressed", 36)])
def test_write_rows_refuse(name: str, width: int) -> None:
    write = getattr(attention, f"write_{name}")
    values, rows, slots = torch.zeros(5, D), torch.zeros(7, width, dtype=torch.uint8), torch.zeros(5, dtype=torch.int32)
    for args, error, message in (
        ((values.half(), rows, slots), TypeError, r"must be bfloat16 or float32"),
        ((values[:, :40], rows, slots), ValueError, r"a positive multiple of 32 columns .* got 40"),
        ((values, rows[:, 1:], slots), ValueError, rf"rows must be .*\[S, row bytes={width}\], got .*\[7, {width - 1}\]"),
        ((values, rows.int(), slots), TypeError, r"rows must be uint8"),
        ((values, rows, slots.long()), TypeError, r"slots must be int32"),
        ((values, rows, slots[:4]), ValueError, r"slots must be .*\[rows=5\], got .*\[4\]"),
    ):
        with pytest.raises(error, match=rf"attention.write_{name}: .*" + message):
            write(*args)


def normed_window_inputs() -> dict[str, Any]:
    return {
        "x": torch.randn(5, D),
        "weight": torch.ones(D),
        "eps": 1e-6,
        "positions": torch.zeros(5, dtype=torch.int32),
        "table": torch.ones(9, 8, 2),
        "rows": torch.zeros(7, 66, dtype=torch.uint8),
        "slots": torch.arange(5, dtype=torch.int32),
    }


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.zeros(5, D).half()}, TypeError, r"x must be bfloat16 or float32"),
        ({"weight": torch.ones(D + 1)}, ValueError, r"weight must be .*\[D=64\], got .*\[65\]"),
        ({"eps": -1.0}, ValueError, r"eps must be >= 0, got -1.0"),
        ({"positions": torch.zeros(5)}, TypeError, r"positions must be int32"),
        ({"positions": torch.zeros(4, dtype=torch.int32)}, ValueError, r"positions must be .*\[T=5\], got .*\[4\]"),
        ({"table": torch.ones(9, 8, 3)}, ValueError, r"table must be .*\[P, R/2, 2\], got .*\[9, 8, 3\]"),
        ({"table": torch.ones(9, 40, 2)}, ValueError, r"at least R=80 \(table\), got 64"),
        ({"rows": torch.zeros(7, 64, dtype=torch.uint8)}, ValueError, r"rows must be .*\[S, row bytes=66\], got .*\[7, 64\]"),
        ({"slots": torch.arange(5)}, TypeError, r"slots must be int32"),
    ],
)
def test_write_normed_window_refuses(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match="attention.write_normed_window: .*" + message):
        attention.write_normed_window(**{**normed_window_inputs(), **change})


def test_write_normed_window_is_the_three_ops() -> None:
    inputs = normed_window_inputs()
    wanted = torch.zeros_like(inputs["rows"])
    y = elementwise.rope(
        elementwise.rmsnorm(inputs["x"], inputs["weight"], 1e-6)[:, None], inputs["positions"], inputs["table"]
    )[:, 0]
    attention.write_window(y, wanted, inputs["slots"])
    attention.write_normed_window(**inputs)
    assert torch.equal(inputs["rows"], wanted) and bool(wanted[:5].any(-1).all())


def test_write_rows_on_the_cpu() -> None:
    x = torch.randn(4, D)
    rows = torch.zeros(6, 66, dtype=torch.uint8)
    attention.write_window(x, rows, torch.tensor([5, -1, 0, 2], dtype=torch.int32))
    packed = reference.pack_window(x)
    assert torch.equal(rows[5], packed[0]) and torch.equal(rows[0], packed[2]) and torch.equal(rows[2], packed[3])
    assert not bool(rows[[1, 3, 4]].any())
    attention.write_window(x[:0], rows, torch.zeros(0, dtype=torch.int32))


def test_compress_refuse() -> None:
    kv, rows = torch.zeros(6, D), torch.zeros(3, 2, dtype=torch.int32)
    for args, error, message in (
        ((kv.bfloat16(), kv, None, None, rows, torch.float32), TypeError, r"kv must be float32"),
        ((kv, None, None, None, rows, torch.float32), ValueError, r"score must be given unless r = 1"),
        ((kv, kv[:5], None, None, rows, torch.float32), ValueError, r"score must be .*\[T=6, D=64\], got .*\[5, 64\]"),
        ((kv, kv, kv, None, rows, torch.float32), ValueError, r"tail_kv and tail_score must be given together"),
        ((kv, kv, kv[:1], kv[:2], rows, torch.float32), ValueError, r"tail_score must be .*\[tail=1, D=64\], got .*\[2, 64\]"),
        ((kv, kv, None, None, rows.long(), torch.float32), TypeError, r"group_rows must be int32"),
        ((kv, kv, None, None, rows, torch.float16), TypeError, r"out_dtype must be bfloat16 or float32"),
    ):
        with pytest.raises(error, match="attention.compress: .*" + message):
            attention.compress(*args)


def test_compress_on_the_cpu() -> None:
    kv = torch.randn(6, D)
    rows = torch.tensor([[1], [4]], dtype=torch.int32)
    assert torch.equal(attention.compress(kv, None, None, None, rows, torch.float32), kv[[1, 4]])
    assert attention.compress(kv, None, None, None, rows[:0], torch.bfloat16).dtype == torch.bfloat16
