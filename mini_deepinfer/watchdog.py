"""Ends a rank whose group cannot go on: another rank is dead, has failed, or misses a collective (docs/architecture.md, "Ranks")."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from mini_deepinfer.parallel import ProcessGroup

HEARTBEAT_TIMEOUT_S = 20.0  # a rank on another host that is silent for so long is dead; on this host its pid tells
POLL_S = 0.5


class Watchdog(threading.Thread):
    """Ends this process when another rank is dead, has failed, or does not reach a collective.

    A daemon thread with a store connection of its own. Every POLL_S seconds it reads the failure that another rank may
    have published, publishes this rank's heartbeat, and looks for dead ranks: by pid on this host, else by silence.
    It leaves through os._exit, since the main thread may be blocked in a collective for good.
    """

    def __init__(self, group: ProcessGroup, store: dist.Store, *, hosts_store: bool, step_timeout_s: float) -> None:
        super().__init__(name="mdi-watchdog", daemon=True)
        self.waiting: tuple[str, float] | None = None  # collective the main thread is in, and since when
        self._group, self._store = group, store
        self._hosts_store = hosts_store
        self._step_timeout_s = step_timeout_s
        self._host = socket.gethostname()
        self._stop_event = threading.Event()
        self._members: dict[int, tuple[str, int, str]] = {}
        self._closed_ranks: set[int] = set()
        self._beats: dict[int, tuple[str, float]] = {}
        self._beat = 0
        self._previous_hook = sys.excepthook

    def wait_for_all(self, deadline: float) -> None:
        """Publish this rank and wait for the others; RuntimeError naming the missing ranks at the deadline."""
        group = self._group
        pid = os.getpid()
        self._store.set(f"member/{group.rank}", f"{self._host}\n{pid}\n{_process_start(pid) or ''}")
        keys = [f"member/{rank}" for rank in range(group.world)]
        try:
            self._store.wait(keys, timedelta(seconds=max(0.1, deadline - time.monotonic())))
        except RuntimeError:
            raise RuntimeError(
                f"parallel: rank {group.rank} waited in vain for {self._describe_missing(keys)} of WORLD_SIZE={group.world}; "
                "start every rank (torchrun does) or correct WORLD_SIZE"
            ) from None
        for rank, key in enumerate(keys):
            host, pid_text, started = self._store.get(key).decode().split("\n")
            self._members[rank] = (host, int(pid_text), started)

    def _describe_missing(self, keys: list[str]) -> str:
        try:
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        except RuntimeError:
            return "the other ranks, and rank 0 has given up"
        return f"rank(s) {missing}"

    def hook_exceptions(self) -> None:
        """From now on an exception nobody caught is told to the others, and this process ends at once: at the normal end
        of the interpreter it could hang in a collective that is still running. After torch's own hook, which it calls."""
        self._previous_hook = sys.excepthook

        def publish_and_exit(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            self._previous_hook(kind, error, trace)
            self._group.abort(error)
            leave_at_once(1)

        sys.excepthook = publish_and_exit

    def run(self) -> None:
        try:
            while not self._stop_event.wait(POLL_S):
                self._look()
        except RuntimeError as error:  # the store's connection broke
            if not self._stop_event.is_set():
                self._look_for_dead_neighbours()
                self._die(f"the rendezvous store is gone, so rank 0 or its launcher has ended ({first_line(error)})")

    def _look(self) -> None:
        if self._store.check(["failure"]):
            self._die(self._store.get("failure").decode())
        self._beat += 1
        state = f"{self._beat} {self._group.step} {self._group.num_collectives}"
        self._store.set(f"beat/{self._group.rank}", state)
        self._look_for_dead_neighbours()
        for rank, (host, pid, _) in self._members.items():
            if host == self._host or self._has_closed(rank):
                continue
            beat = self._read_beat(rank)
            now = time.monotonic()
            if rank not in self._beats or self._beats[rank][0] != beat:
                self._beats[rank] = (beat, now)
            elif now - self._beats[rank][1] > HEARTBEAT_TIMEOUT_S:
                self._die(
                    f"rank {rank} (pid {pid} on {host}) has been silent for {HEARTBEAT_TIMEOUT_S:.0f} s, "
                    f"at step {self._group.step} of this rank"
                )
        waiting = self.waiting
        if waiting is not None and time.monotonic() - waiting[1] > self._step_timeout_s:
            self._die(self._describe_stragglers(waiting[0]))

    def _look_for_dead_neighbours(self) -> None:
        for rank, (host, pid, started) in self._members.items():
            if host != self._host or not started or _process_start(pid) == started:
                continue
            try:
                if self._has_closed(rank):
                    continue
                if self._store.check(["failure"]):  # it said why before it ended
                    self._die(self._store.get("failure").decode())
            except RuntimeError:
                pass  # it hosted the store
            self._die(f"rank {rank} (pid {pid}) died without a word, at step {self._group.step} of this rank")

    def _has_closed(self, rank: int) -> bool:
        if rank not in self._closed_ranks and self._store.check([f"closed/{rank}"]):
            self._closed_ranks.add(rank)
        return rank in self._closed_ranks

    def _read_beat(self, rank: int) -> str:
        key = f"beat/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _describe_stragglers(self, collective: str) -> str:
        counts = {}
        for rank in self._members:
            beat = self._read_beat(rank).split()
            counts[rank] = int(beat[2]) if beat else 0
        most = max(counts.values())
        behind = [f"rank {rank} (collective {count} of {most})" for rank, count in counts.items() if count < most]
        return f"{collective} at step {self._group.step} has waited {self._step_timeout_s:.0f} s for " + (
            ", ".join(behind) or "its data; every rank has entered it"
        )

    def publish(self, reason: str) -> None:
        """Tell the other ranks why this one ends; the first reason counts."""
        self._stop_event.set()
        try:
            self._store.compare_set("failure", "", reason)
            if self._hosts_store:
                time.sleep(4 * POLL_S)  # the store ends with this process: let the others read it first
        except RuntimeError:
            pass  # no store, nobody to tell; they notice the dead store or the dead pid

    def _die(self, reason: str) -> None:
        text = f"mini_deepinfer: rank {self._group.rank} ends: {reason}\n"
        os.write(2, text.encode())
        self.publish(reason)
        os._exit(1)

    def let_it_name_the_culprit(self) -> None:
        """Called by the main thread after a failed collective: the thread normally ends the process in this time."""
        remote = any(host != self._host for host, _, _ in self._members.values())
        time.sleep(HEARTBEAT_TIMEOUT_S + 2 if remote else 4 * POLL_S)
        if self._stop_event.is_set():  # it is telling the others
            self.join(timeout=10)

    def stop(self) -> None:
        """Stop watching: this rank leaves in order."""
        self._stop_event.set()
        sys.excepthook = self._previous_hook
        self.join(timeout=5)

    def say_goodbye(self) -> None:
        """Tell the others that this rank has left; the host of the store stays until all have."""
        self._store.set(f"closed/{self._group.rank}", "1")
        if self._hosts_store:
            for rank in range(self._group.world):
                while not self._has_closed(rank):
                    host, pid, started = self._members[rank]
                    if host == self._host and started and _process_start(pid) != started:
                        break
                    time.sleep(0.05)


def _process_start(pid: int) -> str | None:
    """Start time of a running process, None if it has ended (or is a zombie): tells a pid from a reused one."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            fields = stat.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def leave_at_once(status: int) -> None:
    """End the process without the interpreter's clean-up, which could wait for a collective that nobody will join."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def first_line(error: BaseException) -> str:
    """What an error says, without the stack that libraries append."""
    return str(error).strip().partition("\n")[0]
