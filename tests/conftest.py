"""Test session set-up: eight CPU devices for sharding tests, and the rules for slow and GPU tests."""

import os
import shutil

import pytest

# Before JAX starts: sharding tests build meshes of up to eight devices. Tests that need another number start a process
# of their own.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run tests marked slow")


def _gpu_missing() -> str | None:
    import jax

    try:
        return None if jax.devices("gpu") else "no GPU is visible to JAX"
    except RuntimeError as error:
        return f"no GPU is visible to JAX ({str(error).splitlines()[0]})"


def pytest_collection_modifyitems(config, items):
    gpu_reason = _gpu_missing() if any("gpu" in item.keywords for item in items) else None
    for item in items:
        if "slow" in item.keywords and not config.getoption("--slow"):
            target = "test-cuda-host ARGS=--slow" if "tests/cuda/" in item.nodeid else "test-all"
            item.add_marker(pytest.mark.skip(reason=f"slow: run by `make {target}` (pytest --slow)"))
        if "gpu" in item.keywords and gpu_reason:
            item.add_marker(pytest.mark.skip(reason=gpu_reason))


def pytest_terminal_summary(terminalreporter):
    """Lists the numeric cases that passed by id: a run in several processes prints only dots for them."""
    passed = [
        r.nodeid for r in terminalreporter.stats.get("passed", []) if r.when == "call" and "::test_case[" in r.nodeid
    ]
    if passed:
        terminalreporter.section(f"numeric cases passed: {len(passed)}")
        for nodeid in sorted(passed):
            terminalreporter.line(nodeid.partition("::")[2])
