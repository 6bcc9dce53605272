"""The engram sublayer: hashed n-gram rows, projected and gated into every stream (model spec 7.4)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from mini_deepinfer.config import LayerPlan, ModelConfig, NumericProfile
from mini_deepinfer.ops import elementwise
from mini_deepinfer.ops.linear import Activation, Fp8Weight, fp8_linear
from mini_deepinfer.weights import EngramTable, Weights


class RowFetch:
    """Table rows of one step and one engram layer, on their way from the host to the device.

    On a GPU a thread gathers the rows into pinned memory and a side stream copies them, while earlier layers or the step before
    run; `wait` makes the current stream wait for the copy. On the CPU the rows are gathered when they are asked for.
    """

    _executor: ThreadPoolExecutor | None = None
    _streams: dict[torch.device, torch.cuda.Stream] = {}

    def __init__(self, table: EngramTable, row_ids: torch.Tensor, device: torch.device) -> None:
        self._table, self._row_ids, self._device = table, row_ids, device
        self._future: Future | None = None
        if device.type == "cuda":
            if RowFetch._executor is None:
                RowFetch._executor = ThreadPoolExecutor(1, thread_name_prefix="engram")
            if device not in RowFetch._streams:
                RowFetch._streams[device] = torch.cuda.Stream(device)
            self._future = RowFetch._executor.submit(self._copy)

    def _copy(self) -> tuple[torch.Tensor, torch.Tensor, torch.cuda.Event]:
        stream = RowFetch._streams[self._device]
        host = self._table.gather(self._row_ids.flatten())
        with torch.cuda.stream(stream):
            codes, scale = (part.pin_memory().to(self._device, non_blocking=True) for part in host)
            event = torch.cuda.Event()
            event.record(stream)
        return codes, scale, event

    def wait(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes uint8 [T, rows * head_dim] and E8M0 bytes [T, rows * head_dim / 32] on the device."""
        if self._future is None:
            codes, scale = self._table.gather(self._row_ids.flatten())
        else:
            codes, scale, event = self._future.result()
            current = torch.cuda.current_stream(self._device)
            current.wait_event(event)
            codes.record_stream(current)
            scale.record_stream(current)
        tokens, rows = self._row_ids.shape
        return codes.view(tokens, rows * codes.shape[1]), scale.view(tokens, rows * scale.shape[1])


class FixedRows(RowFetch):
    """Rows of up to `size` tokens in buffers that stay where they are, for steps that replay graphs: `fill` before each use.

    before_use is called when a layer asks for the rows, while the step is being captured: the graph that uses them begins there.
    """

    before_use: Callable[[], None] | None = None

    def __init__(self, table: EngramTable, rows_per_token: int, size: int, device: torch.device) -> None:
        self._table = table
        probe = table.gather(torch.zeros(0, dtype=torch.int64))  # for the row sizes
        self._codes, self._scale = (
            torch.zeros(size, rows_per_token * part.shape[1], dtype=torch.uint8, device=device) for part in probe
        )

    def fill(self, row_ids: torch.Tensor) -> None:
        """Rows of the first tokens: row_ids CPU int64 [T, rows per token]. Enqueues the copies on the current stream."""
        for target, part in zip((self._codes, self._scale), self._table.gather(row_ids.flatten())):
            staging = torch.empty(row_ids.shape[0], target.shape[1], dtype=torch.uint8, pin_memory=target.is_cuda)
            staging.numpy()[...] = part.numpy().reshape(staging.shape)  # a few KB: not worth the library's threads
            target[: len(staging)].copy_(staging, non_blocking=True)

    def wait(self) -> tuple[torch.Tensor, torch.Tensor]:
        """As RowFetch.wait: all rows of the buffers."""
        if self.before_use is not None:
            self.before_use()
        return self._codes, self._scale


class Engram:
    """Looks up this layer's table rows of every token and adds their gated projection to the streams."""

    def __init__(self, config: ModelConfig, profile: NumericProfile, plan: LayerPlan, weights: Weights) -> None:
        self.config, self.profile = config, profile
        self.index = plan.engram if plan.engram is not None else 0
        name = f"layers.{plan.index}.engram"
        self.table = weights.engram[plan.index]
        self.wkv = Fp8Weight(weights.tensors[f"{name}.wkv.weight"], weights.tensors[f"{name}.wkv.scale"], f"{name}.wkv")
        self.q_weight, self.k_weight = weights.tensors[f"{name}.q_weight"], weights.tensors[f"{name}.k_weight"]

    def prefetch(self, row_ids: tuple[torch.Tensor | RowFetch, ...], device: torch.device) -> RowFetch:
        """Start fetching this layer's rows, unless that was done: row_ids of the batch, CPU int64 [T, rows] per engram layer."""
        rows = row_ids[self.index]
        return rows if isinstance(rows, RowFetch) else RowFetch(self.table, rows, device)

    def __call__(self, streams: torch.Tensor, fetch: RowFetch) -> torch.Tensor:
        """streams [T, n, N] to new streams."""
        rows = elementwise.expand_fp8(*fetch.wait()).to(streams.dtype)
        z = fp8_linear(Activation(rows, self.profile), self.wkv)
        return elementwise.engram_gate(streams, z, self.q_weight, self.k_weight, self.config.rms_norm_eps)
