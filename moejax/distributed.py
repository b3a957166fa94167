"""Several processes: JAX's own runtime, started from what a scheduler or the config says.

    with processes(config.distributed):   # before anything else touches JAX
        ...                               # jax.process_index(), jax.process_count(), jax.devices() of the whole job

Slurm, Open MPI and Kubernetes are found by JAX from their environment variables; elsewhere `distributed.coordinator`,
`.processes` and `.process` say it. One process drives one GPU unless `distributed.devices` says otherwise. What keeps a
job of several processes from hanging is in `training/watchdog.py`.
"""

import contextlib
import dataclasses
import glob
import logging
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

import jax

from moejax.config import DistributedConfig
from moejax.last_words import LastWords

logger = logging.getLogger(__name__)

GRACE_SECONDS = 30  # JAX ends a job by itself this long after our watchdog should have: the second line of defence
_NEVER_SECONDS = 10**7  # of a heartbeat, where the watchdog is turned off; the runtime takes 32 bits
_WAIT_MILLISECONDS = 10**9  # as long as it takes
_SHUTDOWN_SECONDS = 60  # processes that end well do so within this time of each other

_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")  # what JAX reads


class DistributedError(RuntimeError):
    """The processes of a job can't find each other. The message is for the user."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """How this process joins the job.

    Attributes:
      source: who said so: "config", "slurm", "ompi", "k8s" or "mpi4py".
      coordinator, processes, process: arguments of `jax.distributed.initialize`; None: JAX reads them from the scheduler.
      devices: local GPUs of this process; None: JAX's choice (the local rank under Slurm and MPI, else all).
    """

    source: str
    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None
    devices: tuple[int, ...] | None = None


@contextlib.contextmanager
def processes(config: DistributedConfig) -> Iterator[None]:
    """Joins the job this process belongs to, if any, and leaves it when the block ends well.

    Output of processes other than the first goes nowhere (errors excepted), so that a line is printed once; with
    MOEJAX_DEBUG=1 all print.

    Raises:
      DistributedError: half of what is needed is given, or the other processes can't be reached.
    """
    launch = find_launch(config)
    if launch is None:
        yield
        return
    _initialize(launch, config)
    with contextlib.ExitStack() as stack:
        if jax.process_index() and os.environ.get("MOEJAX_DEBUG", "0") in ("", "0"):
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        yield
        jax.distributed.shutdown()


def find_launch(config: DistributedConfig, environment: dict[str, str] | None = None) -> Launch | None:
    """How this process joins a job of several; None: it is alone.

    Args:
      config: what the user gave; complete settings win over a scheduler's.
      environment: default: `os.environ`.
    Raises:
      DistributedError: settings or a scheduler's variables that are there in part only; says what is missing.
    """
    env = dict(os.environ) if environment is None else environment
    given = {
        "coordinator": config.coordinator or env.get("JAX_COORDINATOR_ADDRESS"),
        "processes": config.processes,
        "process": config.process,
    }
    devices = _devices(config, env)
    if config.processes is not None or config.process is not None or config.coordinator is not None:
        return _given(given, config, devices, env)
    scheduler = _scheduler(config, env)
    if scheduler is None:
        return None
    return Launch(scheduler, coordinator=given["coordinator"], devices=devices)  # type: ignore[arg-type]


def missing_settings(config: DistributedConfig, coordinator: str | None = None) -> list[str]:
    """What has to be given beside what is: either all of coordinator, processes and process, or none."""
    values = {
        "distributed.coordinator": config.coordinator or coordinator,
        "distributed.processes": config.processes,
        "distributed.process": config.process,
    }
    return (
        [name for name, value in values.items() if value is None]
        if any(value is not None for value in (config.coordinator, config.processes, config.process))
        else []
    )


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


def _given(given: dict[str, Any], config: DistributedConfig, devices, env) -> Launch:
    if missing := missing_settings(config, env.get("JAX_COORDINATOR_ADDRESS")):
        there = [f"distributed.{name}={value}" for name, value in given.items() if value is not None]
        raise DistributedError(
            f"{' and '.join(there)} given, but not {' and '.join(missing)}: give all of coordinator, processes and process, "
            "or none of them under Slurm, Open MPI or Kubernetes"
        )
    host, colon, port = given["coordinator"].rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise DistributedError(
            f"distributed.coordinator is {given['coordinator']!r}: expected host:port, such as node001:12345"
        )
    if given["process"] >= given["processes"]:
        raise DistributedError(
            f"distributed.process is {given['process']}, but distributed.processes={given['processes']} are counted from 0"
        )
    if devices is None and config.devices == "auto" and (gpus := _visible_gpus(env)):
        devices = (given["process"] % gpus,)  # processes are numbered host by host
    return Launch("config", given["coordinator"], given["processes"], given["process"], devices)


def _scheduler(config: DistributedConfig, env: dict[str, str]) -> str | None:
    """Which scheduler started several processes of us, in the order in which JAX looks for them."""
    if config.cluster == "none":
        return None
    if config.cluster == "mpi4py":
        return "mpi4py"
    tasks = env.get("SLURM_NTASKS", "1")
    if "SLURM_PROCID" in env and tasks.isdecimal() and int(tasks) > 1:
        if missing := [name for name in _SLURM if name not in env]:
            raise DistributedError(
                f"Slurm gave this job {tasks} tasks, but {', '.join(missing)} is not set, as outside of srun: start with "
                "`srun python train.py …`, or set distributed.cluster=none to run as one process"
            )
        return "slurm"
    size = env.get("OMPI_COMM_WORLD_SIZE", "1")
    if size.isdecimal() and int(size) > 1:
        return "ompi"
    if "KUBERNETES_SERVICE_HOST" in env and "JOB_COMPLETION_INDEX" in env:
        return "k8s"
    return None


def _devices(config: DistributedConfig, env: dict[str, str]) -> tuple[int, ...] | None:
    """The GPUs that the user chose, or the only one there is; None: JAX's choice."""
    if config.devices == "all":
        return tuple(range(_visible_gpus(env))) or None
    if config.devices == "auto":
        # A scheduler that shows each process its own GPU only: it is number 0 there, whatever the local rank.
        return (0,) if _visible_gpus(env) == 1 else None
    numbers = config.devices.split(",")
    if not all(number.strip().isdecimal() for number in numbers):
        raise DistributedError(
            f"distributed.devices is {config.devices!r}: expected auto, all, or numbers with commas such as '0,1'"
        )
    return tuple(int(number) for number in numbers)


