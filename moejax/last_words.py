"""What a process can't say itself when it is killed, or when a library aborts it: a shell beside it says it.

Used while processes join (`distributed.py`) and while they train (`training/watchdog.py`).
"""

import contextlib
import os
import subprocess

# Reads lines; when the process that writes them is gone without having said "end", prints the last one.
_SHELL = 'while read -r line; do last=$line; done; [ "$last" = end ] || echo "error: $last" >&2'


class LastWords:
    """A shell that prints the newest line it was told, should this process vanish before `end`."""

    def __init__(self, line: str):
        self._pipe: int | None = None
        with contextlib.suppress(OSError):  # no shell here: nothing is said
            child = subprocess.Popen(
                ["/bin/sh", "-c", _SHELL], stdin=subprocess.PIPE, bufsize=0, start_new_session=True
            )
            assert child.stdin is not None
            self._pipe = os.dup(child.stdin.fileno())
            os.set_blocking(self._pipe, False)  # a shell that is slow must not slow down training
            child.stdin.close()
            child.returncode = 0  # it outlives us by design
        self.be(line)

    def be(self, line: str) -> None:
        """These are the last words from now on."""
        if self._pipe is not None:
            with contextlib.suppress(OSError):
                os.write(self._pipe, f"{line}\n".encode())

    def end(self) -> None:
        """This process says itself what there is to say."""
        self.be("end")
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None
