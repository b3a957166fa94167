"""One job at a coordinator's port: checked before JAX's runtime is started, which does not.

JAX's server shares its port with any other of its kind (SO_REUSEPORT). A process of a second job then reaches the server of
the first, under the number of one of its processes, and JAX aborts the first job; a port that another program holds ends in
a segmentation fault. So process 0 looks whether the port is free, and every process takes its number at the coordinator,
which keeps a second one with that number on the same machine from joining.
"""

import contextlib
import errno
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterator

from moejax.launch import DistributedError, Launch, check_address

_ANSWER_SECONDS = 2  # within which a server that is there accepts a connection


@contextlib.contextmanager
def place(launch: Launch) -> Iterator[None]:
    """Holds the number of this process at its coordinator, while the block runs or until the process is gone.

    Raises:
      DistributedError: another process of this machine holds it, or the port of process 0 is in use. Names host:port.
    """
    assert launch.coordinator is not None and launch.process is not None
    host, port = check_address("the coordinator", launch.coordinator)
    with contextlib.ExitStack() as stack:
        if sys.platform == "linux":
            holder = stack.enter_context(socket.socket(socket.AF_UNIX))
            _hold(holder, f"\0moejax/{_same_for_all_names(host)}:{port}/{launch.process}", launch)
        if launch.process == 0:
            _require_free(host, port, launch)
        yield


def _hold(holder: socket.socket, name: str, launch: Launch) -> None:
    """Binds an abstract name: the kernel gives it once per network namespace, as a port, and takes it back at the end."""
    try:
        holder.bind(name)
        holder.listen()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise DistributedError(
                f"{_holder(name)} already is process {launch.process} of a job with the coordinator {launch.coordinator}. End "
                f"it (SIGKILL if it is stopped), give this process another number, or {_choose_another(launch)}"
            ) from error
        # Without such names there is only the look at the port.


def _holder(name: str) -> str:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as client:
        client.settimeout(_ANSWER_SECONDS)
        client.connect(name)
        credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if pid := struct.unpack("3i", credentials)[0]:
            return f"the process with the id {pid} on this machine"
    return "another process on this machine"


def _same_for_all_names(host: str) -> str:
    """The address of a host, so that `localhost` and `127.0.0.1` are one."""
    with contextlib.suppress(OSError, ValueError):
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        return "loopback" if ipaddress.ip_address(address).is_loopback else address
    return host[:60]


def _require_free(host: str, port: int, launch: Launch) -> None:
    where = "[::]", port  # JAX's default: all addresses of this machine
    if bind := os.environ.get("JAX_COORDINATOR_BIND_ADDRESS"):
        where = check_address("JAX_COORDINATOR_BIND_ADDRESS", bind)
    try:
        _bind(where[0].strip("[]"), where[1])
    except OSError as error:
        raise DistributedError(
            f"process 0 can't listen at port {where[1]} of this machine for the coordinator {launch.coordinator}: "
            f"{error.strerror}. Another job or program may hold it: {_choose_another(launch)}"
        ) from error
    if _answers(host, port):
        raise DistributedError(
            f"a server already answers at the coordinator {launch.coordinator}, although its port is free on the machine of "
            f"process 0: start process 0 where the coordinator's name leads, or {_choose_another(launch)}"
        )


def _bind(host: str, port: int) -> None:
    """Raises OSError if a server listens there, one that shares its port included: this socket does not share.

    SO_REUSEADDR passes over connections of an earlier server that linger in TIME_WAIT, as JAX's does.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if host == "::" and not _has_ipv6():
        family, host = socket.AF_INET, "0.0.0.0"
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        probe.bind((host, port))


def _has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::", 0))
        return True
    return False


def _answers(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), _ANSWER_SECONDS) as client:
        return client.getsockname() != client.getpeername()  # a port of the ephemeral range may be connected to itself
    return False


def _choose_another(launch: Launch) -> str:
    if launch.source == "config":
        return "choose another port, with the same distributed.coordinator=host:port in every process of this job"
    return (
        "choose another port, with the same JAX_COORDINATOR_PORT=port in the environment of every process of this job"
    )
