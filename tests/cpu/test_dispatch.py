"""Which implementation runs, and that wrong input never reaches the compiled library."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mini_deepinfer import environment
from mini_deepinfer.ops import _dispatch, _extension, _operands, elementwise

BF16 = torch.zeros(1, dtype=torch.bfloat16)


def fake_cuda(dtype: torch.dtype = torch.bfloat16, index: int | None = 0) -> SimpleNamespace:
    """What select() looks at, pretending to live on a GPU."""
    return SimpleNamespace(device=torch.device("cuda", index), dtype=dtype)


class StubLibrary:
    """Stands in for torch.ops.mini_deepinfer: holds the named ops and counts calls."""

    def __init__(self, *names: str) -> None:
        self.calls: list[tuple[str, tuple]] = []
        for name in names:
            setattr(self, name, SimpleNamespace(default=lambda *args, name=name: self.calls.append((name, args))))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A pretended H200 with a full build; change .capability, .archs or .library in a test."""
    state = SimpleNamespace(capability=(9, 0), archs=("90a", "100a"), problem=None)
    state.library = StubLibrary("moe_route", "attention_sparse", "attention_sparse_sm90", "attention_sparse_sm100")
    monkeypatch.setitem(_dispatch.IMPLEMENTATIONS, "attention.sparse", ("sm90", "sm100", "portable"))
    monkeypatch.setitem(_dispatch.IMPLEMENTATIONS, "moe.route", ("portable",))
    monkeypatch.setitem(_dispatch.IMPLEMENTATIONS, "moe.combine", ())
    monkeypatch.setattr(_extension, "available", lambda: state.problem is None)
    monkeypatch.setattr(_extension, "problem", lambda: state.problem)
    monkeypatch.setattr(_extension, "archs", lambda: state.archs)
    monkeypatch.setattr(_extension, "has_op", lambda name: hasattr(state.library, name))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: state.capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Pretended GPU")
    monkeypatch.setattr(_dispatch, "SELF_TESTS", {})
    monkeypatch.delenv("MDI_OPS", raising=False)
    caches = (_dispatch._best, _dispatch.why_not, _dispatch._gate, _dispatch._log_once)
    for cache in caches:
        cache.cache_clear()
    yield state
    for cache in caches:
        cache.cache_clear()


# -- selection -------------------------------------------------------------------------------------------------------


