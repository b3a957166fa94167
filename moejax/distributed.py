"""Several processes: JAX's own runtime, started from what a scheduler or the config says.

    with processes(config.distributed):   # before anything else touches JAX
        ...                               # jax.process_index(), jax.process_count(), jax.devices() of the whole job

Slurm, Open MPI and Kubernetes are found by JAX from their environment variables; elsewhere `distributed.coordinator`,
`.processes` and `.process` say it (`launch.py`). One process drives one GPU unless `distributed.devices` says otherwise.
What keeps a job of several processes from hanging is in `training/watchdog.py`.
"""

import contextlib
import dataclasses
import logging
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

import jax

from moejax import coordinator
from moejax.config import DistributedConfig
from moejax.last_words import LastWords
from moejax.launch import DistributedError, Launch, find_launch

logger = logging.getLogger(__name__)

GRACE_SECONDS = 30  # JAX ends a job by itself this long after our watchdog should have: the second line of defence
_NEVER_SECONDS = 10**7  # of a heartbeat, where the watchdog is turned off; the runtime takes 32 bits
_WAIT_MILLISECONDS = 10**9  # as long as it takes
_METHODS = {
    "config": "deactivate",
    "mpi4py": "mpi4py",
}  # how JAX finds a job; others by itself, in the order of `launch.py`
_SHUTDOWN_SECONDS = 60  # processes that end well do so within this time of each other


@contextlib.contextmanager
def processes(config: DistributedConfig) -> Iterator[None]:
    """Joins the job this process belongs to, if any, and leaves it when the block ends well.

    Output of processes other than the first goes nowhere (errors excepted), so that a line is printed once; with
    MOEJAX_DEBUG=1 all print.

    Raises:
      DistributedError: half of what is needed is given, another job is at the coordinator, or the other processes can't be
        reached.
    """
    launch = find_launch(config)
    if launch is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        _initialize(launch, config, stack)
        if jax.process_index() and os.environ.get("MOEJAX_DEBUG", "0") in ("", "0"):
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        yield
        jax.distributed.shutdown()


def exit_process(code: int) -> NoReturn:
    """Ends this process with `code`. After an error in a job of several, at once: JAX's own exit waits for the others."""
    if code and jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def key_value_store() -> Any:
    """The job's key-value store, which process 0 holds (JAX's coordination service).

    JAX has no public name for it; this is the only place that uses the private one.
    """
    from jax._src import distributed

    return distributed.global_state.client


def agree(value: int) -> int:
    """The value of process 0, in every process. All must call it."""
    if jax.process_count() == 1:
        return value
    import numpy as np
    from jax.experimental import multihost_utils

    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def of_first(name: str, text: str) -> str:
    """The text that process 0 gave under this name, in every process. All must call it; a name is used once."""
    if jax.process_count() == 1:
        return text
    store = key_value_store()
    if jax.process_index() == 0:
        store.key_value_set(f"moejax/of_first/{name}", text)
        return text
    # Whoever waits here is watched: should process 0 never come, the watchdog ends the wait.
    return str(store.blocking_key_value_get(f"moejax/of_first/{name}", _WAIT_MILLISECONDS))


def barrier(name: str) -> None:
    """Waits until every process is here."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)


def _initialize(launch: Launch, config: DistributedConfig, stack: contextlib.ExitStack) -> None:
    """Joins the job; `stack` holds this process's place in it."""
    # Our watchdog speaks first, with the rank and the step; the runtime's heartbeat is there for when it can't.
    heartbeat = min(config.stall_seconds + GRACE_SECONDS, _NEVER_SECONDS) if config.stall_seconds else _NEVER_SECONDS
    last_words = LastWords(_if_aborted(launch))
    # JAX aborts when its time is over, too.
    timer = threading.Timer(config.start_seconds, _give_up, (launch, config, last_words))
    timer.daemon = True
    timer.start()
    try:
        launch = _resolved(launch, config)
        last_words.be(_if_aborted(launch))
        if launch.coordinator is not None and launch.process is not None:
            stack.enter_context(coordinator.place(launch))
        jax.distributed.initialize(
            coordinator_address=launch.coordinator,
            num_processes=launch.processes,
            process_id=launch.process,
            local_device_ids=launch.devices,
            cluster_detection_method=_METHODS.get(launch.source),
            initialization_timeout=min(config.start_seconds + GRACE_SECONDS, _NEVER_SECONDS),
            heartbeat_timeout_seconds=heartbeat,
            shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
        )
    except DistributedError:
        raise
    except Exception as error:
        raise DistributedError(_start_error(launch, error)) from error
    finally:
        timer.cancel()
        last_words.end()
    logger.info("process %d of %d, by %s", jax.process_index(), jax.process_count(), launch.source)


def _resolved(launch: Launch, config: DistributedConfig) -> Launch:
    """With the coordinator and the numbers that JAX finds for a scheduler's job; None where it finds none.

    JAX has no public name for it; this is the only place that uses the private one.
    """
    if launch.source == "config":
        return launch
    from jax._src.clusters import ClusterEnv

    address, processes, process, _ = ClusterEnv.auto_detect_unset_distributed_params(
        launch.coordinator, None, None, (), _METHODS.get(launch.source), config.start_seconds
    )
    return dataclasses.replace(launch, coordinator=address, processes=processes, process=process)


def _if_aborted(launch: Launch) -> str:
    """JAX aborts with a stack trace, from a thread of its own, where another process has this one's number."""
    return (
        f"{_who(launch)} was aborted while it joined the job. Was another process started with the same number, or is another "
        "job at that coordinator? Each process needs a distributed.process of its own, and each job a port"
    )


def _give_up(launch: Launch, config: DistributedConfig, last_words: LastWords) -> None:
    text = (
        f"{_who(launch)}: not all processes of the job were there within distributed.start_seconds={config.start_seconds}. "
        "Were all started, each with a number of its own and all with the same coordinator, and is its port free and open?"
    )
    last_words.end()
    print(f"error: {text}", file=sys.stderr, flush=True)
    os._exit(1)


def _start_error(launch: Launch, error: Exception) -> str:
    first = next(iter(str(error).splitlines()), type(error).__name__)[:300]
    if launch.source == "k8s" and ("must be defined" in first or "should be defined" in first):
        return (
            "Kubernetes started this pod as one of an indexed Job, but JAX needs the package `kubernetes` to read the rest "
            "(pip install 'jax[k8s]'): install it, or give distributed.coordinator, .processes and .process "
            "(docs/distributed.md), or set distributed.cluster=none to run as one process"
        )
    return f"{_who(launch)} could not join the job: {first}"


def _who(launch: Launch) -> str:
    if launch.process is None:
        return f"this process (found by {launch.source})"
    return f"process {launch.process} of {launch.processes}, coordinator {launch.coordinator}"
