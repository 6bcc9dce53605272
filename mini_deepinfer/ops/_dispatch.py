"""Which implementation of an op runs: the compiled kernels for the tensor's GPU, or the plain PyTorch reference.

An op module does

    impl = select("stage.op", x, impl=impl)
    if impl == "reference":
        return reference.stage.op(...)
    call("stage.op", impl, ...)          # torch.ops.mini_deepinfer.stage_op[_impl](...)

Environment: MDI_OPS=reference (everything) or MDI_OPS=attention.sparse=portable,indexer.topk=reference (by name),
MDI_LOG_OPS=1 (log op, implementation and shapes before each launch), MDI_SYNC=1 (synchronise and check after each). They are read at
every call, in a step of the model once (`fixed_environment`).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mini_deepinfer.env_variables import read_env
from mini_deepinfer.ops import _extension

log = logging.getLogger(__name__)

# Compiled implementations of every op, best first. "reference" is always there and never listed; an empty tuple is an
# op without a kernel. Whoever adds a kernel adds it here.
IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {
    # -- elementwise: number formats
    "elementwise.expand_fp8": ("portable",),
    "elementwise.expand_fp4": ("portable",),
    #
    # -- elementwise: the rest
    "elementwise.rmsnorm": ("portable",),
    "elementwise.rmsnorm_quant": ("portable",),
    "elementwise.act_quant": ("portable",),
    "elementwise.act_quant_folded": ("portable",),
    "elementwise.fold_scales": ("portable",),
    "elementwise.rope": ("portable",),
    "elementwise.rope_quant": ("portable",),
    "elementwise.hc_mix": ("portable",),
    "elementwise.hc_collapse": ("portable",),
    "elementwise.hc_collapse_norm": ("portable",),
    "elementwise.hc_collapse_norm_quant": ("portable",),
    "elementwise.hc_expand": ("portable",),
    "elementwise.hc_expand_mix": ("portable",),
    "elementwise.hc_expand_mix_norm_quant": ("sm90", "portable"),
    "elementwise.engram_gate": ("portable",),
    #
    # -- attention
    "attention.write_window": ("portable",),
    "attention.write_normed_window": ("portable",),
    "attention.compress": ("portable",),
    "attention.write_compressed": ("portable",),
    "attention.expand_rows": ("portable",),
    "attention.sparse": ("sm90", "portable"),
    #
    # -- indexer
    "indexer.write_keys": ("portable",),
    "indexer.quant_query": ("portable",),
    "indexer.rope_quant_query": ("portable",),
    "indexer.logits": ("sm90", "portable"),
    "indexer.candidate_blocks": ("portable",),
    "indexer.candidate_logits": ("sm90", "portable"),
    "indexer.topk": ("portable",),
    "indexer.topk_blocks": ("portable",),
    "indexer.cache_rows": ("portable",),
    #
    # -- linear ("library": torch's product, on every GPU)
    "linear.fp8": ("sm90", "library"),
    #
    # -- moe
    "moe.route": ("sm90", "portable"),
    "moe.permute": ("portable",),
    "moe.grouped_gemm": ("sm90", "portable"),
    "moe.swiglu_quant": ("portable",),
    "moe.combine": ("portable",),
}

_CAPABILITY = {"sm90": (9, 0), "sm100": (10, 0)}  # an implementation that is not listed runs on every built GPU


@functools.cache
def library_name(op: str, impl: str) -> str:
    """Name in torch.ops.mini_deepinfer: ("moe.route", "sm90") -> "moe_route_sm90"; portable has no suffix."""
    return op.replace(".", "_") + ("" if impl == "portable" else f"_{impl}")


@dataclass
class _Environment:
    """What the environment says, and what `select` has made of it so far."""

    choices: dict[str, str] = field(default_factory=lambda: read_env("MDI_OPS"))
    log_ops: bool = field(default_factory=lambda: read_env("MDI_LOG_OPS"))
    sync: bool = field(default_factory=lambda: read_env("MDI_SYNC"))
    only_kernels: bool = False
    chosen: dict[tuple, str] = field(default_factory=dict)


_fixed: ContextVar[_Environment | None] = ContextVar("fixed_environment", default=None)  # every thread has its own


@contextmanager
def fixed_environment(*, only_kernels: bool = False) -> Iterator[None]:
    """Within, for this thread, the environment counts as it was at the start: the ops of a step would ask some two thousand times.

    only_kernels: the caller's operands take no reference unless the environment asks for it. See `kernels_check`.
    """
    environment = _Environment()
    asked = environment.log_ops or environment.sync or "reference" in environment.choices.values()
    environment.only_kernels = only_kernels and not asked
    token = _fixed.set(environment)
    try:
        yield
    finally:
        _fixed.reset(token)


def kernels_check() -> bool:
    """Whether the checks of the kernels (csrc/*/*_api.h) are enough: in a step of kernels alone, whose operands are the model's own.

    They refuse what an op's own checks refuse, as RuntimeError. MDI_SYNC=1 and MDI_LOG_OPS=1 bring those back, to look for an error.
    """
    environment = _fixed.get()
    return environment is not None and environment.only_kernels


def _check_choice(op: str, impl: str, source: str) -> None:
    if op not in IMPLEMENTATIONS:
        raise ValueError(f"{source}: unknown op {op!r}; the ops are {', '.join(IMPLEMENTATIONS)}")
    known = (*IMPLEMENTATIONS[op], "reference")
    if impl not in known:
        raise ValueError(f"{source}: {op} has no implementation {impl!r}; it has {', '.join(known)}")


def _environment_choice(op: str) -> str | None:
    """The implementation that MDI_OPS names for op, if any. Raises ValueError naming what exists for any wrong entry."""
    environment = _fixed.get()
    choices = read_env("MDI_OPS") if environment is None else environment.choices
    if "*" in choices:
        return choices["*"]
    for name, impl in choices.items():
        _check_choice(name, impl, "MDI_OPS")
    return choices.get(op)


# -- self-tests ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SelfTest:
    """A small fixed input of one op. run(inputs, impl) forces that implementation and returns its output tensors."""

    make: Callable[[torch.device], dict[str, Any]]
    run: Callable[[dict[str, Any], str], Any]
    bound: float  # largest |difference| allowed, as a share of the largest |value| of the output it is compared with


SELF_TESTS: dict[str, SelfTest] = {}


def register_self_test(
    op: str, make: Callable[[torch.device], dict[str, Any]], run: Callable[[dict[str, Any], str], Any], bound: float
) -> None:
    """Give an op the test that gates its sm100 implementation and that `env --self-test` runs for all of them."""
    _check_choice(op, "reference", "register_self_test")
    SELF_TESTS[op] = SelfTest(make, run, bound)


def difference(got: Any, wanted: Any) -> float:
    """Largest |got - wanted| as a share of the largest finite |wanted|, over tensors or nested tuples of them.

    Infinite where shapes, integers, or the places of NaN and Inf differ.
    """
    if isinstance(wanted, tuple | list):
        return max((difference(g, w) for g, w in zip(got, wanted, strict=True)), default=0.0)
    if wanted is None or got is None:
        return 0.0 if got is wanted else float("inf")
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return float("inf")
    if not wanted.dtype.is_floating_point:
        return 0.0 if torch.equal(got, wanted) else float("inf")
    g, w = got.double(), wanted.double()
    finite = w.isfinite()
    if not torch.equal(finite, g.isfinite()) or not torch.equal(w.isnan(), g.isnan()):
        return float("inf")
    if not torch.equal(g[w.isinf()], w[w.isinf()]):
        return float("inf")
    if not bool(finite.any()):
        return 0.0
    g, w = g[finite], w[finite]
    return float((g - w).abs().max() / w.abs().max().clamp(min=1e-30))


def run_self_test(op: str, impl: str, device: torch.device) -> tuple[str, float]:
    """Run op's self-test: (the implementation compared with, the difference). Raises what the kernel raises."""
    test = SELF_TESTS[op]
    against = "portable" if impl != "portable" and why_not(op, "portable", device) is None else "reference"
    inputs = test.make(device)
    # a run may write into its inputs: each implementation gets its own
    return against, difference(test.run(inputs, impl), test.run(test.make(device), against))


@functools.cache
def _gate(op: str, impl: str, index: int) -> bool:
    """True when an sm100 implementation agrees with the portable one on this machine; warns once when it does not."""
    device = torch.device("cuda", index)
    if op not in SELF_TESTS:
        log.warning("%s: the %s kernel has no self-test, using another implementation", op, impl)
        return False
    try:
        against, error = run_self_test(op, impl, device)
    except RuntimeError as failure:
        log.warning("%s: the %s kernel failed its self-test (%s), using another implementation", op, impl, failure)
        return False
    if error <= SELF_TESTS[op].bound:
        return True
    log.warning(
        "%s: the %s kernel differs from %s by %.3g (bound %.3g) on %s, using another implementation",
        op, impl, against, error, SELF_TESTS[op].bound, torch.cuda.get_device_name(device),
    )  # fmt: skip
    return False


# -- selection -----------------------------------------------------------------------------------------------------


@functools.cache
def why_not(op: str, impl: str, device: torch.device) -> str | None:
    """Why a compiled implementation cannot run on a CUDA device; None when it can."""
    if impl == "library":
        return None
    if reason := _extension.device_problem(device):
        return reason
    capability = torch.cuda.get_device_capability(device)
    wanted = _CAPABILITY.get(impl, capability)
    built = ", ".join(f"sm_{arch}" for arch in _extension.archs())
    if capability != wanted:
        return (
            f"{impl} needs compute capability {wanted[0]}.{wanted[1]}, {torch.cuda.get_device_name(device)} has "
            f"{capability[0]}.{capability[1]} (this build has {built})"
        )
    if not _extension.has_op(library_name(op, impl)):
        commit = (_extension.build_record() or {}).get("commit")
        return f"this build ({built}, commit {commit}) does not hold {library_name(op, impl)}"
    return None


@functools.cache
def _log_once(level: int, message: str) -> None:
    log.log(level, message)


@functools.cache
def _best(op: str, device: torch.device) -> str:
    reasons = []
    for impl in IMPLEMENTATIONS[op]:
        reason = why_not(op, impl, device)
        if reason is None and (impl != "sm100" or _gate(op, impl, device.index)):
            return impl
        reasons.append(f"{impl}: {reason or 'failed its self-test'}")
    if not reasons:
        _log_once(logging.WARNING, f"{op} has no CUDA kernel yet: the plain PyTorch reference runs on {device}")
        return "reference"
    raise RuntimeError(
        f"{op}: no implementation runs on {torch.cuda.get_device_name(device)} ({'; '.join(reasons)}). "
        f"MDI_OPS={op}=reference runs the plain PyTorch op (slow)."
    )


def select(op: str, tensor: Tensor, *, impl: str | None = None, compute_dtype: torch.dtype | None = None) -> str:
    """The implementation of `op` that runs for `tensor`: "reference" or an entry of IMPLEMENTATIONS[op].

    impl: the caller's explicit choice (tests and benches); None reads MDI_OPS and then takes the best one.
    compute_dtype: the engine's compute dtype where `tensor` has another one on purpose (float32 in, bf16 out); float32
        compute always runs the reference, because the kernels are bf16.
    Raises ValueError for an unknown op or implementation (with the list), RuntimeError when it cannot run here.
    """
    dtype = compute_dtype or tensor.dtype
    environment = _fixed.get()
    if environment is None:
        return _select(op, tensor.device, dtype, impl)
    key = (op, tensor.device, dtype, impl)
    if key not in environment.chosen:
        environment.chosen[key] = _select(*key)
    return environment.chosen[key]


def _select(op: str, device: torch.device, compute_dtype: torch.dtype, impl: str | None) -> str:
    choice, source = impl, f"{op}(impl=...)"
    if choice is None:
        choice, source = _environment_choice(op), "MDI_OPS"
    if choice is not None or op not in IMPLEMENTATIONS:
        _check_choice(op, choice or "reference", source)
    if choice == "reference":
        return "reference"
    if device.type != "cuda":
        if impl is not None:
            raise RuntimeError(f"{op}: implementation {impl!r} needs CUDA tensors, got a tensor on {device}")
        return "reference"
    if compute_dtype == torch.float32:
        if impl is not None:
            raise RuntimeError(f"{op}: implementation {impl!r} computes in bfloat16, got float32; use impl='reference'")
        _log_once(
            logging.INFO, "float32 compute on CUDA: the plain PyTorch reference ops run (the kernels are bfloat16)"
        )
        return "reference"
    device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    if choice is None:
        return _best(op, device)
    if reason := why_not(op, choice, device):
        raise RuntimeError(f"{source}: {op}={choice} cannot run here: {reason}")
    return choice


def check_device(device: torch.device, compute_dtype: torch.dtype) -> None:
    """Refuse at start, before any loading, what `select` would refuse in the first step.

    Raises ValueError for a wrong MDI_OPS, RuntimeError when ops of compute_dtype would take compiled kernels that cannot run on device.
    """
    choices = {_environment_choice(op) for op in IMPLEMENTATIONS}
    if device.type != "cuda" or compute_dtype == torch.float32 or choices == {"reference"}:
        return
    if reason := _extension.device_problem(device):
        raise RuntimeError(f"mini_deepinfer: {reason}. The plain PyTorch ops run with MDI_OPS=reference (slow).")


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value)


def call(op: str, impl: str, *args: Any) -> None:
    """Launch the compiled implementation `impl` of `op`; honours MDI_LOG_OPS and MDI_SYNC."""
    environment = _fixed.get() or _Environment()
    if environment.log_ops:
        log.warning("%s (%s): %s", op, impl, ", ".join(_describe(arg) for arg in args))
    getattr(torch.ops.mini_deepinfer, library_name(op, impl)).default(*args)  # there are no overloads to choose from
    if environment.sync:
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            raise RuntimeError(f"{op} ({impl}) failed on the GPU: {error}") from error
