"""How a command ends when something is wrong: one clear line and a non-zero exit, not a stack trace.

Errors of the user's making (config, data, files, memory, numbers that are not finite) are `ValueError`, `OSError`,
`RuntimeError` or a subclass with a message meant for people. Anything else is a mistake in the program and keeps its trace.
"""

import contextlib
import dataclasses
import logging
import os
import sys
from collections.abc import Iterator

import jax

from moejax.training.watchdog import PeerError


@dataclasses.dataclass
class Outcome:
    exit_code: int = 0


@contextlib.contextmanager
def one_line_errors() -> Iterator[Outcome]:
    """Turns errors of the user's making inside the `with` into a line on stderr and `exit_code` 1; Ctrl-C into 130; an error
    of another process of the job into the exit code that it gives.

    MOEJAX_DEBUG=1 lets every error through with its trace, and shows Orbax's log.
    """
    outcome = Outcome()
    if os.environ.get("MOEJAX_DEBUG", "0") not in ("", "0"):
        yield outcome
        return
    # Orbax logs a stack trace for a failed write in the background; the error itself reaches us through CheckpointError.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # the other arrays of a checkpoint whose first failed
    try:
        yield outcome
    except KeyboardInterrupt:
        _say("interrupted; the same command continues from the newest checkpoint (exit code 130)")
        outcome.exit_code = 130
    except PeerError as error:
        _say(error.fault.parting_words(jax.process_index()))
        outcome.exit_code = error.fault.exit_code
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        _say(_message(error))
        outcome.exit_code = 1


def print_page(text: str) -> None:
    """Prints a text whose reader (`| head`) may go before its end."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # What is left in the buffer would raise again when Python flushes it on its way out.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _message(error: BaseException) -> str:
    if type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError"):
        text = next(iter(str(error).splitlines()), "")
        if "RESOURCE_EXHAUSTED" in text or "Out of memory" in text:
            return "out of memory: lower training.global_batch or raise training.micro_batches, or set training.remat=layer"
        return f"the accelerator runtime failed: {text[:300]} (MOEJAX_DEBUG=1 shows where)"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'file'}: {error.strerror}"
    text = str(error).strip() or type(error).__name__
    if type(error) in (ValueError, RuntimeError):  # could also be ours: leave a way to find it
        text += " (MOEJAX_DEBUG=1 shows where)"
    return text


def _say(text: str) -> None:
    lines = text.splitlines()
    sys.stdout.flush()
    print("\n".join([f"error: {lines[0]}", *(f"       {line}" for line in lines[1:])]), file=sys.stderr)
