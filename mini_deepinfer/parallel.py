"""Expert parallelism: how the rows of a step travel between ranks (docs/architecture.md, "Ranks").

Attention is data parallel and experts are expert parallel: every rank sends its token rows to all ranks
(:meth:`ExpertParallel.start_all_gather`), computes its own experts for all of them and sends the partial sums back
(:meth:`ExpertParallel.start_scatter`). Ranks step together; a rank without tokens takes part with zero rows.

On GPUs the exchange runs on a stream of its own beside the kernels of the step, from `start_...` until `wait()` of what it
returned. Its memory belongs to the step's stream and is held until that stream has waited, so nothing is reused too early.

Three implementations: :class:`SingleProcess`, :class:`ProcessGroup` (gloo on CPU, NCCL on GPU) and :class:`Loopback`
(one process that does the work of rank 0 of a larger group without the links).
"""

from __future__ import annotations

import atexit
import functools
import os
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from mini_deepinfer.env_variables import read_env
from mini_deepinfer.stages import GATHER, SCATTER, beside, stage
from mini_deepinfer.watchdog import Watchdog, first_line, leave_at_once

START_TIMEOUT_S = 25.0  # for all ranks to appear
STEP_TIMEOUT_S = 600.0  # for a rank that is alive to reach a collective that another rank waits in
BESIDE_BYTES = 1 << 20  # less than this is not worth a second stream in the loopback
LIBRARY_MARGIN_S = 60.0  # NCCL's own limit comes later: it ends a process without naming the rank that is behind

# torch 2.13 renamed it and warns about the old name.
all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Result = TypeVar("Result")


class Exchange(Generic[Result]):
    """Rows on their way between the ranks. `wait` must be called once; its result is for the stream that was current at the start."""

    def __init__(self, finish: Callable[[], Result], held: Any = None) -> None:
        self._finish: Callable[[], Result] | None = finish
        self._held = held  # memory that the exchange reads

    def wait(self) -> Result:
        """The rows, as soon as the step's stream has them (the host does not wait for a GPU)."""
        if self._finish is None:
            raise RuntimeError("parallel: wait() was called twice on one exchange")
        finish, self._finish = self._finish, None
        result = finish()
        self._held = None
        return result


