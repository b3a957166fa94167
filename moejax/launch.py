"""How this process joins a job of several: what the config, or a scheduler's environment variables, say.

Reads only; `distributed.py` does the joining. JAX reads the same variables, but takes a job that is described in part for
none, and so would train alone, or for another scheduler's: here each variable that is missing or no number is named.
"""

import dataclasses
import glob
import os
import re

from moejax.config import DistributedConfig

# What JAX reads of each: the number of processes, this one's, and more numbers.
_OMPI = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
_SLURM = ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_JOB_ID")
_SLURM_STEP = "SLURM_STEP_NODELIST"  # and this; set in the tasks of `srun` only

_HOST_PORT = re.compile(r"(?:[\w.-]+|\[[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*(?:%[\w.-]+)?\]):(\d{1,5})", re.ASCII)
_THREE = "distributed.coordinator, .processes and .process"
_ALONE = "set distributed.cluster=none to run as one process"


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


def find_launch(config: DistributedConfig, environment: dict[str, str] | None = None) -> Launch | None:
    """How this process joins a job of several; None: it is alone.

    Args:
      config: what the user gave; complete settings win over a scheduler's.
      environment: default: `os.environ`.
    Raises:
      DistributedError: settings or a scheduler's variables that are there in part only, or are no numbers; says which.
    """
    env = dict(os.environ) if environment is None else environment
    devices = _devices(config, env)
    if config.processes is not None or config.process is not None or config.coordinator is not None:
        return _given(config, devices, env)
    if config.cluster == "none":
        return None
    address = env.get("JAX_COORDINATOR_ADDRESS") or None
    if address is not None:
        check_address("JAX_COORDINATOR_ADDRESS", address)
    scheduler = "mpi4py" if config.cluster == "mpi4py" else _scheduler(env)
    if scheduler is not None:
        return Launch(scheduler, coordinator=address, devices=devices)
    if address is not None:
        raise DistributedError(
            f"JAX_COORDINATOR_ADDRESS={address} is set, but not distributed.processes and distributed.process: give both, "
            f"unset it, or {_ALONE}"
        )
    return None


def check_address(name: str, address: str) -> tuple[str, int]:
    """Host and port of a coordinator; `name` says where it was given.

    Raises:
      DistributedError: it is not of the form host:port, with an IPv6 address in brackets.
    """
    found = _HOST_PORT.fullmatch(address)
    if not found or not 0 < int(found[1]) < 1 << 16:
        raise DistributedError(
            f"{name} is {address!r}: expected host:port, such as node001:12345 or [2001:db8::1]:12345"
        )
    return address.rpartition(":")[0].strip("[]"), int(found[1])


def _given(config: DistributedConfig, devices: tuple[int, ...] | None, env: dict[str, str]) -> Launch:
    coordinator = config.coordinator or env.get("JAX_COORDINATOR_ADDRESS") or None
    values = {"coordinator": coordinator, "processes": config.processes, "process": config.process}
    if missing := [f"distributed.{name}" for name, value in values.items() if value is None]:
        there = [f"distributed.{name}={value}" for name, value in values.items() if value is not None]
        raise DistributedError(
            f"{' and '.join(there)} given, but not {' and '.join(missing)}: give all of coordinator, processes and process, "
            "or none of them under Slurm, Open MPI or Kubernetes"
        )
    assert coordinator is not None and config.processes is not None and config.process is not None
    check_address("distributed.coordinator" if config.coordinator else "JAX_COORDINATOR_ADDRESS", coordinator)
    if config.process >= config.processes:
        raise DistributedError(
            f"distributed.process is {config.process}, but distributed.processes={config.processes} are counted from 0"
        )
    if devices is None and config.devices == "auto" and (gpus := _visible_gpus(env)):
        devices = (config.process % gpus,)  # processes are numbered host by host
    return Launch("config", coordinator, config.processes, config.process, devices)


