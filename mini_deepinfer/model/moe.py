"""The mixture-of-experts sublayer: router, routed experts over the expert-parallel ranks, shared expert (model spec 6)."""

from __future__ import annotations

import logging

import torch

from mini_deepinfer.config import LayerPlan, ModelConfig, NumericProfile
from mini_deepinfer.model.step import Step
from mini_deepinfer.ops import moe
from mini_deepinfer.ops.linear import Activation, Fp8Weight, fp8_linear
from mini_deepinfer.ops.packed_weight import BINADES, PackedWeight, pack_weight
from mini_deepinfer.parallel import ExpertParallel
from mini_deepinfer.stages import stage
from mini_deepinfer.tensor_table import expert_range
from mini_deepinfer.weights import Weights

logger = logging.getLogger(__name__)


class Gate:
    """Chooses `num_experts_per_tok` experts for every token, in float32 (model spec 6.1)."""

    def __init__(self, config: ModelConfig, name: str, weights: Weights) -> None:
        self.config = config
        self.weight = weights.tensors[f"{name}.weight"]
        self.bias = weights.tensors[f"{name}.bias"]

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, N] to expert ids [T, k] int32 ascending and weights [T, k] float32."""
        return moe.route(x, self.weight, self.bias, self.config.num_experts_per_tok, self.config.routed_scaling_factor)


class MoE:
    """Routed experts of this rank for the tokens of all ranks, and the shared expert for this rank's tokens."""

    def __init__(self, config: ModelConfig, profile: NumericProfile, plan: LayerPlan, weights: Weights, parallel: ExpertParallel) -> None:
        self.config, self.profile, self.parallel, self.index = config, profile, parallel, plan.index
        name = f"layers.{plan.index}.ffn"
        tensors = weights.tensors
        self.gate = Gate(config, f"{name}.gate", weights)
        self.w13, self.w13_scale = self._expert_weight(tensors, f"{name}.experts.w13")
        self.w2, self.w2_scale = self._expert_weight(tensors, f"{name}.experts.w2")
        self.experts = expert_range(config.n_routed_experts, parallel.world, parallel.rank)
        # The ranks must agree on the form in which tokens travel: on a GPU folded, with one scale per row, where all of them want it.
        on_gpu = profile.activation_quant and self.gate.weight.device.type == "cuda"
        self._all_fold = on_gpu and parallel.all_agree(self._takes_folded_rows())

        def fp8(part: str) -> tuple[torch.Tensor, torch.Tensor]:
            return tensors[f"{name}.shared_experts.{part}.weight"], tensors[f"{name}.shared_experts.{part}.scale"]

        self.shared_w13 = Fp8Weight.stack([fp8("w1"), fp8("w3")], f"{name}.shared_experts.w1|w3")
        self.shared_w2 = Fp8Weight(*fp8("w2"), f"{name}.shared_experts.w2")

    def _expert_weight(self, tensors: dict[str, torch.Tensor], name: str) -> tuple[torch.Tensor | PackedWeight, torch.Tensor | None]:
        """A weight and its scale as stored; where the product reads it packed, so. It then leaves `tensors`: packing takes its memory."""
        if name not in tensors:
            raise ValueError(f"{name}: a Model has packed these weights in their own memory; a second Model needs weights of its own")
        weight, scale = tensors[name], tensors[f"{name}_scale"]
        if not self.profile.activation_quant or not moe.takes_packed_weights(weight, self.profile.compute_dtype):
            return weight, scale
        packed = pack_weight(weight, scale, in_place=True)
        if packed is None:
            logger.warning("%s: scales spread over more than %d binades in a row; kept as stored for the portable product", name, BINADES)
            return weight, scale
        del tensors[name], tensors[f"{name}_scale"]
        return packed, None

    def _takes_folded_rows(self) -> bool:
        return moe.takes_folded_rows(self.w13, self.profile.compute_dtype)

    @property
    def folded(self) -> bool:
        """Whether the input travels with one scale per row (docs/numerics.md); MDI_OPS may choose another product at any time."""
        return self._all_fold and self._takes_folded_rows()

    def __call__(self, act: Activation, step: Step) -> torch.Tensor:
        """The normed input [T, N] to [T, N]."""
        x, counts = act.x, step.counts
        codes, scale = act.folded() if self.folded else act.groups()
        rows_sent = self.parallel.start_all_gather([codes] if scale is None else [codes, scale], counts)  # beside the router
        with stage("moe.route"):
            ids, weights = self.gate(x)
        step.record("router_ids", self.index, ids)
        step.record("router_weights", self.index, weights)
        routes_sent = self.parallel.start_gather_routes(ids, weights, counts)
        with stage("moe.dispatch"):
            codes, *scales = rows_sent.wait()
            ids, weights = routes_sent.wait()
            if step.batch.padding is not None:  # no expert for rows without a token; all ranks have this one's number of rows
                ids.unflatten(0, (-1, x.shape[0])).masked_fill_(step.batch.padding, -1)
            rows = moe.dispatch(ids, weights, self.experts.start, len(self.experts))
        with stage("moe.experts"):
            y = self._experts(codes, scales[0] if scales else None, rows)
        if self.parallel.world == 1:
            shared = self._shared(act)
            with stage("moe.combine"):
                return moe.combine(y, rows[0], shared, x.dtype)
        return self._combine_ranks(y, rows[0], rows[1], act, step)

    def _experts(self, codes: torch.Tensor, scale: torch.Tensor | None, rows: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """The routed rows (moe.dispatch) through their experts: [T*k, N], rows at or past offsets[-1] unspecified."""
        row_of_slot, _, offsets, token_of_row, row_weight = rows
        operands = (codes, scale, self.w13, self.w13_scale, self.w2, self.w2_scale, offsets, token_of_row, row_weight)
        return moe.experts(*operands, self.config.swiglu_limit, row_of_slot=row_of_slot, out_dtype=self.profile.compute_dtype)

    def _shared(self, act: Activation) -> torch.Tensor:
        with stage("moe.shared"):
            gate_up = fp8_linear(act, self.shared_w13)
            limit = self.config.swiglu_limit
            if act.quantise and Activation.folds(gate_up) and self.shared_w2.folded is not None:
                hidden = Activation.quantised(None, *moe.swiglu_quant_folded(gate_up, limit), self.profile, folded=True)
            else:
                hidden = Activation(moe.swiglu(gate_up, None, limit), self.profile)
            return fp8_linear(hidden, self.shared_w2)

    def _combine_ranks(
        self, y: torch.Tensor, row_of_slot: torch.Tensor, slot_of_row: torch.Tensor, act: Activation, step: Step
    ) -> torch.Tensor:
        """Bring every token's expert outputs home, beside the shared expert.

        On the CPU each routed slot travels by itself: exactly one rank adds a value to it, so the sum over ranks is exact and the
        result has the bits of a single process. On GPUs each rank sums its own slots, rounds to the compute dtype and sends what is the
        others'; all sums are added in rank order, so the result is repeatable but depends on the partition (model spec 6.2). The sums of
        a rank's own tokens are made where they are used, after those that others wait for.
        """
        (tokens, k), counts, dtype = row_of_slot.shape, step.counts, act.x.dtype
        if y.device.type != "cpu":
            first = sum(counts[: step.rank])
            before, own, after = row_of_slot.split([first, counts[step.rank], tokens - first - counts[step.rank]])
            with stage("moe.combine"):
                others = torch.cat((before, after)) if len(before) and len(after) else after if len(after) else before
                partial = moe.combine(y, others, None, dtype)
            sums_sent = self.parallel.start_scatter(partial, counts)
            shared = self._shared(act)
            with stage("moe.combine"):
                return moe.combine_parts(y, own, sums_sent.wait(), step.rank, shared)
        shared = self._shared(act)
        with stage("moe.combine"):
            slots = torch.zeros(tokens * k, y.shape[1], dtype=y.dtype)
            local = (slot_of_row >= 0).nonzero().squeeze(1)
            slots[slot_of_row[local].long()] = y[local]
            own = self.parallel.reduce_scatter(slots.view(tokens, k, y.shape[1]), counts)
            order = torch.arange(own.shape[0] * k, dtype=torch.int32).view(-1, k)
            return moe.combine(own.flatten(0, 1), order, shared, dtype)
