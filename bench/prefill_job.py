"""What a prefill benchmark runs: the loaded model, and one step of a workload again and again from the same state."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bench.workload import Workload, fill_randomly
from mini_deepinfer.batch import ChunkRequest, PrefillBatch, build_batch
from mini_deepinfer.config import ModelConfig, NumericProfile
from mini_deepinfer.engram import EngramHasher, synthetic_token_map, token_map_from_folder
from mini_deepinfer.kv_cache import CacheGeometry, Caches, cache_bytes
from mini_deepinfer.model import Model
from mini_deepinfer.parallel import ExpertParallel
from mini_deepinfer.report import progress
from mini_deepinfer.stages import stage
from mini_deepinfer.weights import dummy_weights, load_weights


def read_config(args: argparse.Namespace) -> ModelConfig:
    """The model of this run."""
    config = ModelConfig.from_folder(args.model) if args.model else ModelConfig.released()
    return dataclasses.replace(config, n_routed_experts=args.num_experts) if args.num_experts else config


@dataclass
class SavedState:
    """What a step changes besides rows that the next step overwrites: the window rings and the compressor tails."""

    rings: list[torch.Tensor]
    tails: list[torch.Tensor]


class Loaded:
    """What all workloads share: configuration, weights in the model, engram hash."""

    def __init__(self, args: argparse.Namespace, device: torch.device, parallel: ExpertParallel) -> None:
        self.config = read_config(args)
        self.device, self.parallel = device, parallel
        limit = self.config.max_position_embeddings
        for workload in args.workloads:
            if workload.context_len > limit:
                raise ValueError(f"workload {workload.name}: {workload.context_len} tokens exceed the model's limit of {limit}")
        start = time.perf_counter()
        rank, world = parallel.rank, parallel.world
        if args.load_format == "dummy":
            weights = dummy_weights(self.config, rank=rank, world=world, device=device, seed=args.seed)
            token_map = synthetic_token_map(self.config)
        else:
            weights = load_weights(args.model, self.config, rank=rank, world=world, device=device)
            token_map = token_map_from_folder(args.model, self.config)
        self.weight_bytes = weights.num_bytes
        self.hasher = EngramHasher(self.config, token_map) if self.config.engram_layer_ids else None
        profile = NumericProfile(getattr(torch, args.dtype), args.activation_quant, args.wo_a)
        longest = max(workload.context_len for workload in args.workloads)
        caches = make_caches(self.config, args.workloads[0], args, device)  # every job brings its own
        self.model = Model(self.config, profile, weights, caches, parallel, device, max_model_len=longest)
        self.load_s = time.perf_counter() - start
        allowed = np.flatnonzero(np.asarray(token_map) >= 0)
        self.allowed_ids = allowed[allowed != (-1 if self.config.image_token_id is None else self.config.image_token_id)]


def cache_sizes(workload: Workload, args: argparse.Namespace) -> dict[str, int]:
    """Pages for the requests of a workload, a slot for each, and a chunk of --prefill_batch_size tokens."""
    num_pages = sum(-(-request.end // args.page_size) for request in workload.requests)
    sizes = {"num_pages": num_pages, "page_size": args.page_size, "num_slots": len(workload.requests)}
    return sizes | {"max_tokens": args.prefill_batch_size}


def make_caches(config: ModelConfig, workload: Workload, args: argparse.Namespace, device: torch.device) -> Caches:
    return Caches(config, device=device, **cache_sizes(workload, args))


class PrefillJob:
    """The caches and requests of one workload on this rank; knows how to run the same step again and again."""

    def __init__(self, args: argparse.Namespace, loaded: Loaded, workload: Workload) -> None:
        self.config, self.model, self.hasher = loaded.config, loaded.model, loaded.hasher
        self.device, self.parallel, self.workload = loaded.device, loaded.parallel, workload
        self.chunk = args.prefill_batch_size
        self.cache_bytes = cache_bytes(self.config, CacheGeometry.of(self.config, **cache_sizes(workload, args)))
        self.caches = self.model.caches = make_caches(self.config, workload, args, self.device)
        self.token_ids = [workload.token_ids(i, self.parallel.rank, loaded.allowed_ids) for i in range(len(workload.requests))]
        self.host_ms: dict[str, list[float]] = {"build": [], "launch": []}  # what a step takes of the host
        self._next: PrefillBatch | None = None
        self.pages: list[list[int]] = []
        for request in workload.requests:
            first = sum(len(pages) for pages in self.pages)
            self.pages.append(list(range(first, first + self.caches.geometry.pages_for(request.end))))

    def _build(self, spans: list[tuple[int, int, int]], want: Any) -> PrefillBatch:
        """Tokens start..end-1 of request index, for every (index, start, end)."""
        with stage("schedule"):
            chunks = [ChunkRequest(self.token_ids[i], start, end, i, self.pages[i], want) for i, start, end in spans]
            return self.model.prefetch(build_batch(self.config, chunks, self.caches.geometry, self.device, self.hasher))

    def fill(self, how: str) -> float:
        """Put the cached part into the caches; returns the seconds it took."""
        start = time.perf_counter()
        if how == "random":
            fill_randomly(self.caches, seed=self.parallel.rank)
        else:
            todo = sum(request.cached_len for request in self.workload.requests)
            with progress(todo, desc="cached part", unit="tok", disable=self.parallel.rank != 0) as bar:
                for i, request in enumerate(self.workload.requests):
                    for first in range(0, request.cached_len, self.chunk):
                        last = min(first + self.chunk, request.cached_len)
                        self.model.forward(self._build([(i, first, last)], "none"))
                        bar.update(last - first)
        self._synchronise()
        return time.perf_counter() - start

    def save(self) -> SavedState:
        """The state at the cached length."""
        rings = [window[: self.caches.geometry.chunk_row].clone() for window in self.caches.window]
        return SavedState(rings, [tail.clone() for tail in self._tails()])

    def restore(self, state: SavedState) -> None:
        """Roll back to the cached length."""
        for window, ring in zip(self.caches.window, state.rings):
            window[: ring.shape[0]].copy_(ring)
        for tail, saved in zip(self._tails(), state.tails):
            tail.copy_(saved)

    def _tails(self) -> Iterator[torch.Tensor]:
        yield from self.caches.tail_kv.values()
        yield from self.caches.tail_score.values()

    def step(self) -> torch.Tensor:
        """One complete step: forward, schedule, sample. Returns the sampled ids on the host, int64 [requests]."""
        logits = self._forward()
        with stage("sample"):
            finite, *ids = torch.cat([torch.isfinite(logits).all()[None].long(), logits.argmax(dim=-1)]).tolist()
            if not finite:
                raise RuntimeError("bench_prefill: the step produced logits that are not finite")
            return torch.tensor(ids)

    def _forward(self) -> torch.Tensor:
        """The forward pass of a step and the batch of the next. Returns the logits.

        The chunks of a prefill do not depend on what is sampled, so the next batch is built, and its engram rows are fetched, while
        the device works on this one: every step builds one batch and runs one.
        """
        spans = [(i, request.cached_len, request.end) for i, request in enumerate(self.workload.requests)]
        if self._next is None:
            self._next = self._build(spans, "last")
        start = time.perf_counter()
        logits = self.model.forward(self._next)
        launched = time.perf_counter()
        self._next = self._build(spans, "last")
        self.host_ms["launch"].append(1e3 * (launched - start))
        self.host_ms["build"].append(1e3 * (time.perf_counter() - launched))
        return logits

    def timed_step(self, state: SavedState) -> tuple[float, torch.Tensor]:
        """(milliseconds, sampled ids) of one step, all ranks starting together."""
        self.restore(state)
        self._synchronise()
        self.parallel.barrier()
        start = time.perf_counter()
        ids = self.step()
        self._synchronise()
        return 1e3 * (time.perf_counter() - start), ids

    def chain(self, state: SavedState, count: int) -> float:
        """Milliseconds of a step among `count` that follow each other without waiting for the device, as the chunks of one prompt do."""
        self.restore(state)
        self._synchronise()
        self.parallel.barrier()
        start = time.perf_counter()
        for _ in range(count):
            self._forward()
        self._synchronise()
        return 1e3 * (time.perf_counter() - start) / count

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