def test_readme_names_every_op_and_its_kernels() -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    stage_map, table = text.partition("## Stage map")[2].split("## Which op has which implementation")
    names = [re.escape(name).replace(r"\*", ".*") for name in re.findall(r"`(?:\w+\.)?([a-z0-9_*]+)`", stage_map)]
    assert [op for op in _dispatch.IMPLEMENTATIONS if not any(re.fullmatch(name, op.partition(".")[2]) for name in names)] == []
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| `")]
    hopper = {op for row in rows if row[4].strip() == "yes" for op in re.findall(r"`([\w.]+)`", row[1])}
    assert hopper == {op for op, kinds in _dispatch.IMPLEMENTATIONS.items() if "sm90" in kinds}
    assert all("portable" in kinds or "library" in kinds for kinds in _dispatch.IMPLEMENTATIONS.values())


def test_cpu_tensors_take_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MDI_OPS", raising=False)
    for op in _dispatch.IMPLEMENTATIONS:
        assert _dispatch.select(op, BF16) == "reference"


def test_best_implementation_of_the_device(machine: SimpleNamespace) -> None:
    assert _dispatch.select("attention.sparse", fake_cuda()) == "sm90"
    assert _dispatch.select("moe.route", fake_cuda()) == "portable"


def test_an_op_without_a_kernel_takes_the_reference_and_says_so(machine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert _dispatch.select("moe.combine", fake_cuda()) == "reference"
        assert _dispatch.select("moe.combine", fake_cuda()) == "reference"
    assert [r.message for r in caplog.records if "moe.combine" in r.message] == [
        "moe.combine has no CUDA kernel yet: the plain PyTorch reference runs on cuda:0"
    ]


def test_a_build_without_the_better_kernel_takes_the_next(machine: SimpleNamespace) -> None:
    machine.library = StubLibrary("attention_sparse")
    assert _dispatch.select("attention.sparse", fake_cuda()) == "portable"


def test_float32_compute_takes_the_reference(machine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert _dispatch.select("attention.sparse", fake_cuda(torch.float32)) == "reference"
    assert "float32 compute on CUDA" in caplog.text
    assert _dispatch.select("moe.route", fake_cuda(torch.float32), compute_dtype=torch.bfloat16) == "portable"
    assert _dispatch.select("moe.route", fake_cuda(torch.uint8)) == "portable"
    with pytest.raises(RuntimeError, match="computes in bfloat16, got float32"):
        _dispatch.select("attention.sparse", fake_cuda(torch.float32), impl="sm90")


def test_explicit_choice(machine: SimpleNamespace) -> None:
    for impl in ("sm90", "portable", "reference"):
        assert _dispatch.select("attention.sparse", fake_cuda(), impl=impl) == impl
    with pytest.raises(RuntimeError, match=r"sm100 needs compute capability 10.0, Pretended GPU has 9.0"):
        _dispatch.select("attention.sparse", fake_cuda(), impl="sm100")
    with pytest.raises(ValueError, match=r"no implementation 'fast'; it has sm90, sm100, portable, reference"):
        _dispatch.select("attention.sparse", fake_cuda(), impl="fast")
    with pytest.raises(RuntimeError, match="needs CUDA tensors, got a tensor on cpu"):
        _dispatch.select("attention.sparse", BF16, impl="portable")


def test_unknown_op_lists_the_ops(machine: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match=r"unknown op 'attention.dense'; the ops are .*attention.sparse"):
        _dispatch.select("attention.dense", fake_cuda())


@pytest.mark.parametrize("capability, archs", [((8, 6), ("90a", "100a")), ((12, 0), ("90a", "100a")), ((10, 0), ("90a",))])
def test_unsupported_gpu_is_refused_by_name(machine: SimpleNamespace, capability, archs) -> None:
    machine.capability, machine.archs = capability, archs
    with pytest.raises(RuntimeError) as error:
        _dispatch.select("moe.route", fake_cuda())
    text = str(error.value)
    assert f"compute capability {capability[0]}.{capability[1]}" in text and "Pretended GPU" in text
    assert "moe.route" in text and "sm_90a" in text and "MDI_OPS=moe.route=reference" in text


def test_missing_extension_is_named(machine: SimpleNamespace) -> None:
    machine.problem = "the extension is not built: pip install --no-build-isolation -e ."
    with pytest.raises(RuntimeError, match="extension is not built"):
        _dispatch.select("moe.route", fake_cuda())
    assert _dispatch.select("moe.route", fake_cuda(), impl="reference") == "reference"


# -- MDI_OPS ---------------------------------------------------------------------------------------------------------


def test_mdi_ops_by_name(machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MDI_OPS", "attention.sparse=portable, moe.route=reference")
    assert _dispatch.select("attention.sparse", fake_cuda()) == "portable"
    assert _dispatch.select("moe.route", fake_cuda()) == "reference"
    assert _dispatch.select("attention.sparse", fake_cuda(), impl="sm90") == "sm90"  # the caller's choice wins
    assert _dispatch.select("attention.sparse", BF16) == "reference"  # nothing but the reference runs on the CPU
    monkeypatch.setenv("MDI_OPS", "reference")
    assert _dispatch.select("attention.sparse", fake_cuda()) == "reference"
    monkeypatch.setenv("MDI_OPS", "attention.sparse=sm100")
    with pytest.raises(RuntimeError, match=r"MDI_OPS: attention.sparse=sm100 cannot run here"):
        _dispatch.select("attention.sparse", fake_cuda())


@pytest.mark.parametrize("text, message", [
    ("attention.dense=portable", r"unknown op 'attention.dense'; the ops are elementwise"),
    ("moe.route=sm90", r"moe.route has no implementation 'sm90'; it has portable, reference"),
    ("portable", r"'portable' must be op=implementation"),
    ("moe.route=portable,", r"'' must be op=implementation"),
    ("moe.route=portable,moe.route=reference", r"moe.route is given twice"),
])  # fmt: skip
def test_bad_mdi_ops(machine, monkeypatch: pytest.MonkeyPatch, text: str, message: str) -> None:
    monkeypatch.setenv("MDI_OPS", text)
    with pytest.raises(ValueError, match=f"MDI_OPS.*: {message}"):
        _dispatch.select("moe.route", BF16)


def test_a_step_chooses_once(machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within it the environment stays what it was, per op, device, dtype and explicit choice; afterwards it counts again."""
    monkeypatch.setenv("MDI_OPS", "attention.sparse=portable")
    with _dispatch.fixed_environment():
        assert _dispatch.select("attention.sparse", fake_cuda()) == "portable"
        monkeypatch.setenv("MDI_OPS", "reference")
        assert _dispatch.select("attention.sparse", fake_cuda()) == "portable"
        assert _dispatch.select("moe.route", fake_cuda()) == "portable"  # also what was not asked for before
        assert _dispatch.select("attention.sparse", fake_cuda(), impl="sm90") == "sm90"
        assert _dispatch.select("attention.sparse", fake_cuda(torch.float32)) == "reference"
        assert _dispatch.select("attention.sparse", fake_cuda(torch.float32), compute_dtype=torch.bfloat16) == "portable"
        assert _dispatch.select("attention.sparse", BF16) == "reference"
        for _ in range(2):  # a refusal is not remembered as a choice
            with pytest.raises(RuntimeError, match="computes in bfloat16, got float32"):
                _dispatch.select("attention.sparse", fake_cuda(torch.float32), impl="sm90")
    assert _dispatch.select("attention.sparse", fake_cuda()) == "reference"


def test_a_step_is_of_its_thread() -> None:
    """Steps of two engines overlap in any order, and neither leaves anything behind; one that fails does not either."""
    first = _dispatch.fixed_environment(only_kernels=True)
    first.__enter__()
    with ThreadPoolExecutor(1) as other:
        assert other.submit(_dispatch.kernels_check).result() is False
        second = _dispatch.fixed_environment(only_kernels=True)
        other.submit(second.__enter__).result()
        first.__exit__(None, None, None)
        assert not _dispatch.kernels_check() and other.submit(_dispatch.kernels_check).result() is True
        other.submit(second.__exit__, None, None, None).result()
        assert other.submit(_dispatch.kernels_check).result() is False
    with pytest.raises(ZeroDivisionError), _dispatch.fixed_environment(only_kernels=True):
        raise ZeroDivisionError
    assert not _dispatch.kernels_check()


# -- the sm100 self-test gate ----------------------------------------------------------------------------------------


def _self_test(results: dict[str, torch.Tensor]):
    def run(inputs: dict, impl: str) -> torch.Tensor:
        if isinstance(results[impl], Exception):
            raise results[impl]
        return results[impl]

    return run


@pytest.mark.parametrize("result, used", [
    (torch.ones(4), "sm100"),
    (torch.ones(4) * 1.5, "portable"),
    (torch.full((4,), float("nan")), "portable"),
    (RuntimeError("illegal instruction"), "portable"),
    (None, "portable"),
], ids=["agrees", "differs", "nan", "raises", "no test"])  # fmt: skip
def test_sm100_gate(machine, caplog: pytest.LogCaptureFixture, result, used: str) -> None:
    machine.capability = (10, 0)
    if result is not None:
        run = _self_test({"sm100": result, "portable": torch.ones(4)})
        _dispatch.register_self_test("attention.sparse", lambda device: {}, run, bound=1e-2)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert _dispatch.select("attention.sparse", fake_cuda()) == used
    warnings = [r for r in caplog.records if "attention.sparse" in r.message]
    assert len(warnings) == (0 if used == "sm100" else 1)


def test_every_op_has_a_self_test_that_can_fail() -> None:
    """Its output holds something, is the same twice, and is far from another one."""
    environment.load_ops()
    assert set(_dispatch.SELF_TESTS) == set(_dispatch.IMPLEMENTATIONS)
    device = torch.device("cpu")
    for op, test in _dispatch.SELF_TESTS.items():
        outputs = [test.run(test.make(device), "reference") for _ in range(2)]
        first, second = (output if isinstance(output, tuple) else (output,) for output in outputs)
        assert _dispatch.difference(first, second) == 0, op
        assert all(bool((part.view(torch.uint8) != 0).any()) for part in first), op
        wrong = first[0].clone()
        wrong.view(torch.uint8)[-1].bitwise_xor_(0x40)
        assert _dispatch.difference((wrong, *first[1:]), second) > test.bound, op


def test_difference() -> None:
    one = torch.ones(3)
    assert _dispatch.difference((one, one.int()), (one, one.int())) == 0
    assert _dispatch.difference(one * 1.25, one) == 0.25
    assert _dispatch.difference(one.int() + 1, one.int()) == float("inf")
    assert _dispatch.difference(one, one[:2]) == float("inf")
    nan = torch.tensor([1.0, float("nan")])
    assert _dispatch.difference(nan, nan) == 0 and _dispatch.difference(torch.ones(2), nan) == float("inf")
    inf = torch.tensor([1.0, float("inf")])
    assert _dispatch.difference(inf, inf) == 0 and _dispatch.difference(-inf, inf) == float("inf")


# -- calls -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def stub(machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> StubLibrary:
    """A library whose calls are counted; select() is made to choose the kernel for CPU tensors."""
    library = StubLibrary("elementwise_expand_fp8", "elementwise_expand_fp4")
    monkeypatch.setattr(_dispatch.torch.ops, "mini_deepinfer", library, raising=False)
    monkeypatch.setattr(elementwise.number_formats, "select", lambda op, tensor, impl=None: "portable")
    return library


def test_a_good_call_reaches_the_library_once(stub: StubLibrary) -> None:
    out = elementwise.expand_fp8(torch.zeros(3, 64, dtype=torch.uint8), torch.zeros(3, 2, dtype=torch.uint8))
    assert out.shape == (3, 64) and out.dtype == torch.bfloat16
    assert [name for name, _ in stub.calls] == ["elementwise_expand_fp8"]


U8 = torch.uint8


@pytest.mark.parametrize("op, codes, scale, error, message", [
    ("expand_fp8", torch.zeros(3, 64), torch.zeros(3, 2, dtype=U8), TypeError, "codes must be float8_e4m3fn or uint8"),
    ("expand_fp8", torch.zeros(3, 64, dtype=U8), torch.zeros(3, 2), TypeError, "scale must be uint8"),
    ("expand_fp8", torch.zeros(64, dtype=U8), torch.zeros(2, dtype=U8), ValueError, r"codes must be .*\[M, bytes\], got uint8 \[64\]"),
    ("expand_fp8", torch.zeros(3, 60, dtype=U8), torch.zeros(3, 2, dtype=U8), ValueError, "multiple of 32 columns"),
    ("expand_fp8", torch.zeros(3, 64, dtype=U8), torch.zeros(3, 3, dtype=U8), ValueError, r"scale .*\[M=3, K/32=2\]"),
    ("expand_fp4", torch.zeros(3, 64).char(), torch.zeros(3, 4, dtype=U8), TypeError, "packed must be uint8"),
    ("expand_fp4", torch.zeros(3, 64, dtype=U8), torch.zeros(3, 2, dtype=U8), ValueError, r"K/32=4\], got uint8 \[3, 2\]"),
])  # fmt: skip
def test_bad_input_never_reaches_the_library(stub: StubLibrary, op, codes, scale, error, message) -> None:
    with pytest.raises(error, match=f"elementwise.{op}: .*{message}"):
        getattr(elementwise, op)(codes, scale)
    assert stub.calls == []


@pytest.mark.parametrize("variable, value", [("", ""), ("MDI_SYNC", "1"), ("MDI_LOG_OPS", "1"), ("MDI_OPS", "reference"),
                                             ("MDI_OPS", "moe.route=reference")])  # fmt: skip
def test_operands_are_checked_unless_kernels_do(machine, monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    """Only a step says that its kernels look at everything, and only if nothing in the environment asks for more."""
    if variable:
        monkeypatch.setenv(variable, value)
    for only_kernels in (False, True):
        assert not _dispatch.kernels_check()
        with _dispatch.fixed_environment(only_kernels=only_kernels):
            assert _dispatch.kernels_check() is (only_kernels and not variable)
            if not _dispatch.kernels_check():
                with pytest.raises(ValueError, match=r"some.op: x must be float32 \[T=2\], got float32 \[1\]"):
                    _operands.check_operand("some.op", "x", torch.zeros(1), (torch.float32,), {"T": 2})
            else:
                _operands.check_operand("some.op", "x", torch.zeros(1), (torch.float32,), {"T": 2})


def test_log_and_sync_flags(stub: StubLibrary, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    synced = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: synced.append(1))
    monkeypatch.setenv("MDI_LOG_OPS", "1")
    monkeypatch.setenv("MDI_SYNC", "1")
    elementwise.expand_fp8(torch.zeros(3, 64, dtype=U8), torch.zeros(3, 2, dtype=U8))
    assert "elementwise.expand_fp8 (portable): uint8[3, 64], uint8[3, 2], bfloat16[3, 64]" in caplog.text
    assert synced == [1]
    monkeypatch.setenv("MDI_SYNC", "0")
    with _dispatch.fixed_environment():
        monkeypatch.setenv("MDI_SYNC", "1")
        elementwise.expand_fp8(torch.zeros(3, 64, dtype=U8), torch.zeros(3, 2, dtype=U8))
    assert synced == [1]
    monkeypatch.setenv("MDI_SYNC", "yes")
    with pytest.raises(ValueError, match="MDI_SYNC = 'yes': must be 0 or 1"):
        elementwise.expand_fp8(torch.zeros(3, 64, dtype=U8), torch.zeros(3, 2, dtype=U8))
