"""Ends a job of several processes, with a message and a non-zero exit, when one of them dies, stops or hangs.

Collectives wait for ever: if one process is gone, the others hang in the middle of a step. So each process tells the
others, through the job's key-value store, how far it is and what it is doing, a few times per `stall_seconds`; and each
judges what it reads. A process ends itself (exit code 75; 1 where an error of another's own is the cause) if

* another one has failed, and said so;
* another one has been silent for `stall_seconds`: killed, stopped (SIGSTOP), its machine gone;
* it has itself made no progress for a fifth more than `stall_seconds` since training began, and nobody is silent: a loader or
  a file system hangs somewhere, and what the others say they are doing tells where. While it compiles it is not asked for any.

Two threads, because a call to the store may hang too: one talks to it, the other judges by what the first has got. A process
that is killed or crashes can't speak for itself; a waiting shell, told of every step, says it (`LastWords`).
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import jax

from moejax.config import DistributedConfig
from moejax.distributed import key_value_store
from moejax.last_words import LastWords

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: nothing wrong with the input, the same command may be given again
_OWN_ERROR = (
    1  # what a process exits with after an error of its own: all do, or a scheduler would start the job again for ever
)
IN_STEP = "in the step"
_FOLDER = "moejax/watchdog"


class Fault(NamedTuple):
    """Why the processes of a job end: a message that names the rank, and the exit code of those that are not at fault."""

    text: str
    exit_code: int = EXIT_CODE

    def parting_words(self, rank: int) -> str:
        """What process number `rank` says when it ends because of it."""
        then = "; the same command continues from the newest checkpoint" if self.exit_code == EXIT_CODE else " too"
        return f"{self.text}. Rank {rank} ends{then}"


class Store(Protocol):
    """What is used of JAX's key-value store."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = ...) -> None: ...

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]: ...


class PeerError(RuntimeError):
    """Another process of the job failed, and took this one with it. The message names its rank and step."""

    def __init__(self, fault: Fault):
        super().__init__(fault.text)
        self.fault = fault


@contextlib.contextmanager
def watched(config: DistributedConfig) -> Iterator["Watchdog"]:
    """The watchdog of this process while the block runs; in a job of one process it watches nothing.

    An error that leaves the block is told to the other processes. One that may come from another process (a connection was
    closed in the middle of a collective) is replaced by what is known of that process.

    Raises:
      PeerError: instead of such an error.
    """
    if jax.process_count() == 1 or not config.stall_seconds:
        yield Watchdog(None, 0, 1, config.stall_seconds)
        return
    watchdog = Watchdog(key_value_store(), jax.process_index(), jax.process_count(), config.stall_seconds)
    watchdog.start()
    try:
        yield watchdog
    except BaseException as error:
        fault = watchdog.blame() if _may_come_from_a_peer(error) else None
        watchdog.leave(fault or Fault(_first_line(error), _OWN_ERROR))
        if fault is None:
            raise
        raise PeerError(fault) from error
    watchdog.leave()


