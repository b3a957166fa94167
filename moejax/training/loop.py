"""The training loop: next batch, step, metrics, checkpoint, until the last step or an interrupt."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from moejax.checkpoint import Checkpoints, first_non_finite
from moejax.config import Config
from moejax.data.placement import place_batch
from moejax.training.metrics import MetricLog, Progress, step_record
from moejax.training.state import TrainState
from moejax.training.step import first_bad_gradient, split_batch
from moejax.training.watchdog import IN_STEP, Watchdog


class TrainingError(RuntimeError):
    """Training can't go on. The message is one line for the user."""


def fit(
    state: TrainState,
    step_fn: Callable,
    batches: Any,
    checkpoints: Checkpoints,
    log: MetricLog,
    progress: Progress,
    config: Config,
    mesh: jax.sharding.Mesh | None = None,
    watchdog: Watchdog | None = None,
    interrupts: "Interrupts | None" = None,
) -> TrainState | None:
    """Trains from `state` to `config.training.steps`.

    SIGINT and SIGTERM end the step that runs, save, and return; a second one ends the process at once. In a job of several
    processes one signal to one process is enough: they agree on the step to stop at.

    Args:
      state: the state to continue from; its arrays are given to the step, do not use them afterwards.
      step_fn: the compiled step (`step.py`).
      batches: iterator of (rows, L) int32 batches with `get_state()`, standing at this state's position; the rows of every
        global batch that this process loads (`data.placement.local_rows`).
      checkpoints, log, progress: what is written and shown.
      mesh: what the batches are spread over; None: one device.
      watchdog: is told how far training is.
      interrupts: where the signal that ended the run is found afterwards.
    Returns:
      The final state, or None if the run was interrupted (its state is in the checkpoint).
    Raises:
      TrainingError: loss or gradients of a step are not finite: names the step and the first bad leaf.
      CheckpointError: a checkpoint can't be written, or the state is not finite.
    """
    total, first = config.training.steps, int(state.step)
    every = config.checkpoint.every_steps
    micro_batches = config.training.micro_batches
    started = 0.0
    watchdog = watchdog or Watchdog(None, 0, 1, 0)

    def finish(metrics: dict[str, jax.Array], number: int) -> None:
        """Waits for a step and writes it down. One step behind the device, so that it never waits for us."""
        nonlocal started
        fetched = {name: np.asarray(value) for name, value in jax.device_get(metrics).items()}
        if not fetched["finite"]:
            bad = first_non_finite(state) or first_bad_gradient_name(fetched, state)
            raise TrainingError(
                f"step {number}: {bad} is not finite (loss {float(fetched['loss']):.4g}); this step was not saved"
            )
        now = time.monotonic()
        with_load = number % config.log.every_steps == 0 or number in (1, total)
        record = step_record(number, fetched, now - started, with_load=with_load)
        started = now
        watchdog.step(number)
        log.write(record)
        progress.update(record)

    with interrupts or Interrupts() as interrupts, progress:
        if every and first == 0 and not checkpoints.steps():
            # a full disk shows before the first step, not after the hundredth
            watchdog.doing("saving checkpoint 0")
            checkpoints.save(0, state, batches.get_state())
        pending = None
        watchdog.step(first)
        started = time.monotonic()
        for number in range(first + 1, total + 1):
            watchdog.doing("loading data")
            batch = place_batch(
                split_batch(next(batches), micro_batches), mesh, config.training.global_batch // micro_batches
            )
            watchdog.doing(IN_STEP)
            state, metrics = step_fn(state, batch)
            if pending is not None:
                finish(*pending)
            pending = (metrics, number)
            due = number == total or (every and number % every == 0)
            stop = interrupts.stop_after(number)
            if due or stop:
                finish(*pending)
                pending = None
                log.flush()  # a checkpoint never knows more steps than the metrics
                watchdog.doing(f"saving checkpoint {number}")
                checkpoints.save(number, state, batches.get_state())
            if stop and number < total:
                checkpoints.wait()
                note = f"{stop}: saved step {number} of {total}. The same command continues from there"
                progress.say(f"{note} (exit code {interrupts.exit_code}).")
                return None
        watchdog.doing("waiting for the last checkpoint")
        checkpoints.wait()
    return state


def first_bad_gradient_name(metrics: dict[str, np.ndarray], state: TrainState) -> str:
    """What was not finite although the state is: a gradient, by name, or the loss."""
    name = first_bad_gradient(metrics, state.params)
    return f"the gradient of params.{name}" if name else "the loss or the norm of all gradients"


class Interrupts:
    """While active, remembers the first SIGINT or SIGTERM in `received`; a second one acts as it would without us.

    In a job of several processes SIGTERM is left to JAX, whose processes agree on the step to stop at, and SIGINT becomes one.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self.exit_code = 0  # of a run that a signal ended: 128 + its number, as shells have it
        self._agreed = jax.process_count() > 1
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupts":
        for number in (signal.SIGINT,) if self._agreed else (signal.SIGINT, signal.SIGTERM):
            try:
                self._before[number] = signal.signal(number, self._note)
            except ValueError:  # not the main thread: the caller's program owns signals
                break
        return self

    def __exit__(self, *_) -> None:
        self._restore()

    def stop_after(self, step: int) -> str | None:
        """The name of the signal, if this step is to be the last. In a job of several, all call it at every step."""
        if self._agreed and multihost_utils.reached_preemption_sync_point(step):
            self._set(signal.SIGINT if self.received == "SIGINT" else signal.SIGTERM)
            return self.received
        return None if self._agreed else self.received

    def _note(self, number: int, _frame: Any) -> None:
        self._set(signal.Signals(number))
        self._restore()
        if self._agreed:
            os.kill(os.getpid(), signal.SIGTERM)

    def _set(self, number: signal.Signals) -> None:
        self.received, self.exit_code = number.name, 128 + number

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
