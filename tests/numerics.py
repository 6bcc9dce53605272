"""How test outputs are compared: one report, one table of bounds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Bound:
    """An element passes when |out - ref| <= relative * |ref| + absolute * rms(ref); cosine is 1 - cos(out, ref)."""

    cosine: float
    relative: float
    absolute: float


# Per output dtype, against a float32 reference of the same quantised inputs. Never loosened in place: an op that needs
# another bound names it here with its reason.
BOUNDS: dict[torch.dtype | str, Bound] = {
    torch.float32: Bound(cosine=1e-10, relative=1e-5, absolute=1e-5),
    torch.bfloat16: Bound(cosine=1e-5, relative=2**-7, absolute=2**-7),  # one rounding is 2^-9; sums reorder
}


def _at(flat: int, shape: torch.Size) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), shape))


@dataclass(frozen=True)
class Difference:
    """What compare() measured; str() is the report."""

    what: str
    count: int
    cosine: float
    max_abs: float
    max_abs_at: str
    max_rel: float
    max_rel_at: str
    num_over: int
    mask_note: str

    def __str__(self) -> str:
        return (
            f"{self.what}: {self.count} values, 1 - cosine {self.cosine:.3g}, "
            f"max abs {self.max_abs:.4g} {self.max_abs_at}, max rel {self.max_rel:.4g} {self.max_rel_at}, "
            f"{self.num_over} over the bound{self.mask_note}"
        )


def measure(out: Tensor, ref: Tensor, bound: Bound, what: str = "output") -> Difference:
    """Compare without raising. Shapes must agree; NaN and Inf must be in the same places (Inf with the same sign)."""
    if out.shape != ref.shape:
        raise AssertionError(f"{what}: shape {list(out.shape)}, reference {list(ref.shape)}")
    o, r = out.detach().double().cpu(), ref.detach().double().cpu()
    finite = r.isfinite() & o.isfinite()
    wrong_mask = (o.isnan() != r.isnan()) | (o.isinf() != r.isinf()) | (r.isinf() & o.isinf() & (o != r))
    note = ""
    if wrong_mask.any():
        first = int(wrong_mask.flatten().nonzero()[0])
        at = _at(first, r.shape)
        note = f"; NaN/Inf masks differ at {int(wrong_mask.sum())} places, first {at}: {o[at]} against {r[at]}"
    if not finite.any():
        return Difference(what, out.numel(), 0.0, 0.0, "", 0.0, "", int(wrong_mask.sum()), note)
    zero = torch.zeros((), dtype=torch.float64)
    o, r = torch.where(finite, o, zero), torch.where(finite, r, zero)
    error = (o - r).abs()
    rms = float(r.pow(2).sum().div(finite.sum()).sqrt())
    relative = error / r.abs().clamp(min=max(rms * 1e-3, 1e-300))
    norms = float(o.norm() * r.norm())
    cosine = 1.0 - float((o * r).sum()) / norms if norms > 0 else float((o - r).norm() > 0)

    def at(values: Tensor) -> str:
        where = _at(int(values.argmax()), r.shape)
        return f"at {where} ({o[where]:.6g} against {r[where]:.6g})"

    over = int((error > bound.relative * r.abs() + bound.absolute * rms).sum()) + int(wrong_mask.sum())
    return Difference(what, out.numel(), cosine, float(error.max()), at(error), float(relative.max()), at(relative), over, note)


def compare(out: Tensor, ref: Tensor, bound: Bound | str | None = None, what: str = "output") -> Difference:
    """Raise AssertionError with the full report unless `out` is within its bound of `ref`.

    bound: a Bound, a name in BOUNDS, or None for the row of out's dtype. Integer and byte outputs must be equal.
    """
    if not out.dtype.is_floating_point:
        if out.shape != ref.shape:
            raise AssertionError(f"{what}: shape {list(out.shape)}, reference {list(ref.shape)}")
        wrong = out.cpu() != ref.cpu()
        if wrong.any():
            at = _at(int(wrong.flatten().nonzero()[0]), out.shape)
            raise AssertionError(
                f"{what}: {int(wrong.sum())} of {out.numel()} integers differ, first at {at}: "
                f"{out.cpu()[at].item()} against {ref.cpu()[at].item()}"
            )
        return Difference(what, out.numel(), 0.0, 0.0, "", 0.0, "", 0, "")
    if bound is None:
        bound = BOUNDS[out.dtype]
    elif isinstance(bound, str):
        bound = BOUNDS[bound]
    difference = measure(out, ref, bound, what)
    if difference.num_over or difference.cosine > bound.cosine + 1e-15:
        raise AssertionError(str(difference))
    return difference


def assert_bitwise(out: Tensor, ref: Tensor, what: str = "output") -> None:
    """Equal bit for bit, except that any NaN equals any NaN."""
    if out.shape != ref.shape or out.dtype != ref.dtype:
        raise AssertionError(f"{what}: {out.dtype} {list(out.shape)}, reference {ref.dtype} {list(ref.shape)}")
    views = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    o, r = out.detach().cpu().contiguous(), ref.detach().cpu().contiguous()
    same = o.view(views[o.element_size()]) == r.view(views[r.element_size()])
    if o.dtype.is_floating_point:
        same |= o.float().isnan() & r.float().isnan()
    if not same.all():
        at = _at(int((~same).flatten().nonzero()[0]), o.shape)
        raise AssertionError(
            f"{what}: {int((~same).sum())} of {o.numel()} values differ in bits, first at {at}: "
            f"{o[at].float().item()} against {r[at].float().item()}"
        )


def compare_codes(codes: Tensor, ref: Tensor, steps: int = 1, share: float = 0.01, what: str = "codes") -> None:
    """Sign-magnitude codes (E4M3 bytes, or E2M1 codes 0..15) within `steps` of the reference, rarely, and without bias.

    At most `share` of the codes may differ, and among many that do, up and down must be about as frequent.
    """
    sign = 0x80 if int(ref.view(torch.uint8).max()) > 15 or ref.dtype != torch.uint8 else 0x8

    def ordered(x: Tensor) -> Tensor:
        x = x.view(torch.uint8).cpu().int()
        return torch.where(x & sign != 0, -(x & (sign - 1)), x & (sign - 1))

    step = ordered(codes) - ordered(ref)
    moved = int((step != 0).sum())
    if int(step.abs().max()) > steps or moved > share * step.numel() + 1:
        at = _at(int(step.abs().argmax()), step.shape)
        raise AssertionError(f"{what}: {moved} of {step.numel()} differ, by up to {int(step.abs().max())} steps at {at}")
    up = int((step > 0).sum())
    if moved >= 100 and abs(2 * up - moved) > 5 * moved**0.5:
        raise AssertionError(f"{what}: biased rounding: {up} of {moved} differences go up")