class Watchdog:
    """Tells the others how far this process is, and judges how far they are.

    Args:
      store: the job's key-value store; None: alone, nothing to watch.
      rank, ranks: number of this process, and of all.
      stall_seconds: how long a process may be silent, and training without progress.
      end: called once, from a thread, with the fault; default: print it and end the process.
    """

    def __init__(
        self,
        store: Store | None,
        rank: int,
        ranks: int,
        stall_seconds: float,
        end: Callable[[Fault], Any] | None = None,
    ):
        self._store, self._rank, self._ranks = store, rank, ranks
        self._stall = stall_seconds
        self._interval = min(max(stall_seconds / 20, 0.05), 2.0)
        self._end = end or _print_and_exit
        self._done = threading.Event()
        self._ended = threading.Lock()  # taken once, by whoever ends the process
        self._training, self._compiles = False, False
        self._step, self._doing = 0, "starting"
        self._failed: Fault | None = None
        self._left = False
        self._progress = self._answered = time.monotonic()
        self._ticks = 0
        self._heard: dict[int, tuple[dict[str, Any], float]] = {}  # rank -> what it said last, and when that was new
        self._last_words: LastWords | None = None
        if end is None and store is not None:
            self._last_words = LastWords(
                f"rank {rank} ended without a word before its first step: killed, or aborted by a library, as when a second "
                "process joins with the number of another"
            )

    def start(self) -> None:
        """Begins to watch."""
        now = time.monotonic()
        self._progress = self._answered = now
        for loop in (self._talk, self._judge):
            threading.Thread(target=loop, name=f"watchdog{loop.__name__}", daemon=True).start()

    def doing(self, what: str, compiles: bool = False) -> None:
        """Notes what this process begins to do, such as "loading data": that is progress too.

        Args:
          compiles: it compiles a program, which takes the time it takes: as before training, only silence is judged until
            the next note.
        """
        self._doing, self._compiles = what, compiles
        self._progress = time.monotonic()

    def step(self, number: int) -> None:
        """Notes that training has begun, and that step `number` is finished (0: none yet)."""
        self._step, self._training, self._compiles = number, True, False
        self._progress = time.monotonic()
        if self._last_words is not None:
            self._last_words.be(
                f"rank {self._rank} ended without a word after step {number}: killed, or aborted by a library"
            )

    def leave(self, failed: Fault | None = None) -> None:
        """Ends the watch, and tells the others that this process has finished, or why it failed."""
        if self._store is None:
            return
        self._failed, self._left = failed, True
        self._tell(wait=True)
        if failed and self._rank == 0:
            self._let_others_end()
        self._done.set()
        if self._last_words is not None:
            self._last_words.end()

    def blame(self) -> Fault | None:
        """After an error in the middle of a step: what another process did, once it is known; None: nothing.

        Takes a few seconds: a killed process is recognised by its silence.
        """
        if self._store is None:
            return None
        self._doing = "leaving after an error"
        patience = 5 * self._interval + 1.0
        deadline = time.monotonic() + 2 * patience
        while time.monotonic() < deadline:
            if found := self._failed_peer() or self._silent_peer(patience):
                return found
            time.sleep(self._interval / 2)
        return None

    # One thread talks to the store, and may hang there.

    def _talk(self) -> None:
        while not self._done.wait(self._interval):
            self._tell()
            self._listen()

    def _tell(self, wait: bool = False) -> None:
        self._ticks += 1
        report = {"tick": self._ticks, "step": self._step, "doing": self._doing}
        report |= {"failed": self._failed, "left": self._left}  # a Fault becomes [text, exit code]
        store, key, text = self._store, f"{_FOLDER}/{self._rank}", json.dumps(report)
        assert store is not None
        with contextlib.suppress(Exception):  # an unreachable store is what `_answered` is for
            seconds = 2 * self._interval + 1.0 if wait else None
            _within(seconds, lambda: store.key_value_set(key, text, allow_overwrite=True))

    def _listen(self) -> None:
        assert self._store is not None
        try:
            entries = self._store.key_value_dir_get(_FOLDER)
        except Exception:
            return
        now = time.monotonic()
        self._answered = now
        for key, text in entries:
            rank, report = int(key.rpartition("/")[2]), json.loads(text)
            before = self._heard.get(rank)
            # Of a failure counts when it was first heard: rank 0 goes on ticking after its own, and would never be failed for long.
            if before is None or (before[0]["tick"] != report["tick"] and not before[0]["failed"]):
                self._heard[rank] = (report, now)

    # The other one judges.

    def _judge(self) -> None:
        last = time.monotonic()
        begun = last
        while not self._done.wait(self._interval):
            now = time.monotonic()
            if now - last > self._stall / 2:
                # This process was stopped, or the whole machine: what it knows of the others is as old. Listen again first.
                self._progress = self._answered = begun = now
                self._heard = {rank: (report, now) for rank, (report, _) in self._heard.items()}
            last = now
            fault = self._failed_peer(grace=2 * self._interval) or self._silent_peer(self._stall, begun)
            fault = fault or self._no_progress(now)
            if fault and not self._left and self._ended.acquire(blocking=False):
                if self._last_words is not None:
                    self._last_words.end()
                if self._rank == 0:
                    self._let_others_end()
                self._end(fault)
                return

    def _let_others_end(self) -> None:
        """Rank 0 keeps the store, and JAX aborts whoever still needs it: wait until the others have read why, and are gone.

        They hear of a failure within an interval, wait two more for a better reason, and judge once in each.
        """
        deadline = time.monotonic() + 20 * self._interval
        while (now := time.monotonic()) < deadline:
            if all(now - since > 4 * self._interval for rank, (_, since) in self._heard.items() if rank):
                return
            time.sleep(self._interval / 2)

    def _failed_peer(self, grace: float = 0.0) -> Fault | None:
        now = time.monotonic()
        for rank, (report, since) in sorted(self._heard.items()):
            if rank != self._rank and report["failed"] and now - since >= grace:
                failed = Fault(*report["failed"])  # of a third rank, if this one found out that it was its fault
                of_third = failed.text.startswith("rank ")
                return (
                    failed if of_third else Fault(f"rank {rank} failed {_at(report)}: {failed.text}", failed.exit_code)
                )
        return None

    def _silent_peer(self, seconds: float, begun: float | None = None) -> Fault | None:
        now = time.monotonic()
        if now - self._answered > seconds and self._rank:
            report = self._heard.get(0, ({"step": self._step, "doing": "starting"}, 0.0))[0]
            return Fault(
                f"rank 0, which keeps the job together, has not answered for {now - self._answered:.0f} s: killed, stopped or "
                f"out of reach {_at(report)}"
            )
        for rank in range(self._ranks):
            report, since = self._heard.get(rank, ({}, begun if begun is not None else now))
            silence = self._answered - since  # while the store does not answer, nobody can be heard
            if rank == self._rank or (report and report["left"]) or silence <= seconds:
                continue
            at = _at(report) if report else "before it began"
            return Fault(f"rank {rank} has been silent for {silence:.0f} s: killed, stopped or out of reach {at}")
        return None

    def _no_progress(self, now: float) -> Fault | None:
        # A little later than silence is noticed: of a process that was killed, its silence says more.
        if not self._training or self._compiles or now - self._progress <= self._stall + 4 * self._interval:
            return None
        reports = {rank: report for rank, (report, _) in sorted(self._heard.items())}
        reports[self._rank] = {"step": self._step, "doing": self._doing}
        slowest = min(report["step"] for report in reports.values())
        # Those who wait in the step wait for those who are elsewhere; if all are in it, for those with the fewest steps.
        suspects = [r for r, report in reports.items() if report["doing"] != IN_STEP and report["step"] == slowest]
        suspects = suspects or [r for r, report in reports.items() if report["step"] == slowest]
        named = ", ".join(f"rank {r} is {_at(reports[r])}" for r in suspects[:8])
        return Fault(
            f"no progress for {now - self._progress:.0f} s (distributed.stall_seconds={self._stall:g}): {named}"
        )


def _at(report: dict[str, Any]) -> str:
    return f"at step {report['step']} ({report['doing']})"


def _may_come_from_a_peer(error: BaseException) -> bool:
    """XLA's errors carry a status name; gloo's arrive as ValueError. A checkpoint is written by all together."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & {"JaxRuntimeError", "XlaRuntimeError", "CheckpointError"}:
        return True
    head = str(error).partition(":")[0]
    return isinstance(error, ValueError | RuntimeError) and head.isupper() and head.replace("_", "").isalpha()


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


def _within(seconds: float | None, call: Callable[[], Any]) -> None:
    """Runs a call that may hang; with `seconds`, waits no longer than that."""
    if seconds is None:
        call()
        return
    thread = threading.Thread(target=_quietly, args=(call,), daemon=True)
    thread.start()
    thread.join(seconds)


def _quietly(call: Callable[[], Any]) -> None:
    with contextlib.suppress(Exception):
        call()


def _print_and_exit(fault: Fault) -> None:
    sys.stdout.flush()
    print(f"error: {fault.parting_words(jax.process_index())}", file=sys.stderr)
    sys.stderr.flush()
    os._exit(fault.exit_code)