def _visible_gpus(env: dict[str, str]) -> int:
    """GPUs of this machine that CUDA would show, without starting it."""
    shown = env.get("CUDA_VISIBLE_DEVICES")
    if shown is not None:
        return len([name for name in shown.split(",") if name.strip() and not name.strip().startswith("-")])
    return len([path for path in glob.glob("/dev/nvidia*") if path.removeprefix("/dev/nvidia").isdecimal()])


def _initialize(launch: Launch, config: DistributedConfig) -> None:
    # Our watchdog speaks first, with the rank and the step; the runtime's heartbeat is there for when it can't.
    heartbeat = min(config.stall_seconds + GRACE_SECONDS, _NEVER_SECONDS) if config.stall_seconds else _NEVER_SECONDS
    methods = {"config": "deactivate", "mpi4py": "mpi4py"}
    # JAX aborts with a stack trace, from a thread of its own, where another process has this one's number.
    last_words = LastWords(
        f"{_who(launch)} was aborted while it joined the job. Was another process started with the same number? Each needs "
        "a distributed.process of its own"
    )
    # So it does when its time is over.
    timer = threading.Timer(config.start_seconds, _give_up, (launch, config, last_words))
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(
            coordinator_address=launch.coordinator,
            num_processes=launch.processes,
            process_id=launch.process,
            local_device_ids=launch.devices,
            cluster_detection_method=methods.get(launch.source),
            initialization_timeout=min(config.start_seconds + GRACE_SECONDS, _NEVER_SECONDS),
            heartbeat_timeout_seconds=heartbeat,
            shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
        )
    except Exception as error:
        raise DistributedError(_start_error(launch, error)) from error
    finally:
        timer.cancel()
        last_words.end()
    logger.info("process %d of %d, by %s", jax.process_index(), jax.process_count(), launch.source)


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
    if launch.source == "k8s" and "must be defined" in first or "should be defined" in first:
        return (
            "Kubernetes started this pod as one of an indexed Job, but JAX needs the package `kubernetes` to read the rest "
            "(pip install 'jax[k8s]'): install it, or give distributed.coordinator, .processes and .process "
            "(docs/distributed.md), or set distributed.cluster=none to run as one process"
        )
    return f"{_who(launch)} could not join the job: {first}"


def _who(launch: Launch) -> str:
    if launch.source != "config":
        return f"this process (found by {launch.source})"
    return f"process {launch.process} of {launch.processes}, coordinator {launch.coordinator}"