class ExchangeStream:
    """A stream for the exchange beside the step's stream of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # High priority: the few blocks of a collective must not queue behind all blocks of a product.
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._ready = torch.cuda.Event()  # recorded and waited for anew by every run

    def run(self, name: str, call: Callable[[], Any]) -> Callable[[], None]:
        """Run `call` there, after everything that the step's stream (the current one) has been given so far.

        Returns what makes the step's stream wait for it. What `call` reads and writes must have been allocated on the step's stream
        and stay referenced until then: its memory cannot be reused before.
        """
        step = torch.cuda.current_stream(self.device)
        self._ready.record(step)
        self._stream.wait_event(self._ready)
        done = torch.cuda.Event()
        torch.cuda.set_stream(self._stream)
        try:
            with beside(name):
                call()
            done.record(self._stream)
        finally:
            torch.cuda.set_stream(step)
        return lambda: step.wait_event(done)


class ExpertParallel(ABC):
    """The exchange between ranks. T rows of this rank; ``counts[p]`` rows of rank p, the same list on every rank.

    As a context manager it closes the group, or tells the other ranks the exception that ended the block.
    """

    rank: int = 0
    world: int = 1

    def __init__(self) -> None:
        self.step = 0  # steps begun so far, counted by gather_counts; for messages
        self.collectives: Counter[str] = Counter()  # collectives this rank took part in, by name
        self.received_bytes: Counter[str] = Counter()  # of other ranks' rows, by stage name

    @property
    def num_collectives(self) -> int:
        """Number of collectives so far. Equal on all ranks whenever they are between two steps."""
        return self.collectives.total()

    def gather_counts(self, num_tokens: int) -> list[int]:
        """Begin a step: tell the others how many tokens this rank has in it. Returns the counts of all ranks."""
        if num_tokens < 0:
            raise ValueError(f"parallel.gather_counts: num_tokens must be >= 0, got {num_tokens}")
        self.step += 1
        return self._gather_counts(num_tokens)

    def start_all_gather(self, tensors: Sequence[torch.Tensor], counts: list[int]) -> Exchange[list[torch.Tensor]]:
        """all_gather of several tensors of rows; `wait` gives them in the same order."""
        for rows in tensors:
            self._check_rows("all_gather", rows, self._own_count(counts))
        return self._start_all_gather(tensors, counts)

    def start_gather_routes(
        self, ids: torch.Tensor, weights: torch.Tensor, counts: list[int]
    ) -> Exchange[list[torch.Tensor]]:
        """all_gather of routed expert ids [T, k] and their weights [T, k]; :class:`Loopback` varies the ids per stand-in rank."""
        return self.start_all_gather([ids, weights], counts)

    def start_scatter(self, partial: torch.Tensor, counts: list[int]) -> Exchange[torch.Tensor]:
        """What every rank has for the OTHER ranks' rows -> [P, T, ...]: what P others have for this rank's T rows, in rank order.

        partial [sum(counts) - T, ...]: the other ranks' rows in rank order. P is world - 1, but 0 for :class:`Loopback`, whose
        stand-ins have nothing to send.
        """
        self._check_rows("scatter", partial, sum(counts) - self._own_count(counts))
        return self._start_scatter(partial, counts)

    def all_agree(self, value: bool) -> bool:
        """Whether value is true on all ranks. For decisions at the load that all must take alike, not for steps."""
        return all(self.all_gather_object(value))

    def all_gather(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """rows [T, ...] of any dtype on every rank -> [sum(counts), ...], rank 0's rows first."""
        return self.start_all_gather([rows], counts).wait()[0]

    def reduce_scatter(
        self, partial: torch.Tensor, counts: list[int], *, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """partial [sum(counts), ...] of every rank -> [T, ...], the sum over ranks of this rank's rows.

        The sum is taken in float32 in ascending rank order and rounded once, to out_dtype (None: partial's dtype).
        """
        own_count = self._own_count(counts)
        self._check_rows("reduce_scatter", partial, sum(counts))
        first = sum(counts[: self.rank])
        before, own, after = partial.split([first, own_count, partial.shape[0] - first - own_count])
        parts = self.start_scatter(torch.cat((before, after)), counts).wait()
        ordered = [*parts[: self.rank], own, *parts[self.rank :]]
        total = ordered[0]
        for part in ordered[1:]:
            total = total.to(torch.float32) + part
        return total.to(out_dtype or partial.dtype)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Picklable values of all ranks, in rank order. For results at the end of a job, not for steps."""
        return [value]

    def barrier(self) -> None:
        """Wait for all ranks."""
        return

    def close(self) -> None:
        """Leave the group. Idempotent."""
        return

    def abort(self, error: BaseException) -> None:
        """Tell the other ranks that this one failed; they end. Idempotent."""
        return

    def __enter__(self) -> ExpertParallel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
        else:
            self.abort(error)

    def _own_count(self, counts: list[int]) -> int:
        if len(counts) != self.world:
            raise ValueError(f"parallel: counts must have one entry per rank (world={self.world}), got {counts}")
        return counts[self.rank]

    def _check_rows(self, op: str, rows: torch.Tensor, wanted: int) -> None:
        if rows.dim() == 0 or rows.shape[0] != wanted:
            raise ValueError(
                f"parallel.{op}: rank {self.rank} must pass {wanted} rows (its counts), got shape {list(rows.shape)}"
            )

    @abstractmethod
    def _gather_counts(self, num_tokens: int) -> list[int]: ...

    @abstractmethod
    def _start_all_gather(self, tensors: Sequence[torch.Tensor], counts: list[int]) -> Exchange[list[torch.Tensor]]: ...

    @abstractmethod
    def _start_scatter(self, partial: torch.Tensor, counts: list[int]) -> Exchange[torch.Tensor]: ...


class SingleProcess(ExpertParallel):
    """World of one rank: nothing is sent, nothing is copied."""

    def _gather_counts(self, num_tokens: int) -> list[int]:
        return [num_tokens]

    def _start_all_gather(self, tensors: Sequence[torch.Tensor], counts: list[int]) -> Exchange[list[torch.Tensor]]:
        return Exchange(lambda: list(tensors))

    def _start_scatter(self, partial: torch.Tensor, counts: list[int]) -> Exchange[torch.Tensor]:
        return Exchange(lambda: partial.new_empty(0, counts[0], *partial.shape[1:]))


class Loopback(ExpertParallel):
    """Rank 0 of ``world`` ranks in one process: the per-rank work of a step without the links.

    The other ranks are stand-ins with this rank's own rows; their expert ids go through one fixed permutation of the
    experts per stand-in, so that the local experts see ``world`` different token sets. Results describe work, not text:
    the part that other ranks' experts would add is missing. device: that of the tokens.
    """

    def __init__(self, world: int, num_experts: int, device: torch.device | str = "cpu") -> None:
        super().__init__()
        if world < 1 or num_experts < 1:
            raise ValueError(f"Loopback: world and num_experts must be >= 1, got {world} and {num_experts}")
        self.world = world
        self.num_experts = num_experts
        # [world, num_experts]: entry (p, e) is the expert that stand-in p picks where rank 0 picks e.
        permutations = [torch.arange(num_experts)]
        for stand_in in range(1, world):
            permutations.append(torch.randperm(num_experts, generator=torch.Generator().manual_seed(stand_in)))
        self._permutations = torch.stack(permutations).to(device, torch.int32)
        device = self._permutations.device
        self._stream = ExchangeStream(device) if device.type == "cuda" else None

    def _gather_counts(self, num_tokens: int) -> list[int]:
        return [num_tokens] * self.world

    def _start_all_gather(self, tensors: Sequence[torch.Tensor], counts: list[int]) -> Exchange[list[torch.Tensor]]:
        parts = [rows.contiguous() for rows in tensors]
        results = [rows.new_empty(self.world * rows.shape[0], *rows.shape[1:]) for rows in tensors]

        def call() -> None:
            for part, out in zip(parts, results):
                torch.cat([part.view(torch.uint8)] * self.world, out=out.view(torch.uint8))

        if self._stream is None or sum(part.nbytes for part in parts) < BESIDE_BYTES:
            call()
            return Exchange(lambda: results)
        # Like a group's, beside the step's stream: received rows cost memory traffic, but no turn of their own there.
        wait = self._stream.run(GATHER, call)

        def finish() -> list[torch.Tensor]:
            wait()
            return results

        return Exchange(finish, held=parts)

    def start_gather_routes(
        self, ids: torch.Tensor, weights: torch.Tensor, counts: list[int]
    ) -> Exchange[list[torch.Tensor]]:
        """ids, weights [T, k] -> [world * T, k]. The ids of a stand-in's token are not sorted."""
        self._check_rows("gather_routes", ids, self._own_count(counts))
        permuted, weights_sent = self._permute(ids), self.start_all_gather([weights], counts)
        return Exchange(lambda: [permuted, *weights_sent.wait()])

    def _permute(self, ids: torch.Tensor) -> torch.Tensor:
        return self._permutations.index_select(1, ids.flatten()).view(-1, ids.shape[1])

    def _start_scatter(self, partial: torch.Tensor, counts: list[int]) -> Exchange[torch.Tensor]:
        return Exchange(lambda: partial.new_empty(0, counts[0], *partial.shape[1:]))


class ProcessGroup(ExpertParallel):
    """One process per rank over torch.distributed: gloo for CPU tensors, NCCL for CUDA tensors.

    Reads RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT (and LOCAL_RANK for CUDA) as torchrun sets them. If a rank dies or
    raises, every other rank ends with a non-zero exit and a message naming that rank and its step, within
    watchdog.HEARTBEAT_TIMEOUT_S + 5 s, whatever call it is blocked in.

    Raises ValueError for a wrong environment and RuntimeError if not all ranks appear within start_timeout_s.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        start_timeout_s: float = START_TIMEOUT_S,
        step_timeout_s: float = STEP_TIMEOUT_S,
    ) -> None:
        super().__init__()
        self.rank, self.world = _launcher_value("RANK"), _launcher_value("WORLD_SIZE")
        if not 0 <= self.rank < self.world:
            raise ValueError(f"parallel: RANK must be in 0..WORLD_SIZE-1, got RANK={self.rank} WORLD_SIZE={self.world}")
        self.device = torch.device(device)
        self.overlap = True  # False: the step's stream waits for every exchange at once (to measure what overlapping hides)
        self._closed = False
        self._stream: ExchangeStream | None = None
        on_gpu = self.device.type == "cuda"
        if on_gpu:  # before the group is made: NCCL binds to this device
            self.device = torch.device("cuda", torch.cuda.current_device() if self.device.index is None else self.device.index)
            torch.cuda.set_device(self.device)
            self._stream = ExchangeStream(self.device)
        address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), _launcher_value("MASTER_PORT")
        # torchrun's agent hosts the store; without it rank 0 does.
        hosts_store = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        deadline = time.monotonic() + start_timeout_s
        # Kept for the lifetime of the group: on the hosting rank it is the server.
        self._store = _connect(address, port, self.rank, self.world, start_timeout_s, host=hosts_store)
        self._watch = Watchdog(
            self,
            dist.PrefixStore(f"mdi/watch/{attempt}", _connect(address, port, self.rank, self.world, start_timeout_s)),
            hosts_store=hosts_store,
            step_timeout_s=step_timeout_s,
        )
        self._watch.wait_for_all(deadline)
        self._watch.start()
        try:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
                store=dist.PrefixStore(f"mdi/group/{attempt}", self._store),
                rank=self.rank,
                world_size=self.world,
                timeout=timedelta(seconds=step_timeout_s + (LIBRARY_MARGIN_S if on_gpu else 0.0)),
                device_id=self.device if on_gpu else None,  # connect now: a fault of the links shows here, not in a step
            )
        except Exception as error:
            self.abort(error)
            raise
        self._watch.hook_exceptions()

    def _collective(self, name: str, call: Callable[[], Result]) -> Result:
        """Run one collective under the watchdog. A failure first gives the watchdog time to name the rank behind it."""
        if self._closed:
            raise RuntimeError(f"parallel.{name}: the group is closed")
        self.collectives[name] += 1
        self._watch.waiting = (name, time.monotonic())
        try:
            return call()
        except RuntimeError as error:
            self._watch.let_it_name_the_culprit()
            raise RuntimeError(f"parallel.{name}: rank {self.rank}, step {self.step}: {error}") from error
        finally:
            self._watch.waiting = None

    def _gather_counts(self, num_tokens: int) -> list[int]:
        own = torch.tensor([num_tokens], dtype=torch.int64)  # on the CPU: no device synchronisation
        counts = torch.empty(self.world, dtype=torch.int64)
        self._collective("gather_counts", lambda: all_gather_into(counts, own))
        return counts.tolist()

    def _start(self, name: str, device: torch.device, call: Callable[[], None]) -> Callable[[], None]:
        """Run collectives, on a GPU beside the step's stream (ExchangeStream). Returns what makes the step's stream wait for them."""
        if self._stream is None or device.type != "cuda" or not self.overlap:
            with stage(name), beside(name):
                call()
            return lambda: None
        step_waits = self._stream.run(name, call)

        def wait() -> None:
            with stage(name):
                step_waits()

        return wait

    def _start_all_gather(self, tensors: Sequence[torch.Tensor], counts: list[int]) -> Exchange[list[torch.Tensor]]:
        longest = max(counts)
        device = tensors[0].device
        pairs: list[tuple[torch.Tensor, torch.Tensor] | None] = []  # [longest, bytes of a row] and [world * longest, bytes of a row]
        for rows in tensors:
            if longest == 0 or rows.shape[1:].numel() == 0:  # the same on all ranks: nothing to send
                pairs.append(None)
                continue
            own = _as_bytes(rows)
            if own.shape[0] < longest:  # pad to the largest count; the padding is cut off below
                padded = own.new_zeros(longest, own.shape[1])
                padded[: own.shape[0]] = own
                own = padded
            pairs.append((own, own.new_empty(self.world * longest, own.shape[1])))
        sent = [pair for pair in pairs if pair is not None]
        self.received_bytes[GATHER] += sum((self.world - 1) * own.numel() for own, _ in sent)

        def call() -> None:
            for own, gathered in sent:
                self._collective("all_gather", functools.partial(all_gather_into, gathered, own))

        wait = self._start(GATHER, device, call)

        def finish() -> list[torch.Tensor]:
            wait()
            result = []
            for rows, pair in zip(tensors, pairs):
                out_shape = (sum(counts), *rows.shape[1:])
                if pair is None:
                    result.append(rows.new_empty(out_shape))
                    continue
                gathered = pair[1]
                if min(counts) < longest:
                    gathered = torch.cat([part[:count] for part, count in zip(gathered.split(longest), counts)])
                result.append(_from_bytes(gathered, rows))
            return result

        return Exchange(finish)

    def _start_scatter(self, partial: torch.Tensor, counts: list[int]) -> Exchange[torch.Tensor]:
        # An all-to-all moves the same bytes as a ring reduce-scatter, takes uneven counts, and leaves the sum to us: in
        # float32, in rank order, rounded once.
        own_count, others = counts[self.rank], self.world - 1
        shape = (others, own_count, *partial.shape[1:])
        if max(counts) == 0 or partial.shape[1:].numel() == 0:
            return Exchange(lambda: partial.new_empty(shape))
        send = _as_bytes(partial)
        received = send.new_empty(others * own_count, send.shape[1])
        self.received_bytes[SCATTER] += received.numel()
        to_send, to_receive = list(counts), [own_count] * self.world
        to_send[self.rank] = to_receive[self.rank] = 0  # what a rank has for its own rows stays with it

        def call() -> None:
            self._collective("reduce_scatter", lambda: dist.all_to_all_single(received, send, to_receive, to_send))

        wait = self._start(SCATTER, partial.device, call)

        def finish() -> torch.Tensor:
            wait()
            return received.view(-1).view(partial.dtype).view(shape)

        return Exchange(finish, held=send)

    def all_gather_object(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.world
        self._collective("all_gather_object", lambda: dist.all_gather_object(values, value))
        return values

    def barrier(self) -> None:
        token = torch.zeros(1)
        self._collective("barrier", lambda: dist.all_reduce(token))

    def close(self) -> None:
        if self._closed:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # nothing of the exchange is left when its communicator goes
        dist.destroy_process_group()  # waits for the other ranks; the watchdog looks on
        self._closed = True
        self._watch.stop()
        self._watch.say_goodbye()

    def abort(self, error: BaseException) -> None:
        if self._closed:
            return
        self._closed = True
        reason = f"rank {self.rank} failed at step {self.step}: {type(error).__name__}: {error}"
        os.write(2, f"mini_deepinfer: {reason}\n".encode())
        self._watch.publish(reason)
        if isinstance(error, SystemExit):  # no excepthook is called for it
            atexit.register(leave_at_once, error.code if isinstance(error.code, int) else 1)


def make_parallel(
    device: torch.device | str, *, ep_size: int = 1, ep_loopback: int = 1, num_experts: int
) -> ExpertParallel:
    """The exchange for this process: a loopback, the group that the launcher's environment describes, or none.

    Raises ValueError if ep_size does not match WORLD_SIZE, or if ep_loopback is combined with more than one process.
    """
    world = read_env("WORLD_SIZE") or 1
    if ep_loopback > 1:
        if world > 1:
            raise ValueError(f"parallel: ep_loopback={ep_loopback} is for one process, but WORLD_SIZE={world}")
        return Loopback(ep_loopback, num_experts, device)
    if ep_size not in (1, world):
        raise ValueError(
            f"parallel: ep_size={ep_size} needs that many processes, got WORLD_SIZE={world}; "
            f"start with torchrun --nproc-per-node {ep_size}"
        )
    return ProcessGroup(device) if world > 1 else SingleProcess()


def local_device(device: str) -> torch.device:
    """The device of this process: "cpu", or the GPU with the index LOCAL_RANK; made current.

    Raises ValueError for another name, a missing LOCAL_RANK under a launcher, or a LOCAL_RANK without a GPU.
    """
    wanted = torch.device(device)
    if wanted.type == "cpu":
        return wanted
    if wanted.type != "cuda":
        raise ValueError(f"device must be cpu or cuda, got {device!r}")
    num_gpus = torch.cuda.device_count()
    if num_gpus == 0:
        raise ValueError("device cuda: this machine (or this build of torch) has no GPU; use --device cpu")
    if wanted.index is not None:
        index = wanted.index
    elif read_env("LOCAL_RANK") is not None:
        index = read_env("LOCAL_RANK")
    elif (read_env("WORLD_SIZE") or 1) > 1:
        raise ValueError("device cuda: WORLD_SIZE is set but LOCAL_RANK is not, so the GPU of this rank is unknown")
    else:
        index = torch.cuda.current_device()
    if not 0 <= index < num_gpus:
        raise ValueError(f"device cuda: LOCAL_RANK={index} but there are {num_gpus} GPUs; start one process per GPU")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _launcher_value(name: str) -> int:
    value = read_env(name)
    if value is None:
        raise ValueError(f"parallel: {name} is not set; start the ranks with torchrun")
    return value


def _connect(address: str, port: int, rank: int, world: int, timeout_s: float, *, host: bool = False) -> dist.TCPStore:
    try:
        return dist.TCPStore(
            address,
            port,
            world,
            is_master=host,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        if host:
            what = f"cannot listen on MASTER_PORT={port}; is the port taken? (torchrun --standalone picks a free one)"
        else:
            what = f"found no store at {address}:{port} within {timeout_s:.0f} s; is rank 0 running?"
        raise RuntimeError(f"parallel: rank {rank} {what} ({first_line(error)})") from error


def _as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """[T, ...] of any dtype -> uint8 [T, bytes of a row]: collectives know no float8 and need none."""
    row_bytes = rows.shape[1:].numel() * rows.element_size()
    return rows.contiguous().view(torch.uint8).view(rows.shape[0], row_bytes)


def _from_bytes(gathered: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """uint8 [M, bytes of a row of `rows`] -> [M, ...] of its dtype."""
    return gathered.view(rows.dtype).view(gathered.shape[0], *rows.shape[1:])
