"""Decode steps as CUDA graphs: a few launches instead of about forty per layer.

A graph repeats fixed work on fixed addresses, so a step is padded to one of a few shapes: (size, longest), at most `size` requests
of at most `longest` tokens. Its inputs are the tensors of a `FixedBatch` and of `FixedRows` (engram), filled before every replay; rows
without a token write to no cache row of anybody and get no expert. What depends on the host's view of the step, the width of the
score table and of the page table, is taken at its largest for the shape; entries past a token's own visible count are masked anyway.

The first step of a shape runs eagerly over the padded batch, then the shape is captured; its later steps are replays. A step is cut
where a layer uses engram rows, so that the host looks them up while the GPU works on the layers before. All graphs share one memory
pool: a step's logits are valid until the next step. With batch-invariant GEMMs a step has the bits of the same step without graphs;
otherwise the library may choose another kernel for the padded number of rows.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from .batch import ChunkRequest, FixedBatch, engram_rows
from .decode_shapes import lengths_up_to, sizes_up_to
from .model.engram import FixedRows
from .stages import recording

if TYPE_CHECKING:
    from .engram import EngramHasher
    from .model import Model

logger = logging.getLogger(__name__)


@dataclass
class Shape:
    """Inputs of one captured shape, and its graphs once there are some. logits float32 [size, V], overwritten by every step."""

    batch: FixedBatch
    rows: tuple[FixedRows, ...]  # per engram layer
    graphs: list[torch.cuda.CUDAGraph] = field(default_factory=list)  # graphs[i + 1] begins where rows[i] are used
    logits: torch.Tensor | None = None


class DecodeGraphs:
    """The captured decode steps of one model.

    max_seqs and max_len bound what is captured. capture=False runs the padded steps eagerly: the same work without graphs, for tests.
    """

    def __init__(
        self, model: Model, hasher: EngramHasher | None, *, max_seqs: int, max_len: int, capture: bool = True
    ) -> None:
        self.model, self.hasher, self.capture = model, hasher, capture
        self.sizes = sizes_up_to(min(max_seqs, model.caches.geometry.max_tokens))
        self.lengths = lengths_up_to(max_len)
        self.num_replays = 0
        self.failed = False  # a capture failed: nothing fits any more
        self._shapes: dict[tuple[int, int], Shape] = {}
        self._pool = torch.cuda.graph_pool_handle() if capture else None

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(size, longest) of what has run so far."""
        return sorted(self._shapes)

    def fits(self, requests: Sequence[ChunkRequest]) -> bool:
        """Whether this step has a shape: one token and one row of logits per request, and no stage timer that wants to look inside."""
        return (
            not self.failed
            and 0 < len(requests) <= self.sizes[-1]
            and all(request.end - request.start == 1 and request.want_logits == "last" for request in requests)
            and max(request.end for request in requests) <= self.lengths[-1]
            and not recording()
        )

    @torch.inference_mode()
    def forward(self, requests: Sequence[ChunkRequest]) -> torch.Tensor:
        """Logits float32 [len(requests), V] of a step that fits, in the order of the requests; valid until the next step."""
        size = next(size for size in self.sizes if size >= len(requests))
        longest = next(length for length in self.lengths if length >= max(request.end for request in requests))
        shape = self._shapes.get((size, longest))
        if shape is None:
            shape = self._shapes[size, longest] = self._make(size, longest)
        shape.batch.fill(requests)
        if shape.logits is not None:
            self._replay(shape, requests)
            return shape.logits[: len(requests)]
        for rows, row_ids in zip(shape.rows, engram_rows(self.model.config, requests, self.hasher), strict=True):
            rows.fill(row_ids)
        logits = self.model.forward(shape.batch.batch)
        if self.capture and not self.failed:
            self._capture(shape, f"{size} requests up to {longest} tokens")
        return logits[: len(requests)]

    def _make(self, size: int, longest: int) -> Shape:
        model = self.model
        config, device = model.config, model.device
        rows_per_token = (config.engram_max_ngram_size - 1) * config.engram_n_heads
        engrams = {block.engram.index: block.engram for block in model.blocks if block.engram is not None}
        rows = tuple(FixedRows(engrams[index].table, rows_per_token, size, device) for index in sorted(engrams))
        return Shape(FixedBatch(model.caches.geometry, size, longest, device, rows), rows)

    def _replay(self, shape: Shape, requests: Sequence[ChunkRequest]) -> None:
        """Layer by engram layer: the host finds the next rows while the GPU works on the layers before them, and at last the next
        step's indices."""
        shape.graphs[0].replay()
        row_ids = engram_rows(self.model.config, requests, self.hasher)
        for graph, rows, ids in zip(shape.graphs[1:], shape.rows, row_ids, strict=True):
            rows.fill(ids)
            graph.replay()
        self.num_replays += 1
        shape.batch.prepare(requests)

    def _capture(self, shape: Shape, name: str) -> None:
        """Record the step that has just run eagerly: everything it needs is loaded by now. Nothing is executed.

        Where that fails (memory, an operation that waits for the GPU) there are no further graphs: steps run eagerly.
        """
        running = ExitStack()

        def begin_next() -> None:
            running.close()
            shape.graphs.append(torch.cuda.CUDAGraph())
            running.enter_context(torch.cuda.graph(shape.graphs[-1], pool=self._pool, capture_error_mode="thread_local"))

        for rows in shape.rows:
            rows.before_use = begin_next
        try:
            with torch.cuda.stream(torch.cuda.current_stream()), running:  # a capture that fails does not put the stream back
                begin_next()
                logits = self.model.forward(shape.batch.batch)
        except RuntimeError as error:
            self.failed = True
            logger.warning("decode steps run without CUDA graphs from now on: capturing %s failed: %s", name, error)
        else:
            shape.logits = logits
            logger.info("decode step of %s captured", name)
        finally:
            for rows in shape.rows:
                rows.before_use = None
