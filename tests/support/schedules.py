"""Threads that take turns by a seeded choice: every run of a seed is the same, and no clock decides anything.

`SeededThreads(seed)` stands in for the `threading` module inside the code under test. Its threads are real, but exactly one runs
at any time, and it hands over only where code locks, waits, notifies, starts or joins, or calls `pause` (a delay).
Which one goes on is drawn from the seed, in one of three manners: uniformly, mostly the same one again, or by priorities
that change now and then (the manner that finds orders which uniform draws practically never produce).
A state in which nobody can go on is a deadlock: it is raised in every thread, with what each waits for.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

_STICKY_CHANCE = 0.9
_CHANGE_CHANCE = 0.02


class DeadlockError(BaseException):
    """No thread can go on."""


class _Task:
    def __init__(self, name: str, priority: float) -> None:
        self.name = name
        self.priority = priority
        self.turn = threading.Semaphore(0)
        self.waits_for: object | None = None
        self.done = False


class SeededThreads:
    """A replacement of `threading`: `Condition`, `Lock`, `Event` and `Thread` of this schedule."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._manner = self._random.choice(["uniform", "sticky", "priorities"])
        self._me = threading.local()
        self._tasks = [_Task("main", self._random.random())]
        self._me.task = self._tasks[0]
        self._deadlock: str | None = None
        self.switches = 0

    def pause(self, times: int = 1) -> None:
        """Let others run: a delay of `times` turns."""
        for _ in range(times):
            self.switch()

    @property
    def unfinished(self) -> list[str]:
        """Threads that have not ended, the caller left out."""
        return [task.name for task in self._tasks if not task.done and task is not self._me.task]

    def Condition(self) -> _Condition:  # noqa: N802 - stands in for the class of that name
        """A condition variable with a lock of its own."""
        return _Condition(self)

    Lock = Condition

    def Event(self) -> _Event:  # noqa: N802
        """A flag that can be waited for."""
        return _Event(self)

    def Thread(  # noqa: N802
        self, *, target: Callable[..., None], args: tuple[Any, ...] = (), name: str = "thread", daemon: bool = True
    ) -> _Thread:
        """A thread of the schedule; it must be joined or end."""
        assert daemon
        return _Thread(self, lambda: target(*args), name)

    def switch(self) -> None:
        """Hand over to whoever is drawn, possibly the caller."""
        me: _Task = self._me.task
        if self._deadlock is not None:
            raise DeadlockError(self._deadlock)
        ready = [task for task in self._tasks if not task.done and task.waits_for is None]
        if not ready:
            waiting = [f"{task.name} waits for {task.waits_for}" for task in self._tasks if not task.done]
            if not waiting:
                return
            self._deadlock = "; ".join(waiting)
            for task in self._tasks:
                if not task.done and task is not me:
                    task.turn.release()
            if me.done:
                return
            raise DeadlockError(self._deadlock)
        chosen = self._draw(ready, me)
        if chosen is me:
            return
        self.switches += 1
        chosen.turn.release()
        if not me.done:
            me.turn.acquire()
            if self._deadlock is not None:
                raise DeadlockError(self._deadlock)

    def block(self, on: object) -> None:
        """Wait until `wake(on)`."""
        self._me.task.waits_for = on
        self.switch()

    def wake(self, on: object) -> None:
        """Let everyone who waits for `on` be drawn again."""
        for task in self._tasks:
            if task.waits_for is on:
                task.waits_for = None

    def adopt(self, body: Callable[[], None], name: str) -> _Task:
        """Start a real thread that waits for its turn."""
        task = _Task(name, self._random.random())
        self._tasks.append(task)

        def run() -> None:
            self._me.task = task
            task.turn.acquire()
            try:
                if self._deadlock is None:
                    body()
            except DeadlockError:
                pass
            finally:
                task.done = True
                self.wake(task)
                self.switch_from_the_dead()

        threading.Thread(target=run, name=name, daemon=True).start()
        return task

    def switch_from_the_dead(self) -> None:
        """Hand over for good."""
        if self._deadlock is None:
            self.switch()

    def _draw(self, ready: list[_Task], me: _Task) -> _Task:
        if self._manner == "uniform":
            return self._random.choice(ready)
        if self._manner == "sticky":
            return me if me in ready and self._random.random() < _STICKY_CHANCE else self._random.choice(ready)
        if self._random.random() < _CHANGE_CHANCE:
            self._random.choice(ready).priority = self._random.random()
        # A pause of the one with the highest priority is a delay all the same: sometimes another one runs.
        if self._random.random() < 0.2:
            return self._random.choice(ready)
        return max(ready, key=lambda task: task.priority)


class _Condition:
    def __init__(self, threads: SeededThreads) -> None:
        self._threads = threads
        self._held = False

    def __enter__(self) -> _Condition:
        self._threads.switch()
        assert not self._held, "nobody hands over while holding a lock"
        self._held = True
        return self

    def __exit__(self, *_error: object) -> None:
        self._held = False
        if _error[0] is None:
            self._threads.switch()

    def wait_for(self, predicate: Callable[[], bool]) -> bool:
        """Release the lock until `predicate` holds."""
        while not predicate():
            self._held = False
            self._threads.block(self)
            assert not self._held
            self._held = True
        return True

    def notify_all(self) -> None:
        """Wake all waiters."""
        assert self._held, "notified without the lock"
        self._threads.wake(self)


class _Event:
    def __init__(self, threads: SeededThreads) -> None:
        self._changed = _Condition(threads)
        self._set = False

    def set(self) -> None:
        """Raise the flag."""
        with self._changed:
            self._set = True
            self._changed.notify_all()

    def is_set(self) -> bool:
        """Whether it is raised."""
        return self._set

    def wait(self) -> bool:
        """Wait until it is raised."""
        with self._changed:
            return self._changed.wait_for(self.is_set)


class _Thread:
    def __init__(self, threads: SeededThreads, body: Callable[[], None], name: str) -> None:
        self._threads, self._body, self._name = threads, body, name
        self._task: _Task | None = None

    def start(self) -> None:
        """Begin; the new thread may run at once."""
        self._task = self._threads.adopt(self._body, self._name)
        self._threads.switch()

    def join(self) -> None:
        """Wait for its end."""
        assert self._task is not None
        while not self._task.done:
            self._threads.block(self._task)
