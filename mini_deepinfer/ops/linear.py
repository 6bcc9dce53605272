"""Dense projections: FP8 weights with 32x32 power-of-two scales, and plain bfloat16 weights (model spec 2.1, 4.1, 8).

On the CPU the operands are dequantised exactly and their products summed in float64. On a GPU an FP8 projection is one product (`fp8`) of
operands whose power-of-two scales are folded into the E4M3 exponents, which leaves one power-of-two scale per row (docs/numerics.md,
"Scale folding"). Values above rowmax / 28,500 stay exact, smaller ones are rounded at rowmax x 2.2e-6. A weight with a row in which that
rounding is more than `FOLD_ERROR` of the row's norm is multiplied as bfloat16.

A GPU library may choose another kernel for another number of rows, so a row's bits may depend on its batch there. With
`NumericProfile.batch_invariant` every library call has `INVARIANT_ROWS` rows (the last one padded), as the CPU path always does; in our
FP8 kernel they never depend on it, so it then runs for any number of rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import torch

from mini_deepinfer.config import NumericProfile
from mini_deepinfer.ops import elementwise, reference
from mini_deepinfer.ops._dispatch import call, register_self_test, select
from mini_deepinfer.ops._operands import check_operand
from mini_deepinfer.ops.reference import number_formats
from mini_deepinfer.ops.reference.decoded import decoded
from mini_deepinfer.ops.reference.linear import dequant_block32

logger = logging.getLogger(__name__)

INVARIANT_ROWS = 256  # rows of every library call in batch-invariant mode
LIBRARY_ROWS = 384  # up to so many the library's FP8 product of one group is on the whole the faster one (our tiles have 256 rows)
FOLD_ERROR = 2.0**-12  # accepted relative error of a folded weight row; rounding an output to bfloat16 makes 2^-9.2
_SMALLEST_AMAX = 2.0**-100  # a row of zeros still gets a finite scale
_FOLD_ROWS = 2048  # rows folded at a time: bounds the float32 scratch


class Activation:
    """The input of one or several FP8 projections, quantised once, in the forms its consumers ask for.

    x [T, K] in the compute dtype; quantised 1x32 unless the profile says otherwise (then the products use x itself). A kernel that
    quantises may leave x unwritten where nobody reads it.
    """

    def __init__(self, x: torch.Tensor, profile: NumericProfile, *, quantise: bool | None = None) -> None:
        self._x: torch.Tensor | None = x
        self.shape, self.dtype, self.device = x.shape, x.dtype, x.device
        self.quantise = profile.activation_quant if quantise is None else quantise
        self.batch_invariant = profile.batch_invariant
        self._groups: tuple[torch.Tensor, torch.Tensor] | None = None
        self._folded: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def normed(cls, x: torch.Tensor, weight: torch.Tensor, eps: float, profile: NumericProfile, *, folded: bool) -> Activation:
        """RMSNorm of x [T, N], quantised in the same pass. folded: which form the first consumer wants on a GPU."""
        if not profile.activation_quant:
            return cls(elementwise.rmsnorm(x, weight, eps), profile)
        folded = folded and cls.folds(x)
        return cls.quantised(*elementwise.rmsnorm_quant(x, weight, eps, folded=folded), profile, folded=folded)

    @classmethod
    def quantised(
        cls, x: torch.Tensor | None, codes: torch.Tensor, scale: torch.Tensor, profile: NumericProfile, *, folded: bool
    ) -> Activation:
        """From a kernel that has quantised x [T, N] already: scale is [T] float32 if folded, else [T, N/32] E8M0 bytes.

        x None: it was not written, and only this quantised form is there.
        """
        act = cls(codes if x is None else x, profile)
        if x is None:
            act._x, act.dtype = None, profile.compute_dtype
        if folded:
            act._folded = (codes, scale)
        else:
            act._groups = (codes, scale)
        return act

    @property
    def x(self) -> torch.Tensor:
        """The values before they were quantised."""
        if self._x is None:
            raise RuntimeError("activation: x was not written by the kernel that quantised it; ask that kernel to keep it")
        return self._x

    @staticmethod
    def folds(x: torch.Tensor | Activation) -> bool:
        """Whether products of x run on row-scaled operands."""
        return x.device.type == "cuda" and x.dtype == torch.bfloat16

    def groups(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """E4M3 codes [T, K] and one E8M0 byte per 32 columns [T, K/32]; (x, None) when activations are not quantised."""
        return self._quantised() if self.quantise else (self.x, None)

    def _quantised(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._groups is None:
            self._groups = elementwise.act_quant(self.x)
        return self._groups

    def folded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """E4M3 codes [T, K] and one power-of-two scale per row [T] float32."""
        if self._folded is None:
            self._folded = elementwise.fold_scales(*self._groups) if self._groups else elementwise.act_quant_folded(self.x)
        return self._folded

    def values(self) -> torch.Tensor:
        """The values the product sees, exact in float32 [T, K]."""
        if not self.quantise:
            return self.x.to(torch.float32)
        return number_formats.dequant_fp8_ue8m0(*self._quantised())


class Fp8Weight:
    """One FP8 projection: codes [O, K] float8_e4m3fn with scale [ceil(O/32), ceil(K/32)] E8M0 bytes."""

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, name: str) -> None:
        self.name = name
        self.shape = codes.shape
        self.device = codes.device
        self.folded: tuple[torch.Tensor, torch.Tensor] | None = None
        if codes.device.type == "cuda":
            self.folded = _fold_weight(codes, scale)
            if self.folded is None:
                logger.warning("%s: scales spread too far to fold into E4M3; multiplied as exact bfloat16 values", name)
        if self.folded is None:
            self.codes, self.scale = codes, scale

    @classmethod
    def stack(cls, parts: list[tuple[torch.Tensor, torch.Tensor]], name: str) -> Fp8Weight:
        """Projections of one input stacked along the output: every part's rows are a multiple of 32."""
        codes = torch.cat([codes.view(torch.uint8) for codes, _ in parts]).view(torch.float8_e4m3fn)
        return cls(codes, torch.cat([scale for _, scale in parts]), name)

    def values(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Dequantised [O, K], exact in float32 and bfloat16."""
        if self.folded is not None:
            codes, row_scale = self.folded
            return (codes.to(torch.float32) * row_scale[:, None]).to(dtype)  # what the GPU multiplies
        return decoded(self.codes, self.scale, self.codes.numel(), dequant_block32).to(dtype)


def _fold_weight(codes: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """E4M3 codes [O, K] and one power-of-two scale per row [O], or None where a row would lose more than FOLD_ERROR."""
    folded, row_scales = [], []
    for start in range(0, codes.shape[0], _FOLD_ROWS):
        part = codes[start : start + _FOLD_ROWS]
        values = dequant_block32(part, scale[start // 32 : (start + part.shape[0] + 31) // 32])
        _, row_scale = number_formats.ceilpow2_scale(values.abs().amax(1), 1.0 / number_formats.FP8_MAX, _SMALLEST_AMAX)
        new = number_formats.encode_e4m3(values / row_scale[:, None])
        error = (new.to(torch.float32) * row_scale[:, None] - values).norm(dim=1)
        if bool((error > FOLD_ERROR * values.norm(dim=1)).any()):
            return None
        folded.append(new.view(torch.uint8))
        row_scales.append(row_scale)
    return torch.cat(folded).view(torch.float8_e4m3fn), torch.cat(row_scales)


def fp8_linear(act: Activation, weight: Fp8Weight) -> torch.Tensor:
    """x [T, K] times an FP8 weight [O, K]: [T, O] in the dtype of x, float32 accumulation, one rounding (model spec 4.1)."""
    if act.shape[1] != weight.shape[1]:
        raise ValueError(f"{weight.name}: input must be [T, K={weight.shape[1]}], got {list(act.shape)}")
    if act.shape[0] == 0:
        return torch.empty(0, weight.shape[0], dtype=act.dtype, device=act.device)
    if act.quantise and weight.folded is not None and Activation.folds(act):
        codes, row_scale = act.folded()
        return fp8(codes[:, None], row_scale[:, None], *weight.folded, batch_invariant=act.batch_invariant)
    if act.device.type == "cpu" or act.dtype == torch.float32:
        return reference.linear.matmul(act.values(), weight.values()).to(act.dtype)
    weight_t = weight.values(act.dtype).t()
    return _by_rows(lambda rows: rows @ weight_t, act.batch_invariant, act.values().to(act.dtype))


def fp8_grouped_linear(
    codes: torch.Tensor, scale: torch.Tensor, weight: Fp8Weight, dtype: torch.dtype, profile: NumericProfile
) -> torch.Tensor:
    """Quantised rows of g groups times the O/g rows of an FP8 weight that belong to each: [T, O], rounded as `fp8_linear` (spec 4.7).

    codes [T, g, K] float8_e4m3fn; scale [T, g] float32 if the weight is folded, else [T, g, K/32] E8M0 bytes.
    """
    if scale.dtype == torch.float32 and weight.folded is not None:
        return fp8(codes, scale, *weight.folded, batch_invariant=profile.batch_invariant)
    wide = torch.float32 if codes.device.type == "cpu" else dtype
    values = number_formats.dequant_fp8_ue8m0(codes, scale).to(wide)
    weights = weight.values(wide).unflatten(0, (codes.shape[1], -1))
    return grouped_linear(values, weights, profile).flatten(1).to(dtype)


def fp8(
    codes: torch.Tensor,
    row_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    *,
    batch_invariant: bool = False,
    impl: str | None = None,
) -> torch.Tensor:
    """Product of row-scaled FP8 operands, group by group, float32 sums at least every 128 of K (model spec 4.1, 4.7).

    Shapes: T rows, g groups, K columns of a group, O outputs, O / g of each group.
        codes         [T, g, K]  float8_e4m3fn, contiguous
        row_scale     [T, g]     float32, contiguous
        weight        [O, K]     float8_e4m3fn, contiguous
        weight_scale  [O]        float32, contiguous, powers of two
        batch_invariant          a row's bits must not depend on T
    Returns:
        [T, O] bfloat16, rounded once
    Raises:
        TypeError, ValueError  wrong dtype; wrong shape or device
        RuntimeError           not contiguous or aligned, or past the limits of an implementation that was asked for by name
    Deterministic. Synchronises: no. Workspace: none (library with several groups: a copy of codes and of the result). NaN stays in its row
    or column.
    Kernel: csrc/linear/fp8_sm90.cu (K a multiple of 16, O of 8, of several groups O / g of 64), a row's bits never depend on T;
    "library": torch._scaled_mm with slow accumulation, wherever there is no Hopper kernel or it does not take the shape, and unless
    `batch_invariant` for up to LIBRARY_ROWS rows of one group. Reference: ops.reference.linear.fp8.
    """
    op = "linear.fp8"
    check_operand(op, "codes", codes, (torch.float8_e4m3fn,), {"T": None, "g": None, "K": None})
    tokens, groups, k = codes.shape
    check_operand(op, "row_scale", row_scale, (torch.float32,), {"T": tokens, "g": groups}, codes)
    check_operand(op, "weight", weight, (torch.float8_e4m3fn,), {"O": None, "K": k}, codes)
    columns = weight.shape[0]
    check_operand(op, "weight_scale", weight_scale, (torch.float32,), {"O": columns}, codes)
    if groups == 0 or columns % groups:
        raise ValueError(f"{op}: weight must have as many rows for each of the g={groups} groups of codes, got O={columns}")
    chosen = select(op, codes, impl=impl)
    if chosen == "reference":
        return reference.linear.fp8(codes, row_scale, weight, weight_scale)
    takes = k % 16 == 0 and columns % (8 if groups == 1 else 64 * groups) == 0
    wins = groups > 1 or tokens > LIBRARY_ROWS
    if impl is None and chosen == "sm90" and not (takes and (wins or batch_invariant)):
        chosen = "library"
    if chosen == "sm90" or tokens == 0:
        out = codes.new_empty(tokens, columns, dtype=torch.bfloat16)
        if tokens:
            call(op, chosen, codes, row_scale, weight, weight_scale, out)
        return out
    if groups == 1:
        return _by_rows(partial(_scaled_product, weight, weight_scale), batch_invariant, codes[:, 0], row_scale[:, 0])
    # group by group: the library takes rows that lie apart only for some numbers of them, and scales only from a multiple of 16 bytes
    operands = zip(weight.chunk(groups), weight_scale.chunk(groups), codes.transpose(0, 1).contiguous(), row_scale.unbind(1))
    return torch.cat([_by_rows(partial(_scaled_product, w, s), batch_invariant, x, rows.clone()) for w, s, x, rows in operands], dim=1)


def _scaled_product(
    weight: torch.Tensor, weight_scale: torch.Tensor, codes: torch.Tensor, row_scale: torch.Tensor
) -> torch.Tensor:
    """Row-scaled FP8 operands [O, K] and [T, K] on a GPU: [T, O] bfloat16. Slow accumulation: the sums are promoted."""
    return torch._scaled_mm(
        codes,
        weight.t(),
        scale_a=row_scale[:, None],
        scale_b=weight_scale[None],
        out_dtype=torch.bfloat16,
        use_fast_accum=False,
    )


def _by_rows(product: Callable[..., torch.Tensor], batch_invariant: bool, *operands: torch.Tensor) -> torch.Tensor:
    """product(*operands) over their rows: one call, or calls of exactly INVARIANT_ROWS rows."""
    if not batch_invariant:
        return product(*operands)
    parts = []
    for start in range(0, operands[0].shape[0], INVARIANT_ROWS):
        block = [operand[start : start + INVARIANT_ROWS] for operand in operands]
        rows = block[0].shape[0]
        if rows < INVARIANT_ROWS:
            block = [torch.cat((part, part[:1].expand(INVARIANT_ROWS - rows, *part.shape[1:]))) for part in block]
        parts.append(product(*block)[:rows])
    return torch.cat(parts)  # a copy without the padding, which would stay alive behind a view


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, profile: NumericProfile) -> torch.Tensor:
    """x [T, g, K] times a weight [g, O, K] group by group: [T, g, O], rounded as `linear` does (model spec 4.7)."""
    out = x.new_empty(*x.shape[:2], weight.shape[1])
    if x.device.type == "cuda" and x.dtype == weight.dtype and x.shape[0] and not profile.batch_invariant:
        torch.bmm(x.transpose(0, 1), weight.transpose(1, 2), out=out.transpose(0, 1))
    else:
        for g in range(x.shape[1]):
            out[:, g] = linear(x[:, g], weight[g], profile)
    return out


def linear(
    x: torch.Tensor, weight: torch.Tensor, profile: NumericProfile, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """x [T, K] times a bfloat16 or float32 weight [O, K], float32 accumulation, one rounding to out_dtype (default: that of x).

    float32 output from bfloat16 operands is exact up to the order of the sums.
    """
    out_dtype = x.dtype if out_dtype is None else out_dtype
    if x.device.type == "cpu" or x.dtype == torch.float32:
        return reference.linear.matmul(x, weight).to(out_dtype)
    if x.shape[0] == 0:
        return x.new_empty(0, weight.shape[0], dtype=out_dtype)
    weight_t = weight.t()
    if out_dtype == x.dtype:
        return _by_rows(lambda rows: rows @ weight_t, profile.batch_invariant, x)
    return _by_rows(lambda rows: torch.mm(rows, weight_t, out_dtype=out_dtype), profile.batch_invariant, x)


def _self_test_inputs(device: torch.device) -> dict[str, torch.Tensor]:
    """Two groups; the tokens are no multiple of a tile, nor is K of a stage."""
    g = torch.Generator().manual_seed(0)
    operands = {
        "codes": (8 * torch.randn(70, 2, 336, generator=g)).to(torch.float8_e4m3fn),
        "row_scale": torch.exp2(torch.randint(-6, 6, (70, 2), generator=g).float()),
        "weight": (8 * torch.randn(640, 336, generator=g)).to(torch.float8_e4m3fn),
        "weight_scale": torch.exp2(torch.randint(-6, 6, (640,), generator=g).float()),
    }
    return {name: tensor.to(device) for name, tensor in operands.items()}


register_self_test("linear.fp8", _self_test_inputs, lambda inputs, impl: fp8(**inputs, impl=impl), bound=2.0**-8)
