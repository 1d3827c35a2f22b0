"""Runs tasks in several processes: one that raises, dies or hangs is told of and given up, and the others go on.

A kernel that deadlocks can only be ended with its process, which concurrent.futures would take the whole pool for.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

# Seconds after which a task is taken for hung; compiling the slowest kernel takes a tenth of them.
TASK_SECONDS = 60.0
# A process has imported torch by then, even while a dozen others do.
START_SECONDS = 120.0
# More do not compile faster, and each holds a context of its own on the GPU; the others are left to this process.
MOST_JOBS = 14
SPARE_CORES = 2
# Processes that do not even start are not a task's fault: after so many the run is ended.
LOST_STARTS = 3

# (function, argument): the function is one that pickle finds by its name.
Task = tuple[Callable[[Any], object], Any]


@dataclass(frozen=True)
class Outcome:
    """A task's value, or why there is none; `fatal` where its process died or had to be killed."""

    task: Task
    value: Any = None
    error: str = ""
    fatal: bool = False


def default_jobs() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST_JOBS, cores - SPARE_CORES))


def run_tasks(
    chains: Iterable[Iterable[Task]], jobs: int, seconds: float = TASK_SECONDS
) -> Generator[Outcome, None, None]:
    """Outcomes as they come. Tasks of a chain run one after the other, in one process as long as that lives: what one
    of them compiled the next ones find. Closing the iterator ends all processes."""
    waiting = deque(deque(chain) for chain in chains)
    waiting = deque(chain for chain in waiting if chain)
    workers = [Worker() for _ in range(min(jobs, len(waiting)))]
    lost = 0
    try:
        while workers:
            deadline = min(worker.deadline for worker in workers)
            wait([worker.connection for worker in workers], max(0.0, deadline - time.monotonic()))
            for place, worker in enumerate(workers):
                outcome = worker.poll()
                if outcome is not None:
                    yield outcome
                if worker.gone:
                    lost += not worker.started
                    if lost >= LOST_STARTS:
                        raise RuntimeError(f"expected processes for tasks to start, but {lost} of them ended before")
                    worker.stop()
                    if worker.chain:
                        waiting.appendleft(worker.chain)
                    workers[place] = Worker() if waiting else worker
                elif worker.idle:
                    worker.take(waiting, seconds)
            workers = [worker for worker in workers if not worker.gone]
    finally:
        for worker in workers:
            worker.stop()


class Worker:
    """A process, the task it is at, and the chain it is to go on with."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.task: Task | None = None
        self.chain: deque[Task] = deque()
        self.started = self.gone = False
        self.deadline = time.monotonic() + START_SECONDS

    @property
    def idle(self) -> bool:
        return self.started and self.task is None

    def poll(self) -> Outcome | None:
        """What has become of the task since; marks the worker as gone where its process is, or must not go on."""
        if not self.connection.poll():
            return None if time.monotonic() < self.deadline else self.ended("hangs: no answer within its time limit")
        try:
            value, error, usable = self.connection.recv()
        except (EOFError, OSError):
            self.process.join(1.0)
            return self.ended(f"its process ended with exit code {self.process.exitcode}")
        task, self.task, self.started, self.gone = self.task, None, True, not usable
        return None if task is None else Outcome(task, value, error)

    def ended(self, why: str) -> Outcome | None:
        task, self.task, self.gone = self.task, None, True
        return None if task is None else Outcome(task, None, why, True)

    def take(self, waiting: deque[deque[Task]], seconds: float) -> None:
        """The next task of the own chain, or of the next one; without any the process is ended."""
        if not self.chain and waiting:
            self.chain = waiting.popleft()
        if not self.chain:
            self.stop()
            return
        self.task = self.chain.popleft()
        self.deadline = time.monotonic() + seconds
        try:
            self.connection.send(self.task)
        except OSError:  # it died while it was idle, which `poll` will tell of as the end of this task
            self.deadline = time.monotonic()

    def stop(self) -> None:
        self.gone = True
        self.process.kill()
        self.process.join()
        self.connection.close()


def serve(connection: Connection) -> None:
    """What a process does: tasks as they come, until one leaves the device unusable."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted, too, and ends its processes
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    usable = True
    connection.send((None, "", usable))
    while usable:
        try:
            function, argument = connection.recv()
        except EOFError:
            return
        value, error = None, ""
        try:
            value = function(argument)
        except Exception as raised:
            error = first_line(raised)
            usable = device_usable()
        connection.send((value, error, usable))


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def device_usable() -> bool:
    """Whether CUDA still answers; where it was never used there is nothing to spoil."""
    if not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True
