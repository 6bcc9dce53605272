"""The engine: prompts in, tokens or logits out.

`LLM` loads a checkpoint, sizes the caches and runs the step loop: plan (scheduler) -> indices (batch) -> forward pass
(model) -> next tokens (sampler). With several ranks each one schedules its own share of the prompts and all of them
take part in every step, with zero tokens if need be, until nobody has work.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from . import engine_parts
from .batch import PrefillBatch, build_batch
from .cache_plan import MAX_SNAPSHOTS, CachePlan
from .config import EngineConfig, ModelConfig
from .decode_shapes import why_not
from .engram import EngramHasher
from .kv_cache import Caches
from .ops._dispatch import check_device
from .parallel import ExpertParallel, SingleProcess, local_device, make_parallel
from .prefix_cache import PageAllocator, PrefixCache
from .prompts import Prompt, PromptReader, as_list
from .sampler import SamplingParams, sample
from .scheduler import UNKNOWN_ID, Chunk, FinishReason, Request, Scheduler
from .stages import stage
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from .decode_graphs import DecodeGraphs

logger = logging.getLogger(__name__)


class ForwardModel(Protocol):
    def forward(self, batch: PrefillBatch) -> torch.Tensor:
        """float32 logits [O, V] of the batch's output rows."""


@dataclass(frozen=True)
class RequestOutput:
    """What became of one prompt. `token_ids` and `text` are the continuation, also of a request that ended early."""

    index: int  # place in the list of prompts, or the id that add_request returned
    prompt_tokens: int
    cached_tokens: int  # of the prompt, taken from the prefix cache
    token_ids: list[int]
    text: str | None  # None without a tokenizer
    finish_reason: FinishReason
    error: str | None = None