def _scheduler(env: dict[str, str]) -> str | None:
    """Which scheduler started several processes of us. MPI first: its `mpirun` is often given inside of a Slurm job."""
    if any(name in env for name in _OMPI):
        return "ompi" if _several(env, _OMPI, f"start with `mpirun -n N python train.py …`, or {_ALONE}") else None
    in_step = all(env.get(name) for name in (*_SLURM, _SLURM_STEP))
    if not in_step and ("PMI_SIZE" in env or "PMI_RANK" in env):  # `srun --mpi=pmi2` sets them too, beside its own
        if _several(env, ("PMI_SIZE", "PMI_RANK"), f"give {_THREE}, or {_ALONE}"):
            raise DistributedError(
                f"PMI_SIZE={env['PMI_SIZE']}: MPICH, Intel MPI or the like started several processes. They find each other "
                f"with distributed.cluster=mpi4py and the package mpi4py: set that, give {_THREE}, or {_ALONE}"
            )
        return None
    if _slurm(env, in_step):
        return "slurm"
    if "JOB_COMPLETION_INDEX" in env:
        _number(env, "JOB_COMPLETION_INDEX")
        if "KUBERNETES_SERVICE_HOST" not in env:
            raise DistributedError(
                "JOB_COMPLETION_INDEX is set, as in a pod of an indexed Job of Kubernetes, but KUBERNETES_SERVICE_HOST is "
                f"not: give {_THREE}, or {_ALONE}"
            )
        return "k8s"
    return None


def _slurm(env: dict[str, str], in_step: bool) -> bool:
    """Whether `srun` started several tasks.

    A batch script and the shell of `salloc` have SLURM_NTASKS too, if tasks were asked for; a batch script has
    SLURM_PROCID=0 besides. A single process there is a forgotten `srun` more often than it is meant: refused.
    """
    advice = f"start with `srun python train.py …`, or {_ALONE}"
    if "SLURM_NTASKS" not in env:
        if _number(env, "SLURM_PROCID", default=0):
            raise DistributedError(f"SLURM_PROCID={env['SLURM_PROCID']} is set, but no SLURM_NTASKS: {advice}")
        return False
    several = _several(env, _SLURM, advice, words=(_SLURM_STEP,))
    if several and _number(env, "SLURM_STEP_NUM_TASKS", default=2) == 1:  # where `salloc` runs its shell as a step
        raise DistributedError(
            f"SLURM_NTASKS={env['SLURM_NTASKS']}, but SLURM_STEP_NUM_TASKS=1, as in the shell of salloc: {advice}"
        )
    return several


def _several(env: dict[str, str], numbers: tuple[str, ...], advice: str, words: tuple[str, ...] = ()) -> bool:
    """Whether a launcher's variables tell of several processes.

    Args:
      numbers: names of the variables that must be numbers: of processes, of this process, and others.
      advice: what to do where one is missing.
      words: names of others that must be there.
    Raises:
      DistributedError: one is no number; or there are several processes, and one is missing.
    """
    size, rank = numbers[:2]
    if size in env and _number(env, size, low=1) == 1:
        return False
    needed = (*numbers, *words)
    if missing := [name for name in needed if not env.get(name)]:
        there = ", ".join(f"{name}={env[name]}" for name in needed if env.get(name))
        raise DistributedError(f"found {there or 'nothing'} of a job, but no {' and no '.join(missing)}: {advice}")
    for name in numbers:
        _number(env, name)
    if int(env[rank]) >= int(env[size]):
        raise DistributedError(f"{rank} is {env[rank]}, but {size}={env[size]} are counted from 0: {advice}")
    return True


def _number(env: dict[str, str], name: str, low: int = 0, default: int | None = None) -> int:
    if name not in env and default is not None:
        return default
    text = env[name].strip()
    if not (text.isascii() and text.isdecimal() and len(text) < 20) or int(text) < low:
        raise DistributedError(f"{name} is {env[name]!r}: expected a number from {low} on; {_ALONE}")
    return int(text)


def _devices(config: DistributedConfig, env: dict[str, str]) -> tuple[int, ...] | None:
    """The GPUs that the user chose, or the only one there is; None: JAX's choice."""
    if config.devices == "all":
        return tuple(range(_visible_gpus(env))) or None
    if config.devices == "auto":
        # A scheduler that shows each process its own GPU only: it is number 0 there, whatever the local rank.
        return (0,) if _visible_gpus(env) == 1 else None
    texts = [text.strip() for text in config.devices.split(",")]
    numbers = tuple(int(text) for text in texts if text.isascii() and text.isdecimal())
    if len(numbers) < len(texts) or len(set(numbers)) < len(numbers):
        raise DistributedError(
            f"distributed.devices is {config.devices!r}: expected auto, all, or different numbers with commas such as '0,1'"
        )
    return numbers


def _visible_gpus(env: dict[str, str]) -> int:
    """GPUs of this machine that CUDA would show, without starting it."""
    shown = env.get("CUDA_VISIBLE_DEVICES")
    if shown is not None:
        return len([name for name in shown.split(",") if name.strip() and not name.strip().startswith("-")])
    return len([path for path in glob.glob("/dev/nvidia*") if path.removeprefix("/dev/nvidia").isdecimal()])