class LLM:
    """A loaded model and its step loop.

        llm = LLM("path/to/checkpoint", max_num_batched_tokens=4096)
        for output in llm.generate(["Once upon"], SamplingParams(max_tokens=32)): ...

    model is a checkpoint folder; with load_format="dummy" it may also be "", the released configuration. Options are the
    fields of `EngineConfig`.

    Raises:
        TypeError          unknown option (the known ones are listed)
        ValueError         wrong option, unfit model, or caches that cannot fit: before any weight is read
        FileNotFoundError  a part of the checkpoint is missing
        RuntimeError       the compiled kernels cannot run on this GPU: before any weight is read
    """

    graphs: DecodeGraphs | None = None  # runs the steps of one token per request, where it can

    def __init__(self, model: str | Path, **options: Any) -> None:
        known = [field.name for field in dataclasses.fields(EngineConfig) if field.name != "model"]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise TypeError(f"LLM: unknown option(s) {', '.join(unknown)}; known options: {', '.join(known)}")
        chosen = EngineConfig(model=str(model), **options)
        dummy = chosen.load_format == "dummy"
        config = ModelConfig.from_folder(model) if str(model) or not dummy else ModelConfig.released()
        chosen.check_model(config)
        wanted = chosen.device if chosen.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
        device = local_device(wanted)
        check_device(device, chosen.profile().compute_dtype)
        parallel = make_parallel(device, ep_size=chosen.ep_size, ep_loopback=chosen.ep_loopback, num_experts=config.n_routed_experts)
        plan = engine_parts.plan_memory(config, chosen, device, parallel.world)
        tokenizer, hasher, known_ids = engine_parts.read_tokenizer(config, chosen)
        if parallel.rank == 0:
            engine_parts.show_start(config, chosen, device, plan)
        weights = engine_parts.read_weights(config, chosen, parallel, device)

        from .model import Model  # the only part that needs every op; importing this file does not

        caches = engine_parts.make_caches(config, chosen, plan.num_pages, device)
        network = Model(config, chosen.profile(), weights, caches, parallel, device, max_model_len=plan.max_model_len)
        self._assemble(config, chosen, caches, network, parallel, hasher, known_ids, tokenizer, plan)
        if chosen.cuda_graph:
            from .decode_graphs import DecodeGraphs

            reason = why_not(device, chosen.profile(), self._data_ranks)
            if reason is None:
                self.graphs = DecodeGraphs(network, hasher, max_seqs=chosen.max_num_seqs, max_len=plan.max_model_len)
            else:
                logger.info("decode steps run without CUDA graphs: %s", reason)

    @classmethod
    def from_parts(
        cls,
        config: ModelConfig,
        options: EngineConfig,
        caches: Caches,
        model: ForwardModel,
        *,
        parallel: ExpertParallel | None = None,
        hasher: EngramHasher | None = None,
        known_ids: np.ndarray | None = None,
        tokenizer: Tokenizer | None = None,
        snapshot_budget: int | None = None,
    ) -> LLM:
        """An engine around a model that exists already, for tests and tools. known_ids: bool [V], ids with a token."""
        geometry = caches.geometry
        length = options.max_model_len or min(config.max_position_embeddings, geometry.num_pages * geometry.page_size)
        budget = MAX_SNAPSHOTS * caches.snapshot_bytes if snapshot_budget is None else snapshot_budget
        plan = CachePlan(geometry.num_pages, length, budget, {}, 0)
        self = cls.__new__(cls)
        self._assemble(config, options, caches, model, parallel or SingleProcess(), hasher, known_ids, tokenizer, plan)
        return self

    def _assemble(
        self,
        config: ModelConfig,
        options: EngineConfig,
        caches: Caches,
        model: ForwardModel,
        parallel: ExpertParallel,
        hasher: EngramHasher | None,
        known_ids: np.ndarray | None,
        tokenizer: Tokenizer | None,
        plan: CachePlan,
    ) -> None:
        self.config, self.options, self.caches, self.model = config, options, caches, model
        self.parallel, self.hasher, self.tokenizer = parallel, hasher, tokenizer
        self.max_model_len = plan.max_model_len
        self._known_ids = known_ids
        self._prompts = PromptReader(config, tokenizer, known_ids, plan.max_model_len)
        # A loopback's other ranks are stand-ins: all prompts are this process's own.
        self._data_ranks = 1 if options.ep_loopback > 1 else parallel.world
        self.allocator = PageAllocator(plan.num_pages)
        self.prefix_cache: PrefixCache | None = None
        if options.enable_prefix_caching:
            self.prefix_cache = PrefixCache(
                self.allocator, caches.geometry.page_size, _identity(config, options), caches.snapshot_bytes,
                plan.snapshot_budget,
            )  # fmt: skip
        self.scheduler = Scheduler(caches, self.allocator, self.prefix_cache, options.max_num_batched_tokens)
        self._requests: dict[int, Request] = {}
        self._ids: dict[Request, int] = {}
        self._scores: dict[Request, list[torch.Tensor]] = {}
        self._next_id = itertools.count()

    # ---------------------------------------------------------------- whole jobs

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None) -> list[RequestOutput]:
        """Continue every prompt; outputs in the order of the prompts, on every rank.

        A prompt is text, token ids, or a mapping with "prompt" (text or ids) and SamplingParams fields of its own. A bad
        prompt gets an output with finish_reason "error" and does not disturb the others.

        Raises:
            ValueError    params is a list of another length
            RuntimeError  requests added by add_request are unfinished
        """
        prompts = as_list(prompts)
        if params is None:
            params = SamplingParams()
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"generate: params must be one or one per prompt ({len(prompts)}), got {len(each)}")
        self._require_idle("generate")
        outputs: list[RequestOutput] = []
        place: dict[int, int] = {}
        for index in range(self._rank, len(prompts), self._data_ranks):
            try:
                place[self.add_request(prompts[index], each[index])] = index
            except (TypeError, ValueError) as error:
                self.scheduler.stats.finished["error"] = self.scheduler.stats.finished.get("error", 0) + 1
                outputs.append(RequestOutput(index, 0, 0, [], None, "error", str(error)))
        while self._anyone_has_work():
            outputs += [dataclasses.replace(output, index=place[output.index]) for output in self.step()]
        return sorted(itertools.chain.from_iterable(self._gather(outputs)), key=lambda output: output.index)

    def score(self, prompts: Sequence[Prompt]) -> list[torch.Tensor]:
        """Logits after every token of every prompt: float32 [length, V] each, on the CPU, in order.

        The prefix cache is not read, since every token's logits are wanted. Raises TypeError or ValueError naming the
        first bad prompt, before anything runs.
        """
        prompts = as_list(prompts)
        self._require_idle("score")
        tokens = []
        for index, prompt in enumerate(prompts):
            try:
                tokens.append(self._prompts.read(prompt, SamplingParams(), score=True)[0])
            except (TypeError, ValueError) as error:
                raise type(error)(f"score: prompt {index}: {error}") from None
        place = {
            self._add(tokens[index], SamplingParams(), score=True): index for index in range(self._rank, len(prompts), self._data_ranks)
        }
        requests = {index: self._requests[request_id] for request_id, index in place.items()}
        scores: dict[int, torch.Tensor] = {}
        while self._anyone_has_work():
            self.step()
        for index, request in requests.items():
            if request.finish_reason == "error":
                raise RuntimeError(f"score: prompt {index}: {request.error}")
            scores[index] = torch.cat(self._scores.pop(request))
        merged = {index: logits for part in self._gather(scores) for index, logits in part.items()}
        return [merged[index] for index in range(len(prompts))]

    # ---------------------------------------------------------------- one step at a time

    def add_request(self, prompt: Prompt, params: SamplingParams | None = None) -> int:
        """Queue a prompt and return its id. Raises TypeError or ValueError for a prompt that can never run."""
        tokens, params = self._prompts.read(prompt, params or SamplingParams(), score=False)
        return self._add(tokens, params, score=False)

    def abort(self, request_id: int) -> RequestOutput | None:
        """End a request now; its pages and slot are free on return. None if there is no such unfinished request."""
        request = self._requests.get(request_id)
        if request is None or not self.scheduler.abort(request):
            return None
        return self._output(request)

    @property
    def has_work(self) -> bool:
        """Whether this rank has unfinished requests."""
        return self.scheduler.has_work

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """Run one step and return the requests that ended with it. With several ranks, all must call it together."""
        with stage("schedule"):
            chunks = self.scheduler.plan()
            if not chunks and self.parallel.world == 1:
                return []
        try:
            logits = self._forward(chunks)
        except Exception as error:
            for chunk in chunks:
                self.scheduler.abort(chunk.request, "error", f"the step failed: {error}")
                self._forget(chunk.request)
                self._scores.pop(chunk.request, None)
            raise
        with stage("sample"):
            tokens = self._next_tokens(chunks, logits)
        ended = self.scheduler.complete(chunks, tokens)
        ended += self._check_stop_strings(chunks)
        return [self._output(request) for request in ended]

    def stats(self) -> dict[str, Any]:
        """Counters since the start of the engine and the state of the caches, of this rank."""
        values = dataclasses.asdict(self.scheduler.stats)
        values |= {
            "num_pages": self.allocator.num_pages,
            "free_pages": self.allocator.num_free,
            "cached_pages": self.allocator.num_cached,
            "free_slots": self.scheduler.num_free_slots,
            "waiting": len(self.scheduler.waiting),
            "running": len(self.scheduler.running),
            "max_model_len": self.max_model_len,
        }
        if self.prefix_cache is not None:
            values |= dataclasses.asdict(self.prefix_cache.stats)
            values["hit_unit"] = self.prefix_cache.page_size
        return values

    def close(self) -> None:
        """Leave the group of ranks."""
        self.parallel.close()

    # ---------------------------------------------------------------- inside

    @property
    def _rank(self) -> int:
        return self.parallel.rank if self._data_ranks > 1 else 0

    def _require_idle(self, caller: str) -> None:
        if self.has_work:
            raise RuntimeError(f"{caller}: {len(self._requests)} added requests are unfinished; step or abort them first")

    def _add(self, tokens: np.ndarray, params: SamplingParams, *, score: bool) -> int:
        num_tokens = len(tokens)
        max_total = num_tokens if score else min(num_tokens + params.max_tokens, self.max_model_len)
        stop_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self.config.eos_token_id))
        buffer = np.zeros(max_total, dtype=np.int64)
        buffer[:num_tokens] = tokens
        request = Request(num_tokens, params, max_total, frozenset(stop_ids), score, buffer, num_tokens)
        self.scheduler.add(request)
        request_id = next(self._next_id)
        self._requests[request_id] = request
        self._ids[request] = request_id
        if score:
            self._scores[request] = []
        return request_id

    def _forward(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Logits of the chunks' wanted rows: of a decode graph where the step fits one, else of the model over a new batch."""
        inputs = [chunk.as_input() for chunk in chunks]
        if self.graphs is not None and self.graphs.fits(inputs):
            return self.graphs.forward(inputs)
        with stage("schedule"):
            batch = build_batch(self.config, inputs, self.caches.geometry, self.caches.device, self.hasher)
        return self.model.forward(batch)

    def _next_tokens(self, chunks: Sequence[Chunk], logits: torch.Tensor) -> list[int | None]:
        """Next token of every chunk that asked for one. The one place where a step waits for the device."""
        rows: list[int] = []
        sampled: list[Request] = []
        row = 0
        for chunk in chunks:
            if chunk.want_logits == "last":
                rows.append(row)
                sampled.append(chunk.request)
                row += 1
            elif chunk.want_logits == "all":
                count = chunk.end - chunk.start
                self._scores[chunk.request].append(logits[row : row + count].to("cpu", torch.float32, copy=True))
                row += count
        if len(rows) < len(logits):
            logits = logits[rows]
        params = [request.params for request in sampled]
        seeds = [self.options.seed if param.seed is None else param.seed for param in params]
        steps = [request.num_tokens - request.prompt_tokens for request in sampled]
        tokens = sample(logits, params, seeds, steps).tolist() if rows else []
        by_request = dict(zip(sampled, tokens))
        if self._known_ids is not None:  # an id without a token cannot be hashed, so it cannot be continued
            for request, token in by_request.items():
                if token >= 0 and not self._known_ids[token]:
                    by_request[request] = UNKNOWN_ID
        return [by_request.get(chunk.request) for chunk in chunks]

    def _check_stop_strings(self, chunks: Sequence[Chunk]) -> list[Request]:
        """End the requests whose text now holds one of their stop strings; returns them."""
        ended = []
        for chunk in chunks:
            request = chunk.request
            if request.params.stop and request.finish_reason is None and request.num_tokens > request.prompt_tokens:
                text = self.tokenizer.decode(request.generated) if self.tokenizer else ""
                if _first_stop(text, request.params.stop) >= 0 and self.scheduler.abort(request, "stop"):
                    ended.append(request)
        return ended

    def _output(self, request: Request) -> RequestOutput:
        request_id = self._forget(request)
        generated = request.generated
        text = self.tokenizer.decode(generated) if self.tokenizer is not None else None
        reason: FinishReason = request.finish_reason or "abort"
        if text is not None and request.params.stop:
            cut = _first_stop(text, request.params.stop)
            if cut >= 0:
                text, reason = text[:cut], "stop"
        return RequestOutput(request_id, request.prompt_tokens, request.cached_tokens, generated, text, reason, request.error)

    def _forget(self, request: Request) -> int:
        request_id = self._ids.pop(request)
        del self._requests[request_id]
        return request_id

    def _anyone_has_work(self) -> bool:
        if self._data_ranks == 1:
            return self.has_work
        flag = torch.tensor([int(self.has_work)], dtype=torch.int64)
        return bool(self.parallel.all_gather(flag, [1] * self.parallel.world).any())

    def _gather(self, value: Any) -> list[Any]:
        return self.parallel.all_gather_object(value) if self._data_ranks > 1 else [value]


def _first_stop(text: str, stop: Sequence[str]) -> int:
    """Where the first stop string begins, -1 without one."""
    return min((at for at in map(text.find, stop) if at >= 0), default=-1)


def _identity(config: ModelConfig, options: EngineConfig) -> bytes:
    """What cached rows depend on besides tokens: two engines in one process never share rows by accident."""
    return repr((options.model, options.load_format, options.seed, options.profile(), config)).encode()
