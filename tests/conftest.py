"""Test session set-up: eight CPU devices for sharding tests, the rules for slow and GPU tests, what is compiled quickly, and
which files come first."""

import os
import pathlib
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


NVIDIA_DEVICE = pathlib.Path("/dev/nvidiactl")  # there where the driver has a GPU


def gpu_missing() -> str | None:
    """Why tests of a GPU are skipped. Raises pytest.UsageError where there is one that JAX's CUDA plugin cannot use."""
    import jax

    try:
        return None if jax.devices("gpu") else "no GPU is visible to JAX"
    except RuntimeError as error:
        reason = f"no GPU is visible to JAX ({str(error).splitlines()[0]})"
        if "backend 'cuda'" in reason and NVIDIA_DEVICE.exists():
            raise pytest.UsageError(
                f"{reason}, but the driver has one. Other processes may hold its memory: run one at a time, or all with "
                "XLA_PYTHON_CLIENT_PREALLOCATE=false"
            ) from error
        return reason


# Files that take longest, seconds of CPU on 2 cores: begun last, they would leave the other process idle. Files without a
# figure come after them.
SECONDS = {
    "test_cases.py": 108, "test_moe_transport.py": 64, "test_training_sharding.py": 50, "test_mxfp8_rates.py": 55,
    "test_moe.py": 40, "test_moe_sharding.py": 40, "test_distributed.py": 40, "test_train_cli.py": 42, "test_estimate.py": 42,
    "test_generate.py": 44, "test_nn.py": 42, "test_decoder.py": 28, "test_training_step.py": 28, "test_mxfp8_experts.py": 24,
    "test_mesh_compiled.py": 21, "test_native_layer.py": 21, "test_routing.py": 20, "test_selftest.py": 24,
    "test_step_compiled.py": 18, "test_attention.py": 15, "test_watchdog.py": 15, "test_mxfp8_matmul.py": 14,
    "test_moe_compiled.py": 12, "test_native_errors.py": 10, "test_native_module.py": 10,
}  # fmt: skip


def _compiles_quickly(item) -> bool:
    return item.get_closest_marker("quick_compile") is not None and not item.config.getoption("--slow")


def _order(item) -> tuple[bool, int]:
    """Programs compiled as users' are come first: none of their tests then runs what was compiled quickly before."""
    return _compiles_quickly(item), -SECONDS.get(item.path.name, 0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Leaves out LLVM's optimisations, a third of the compiling, where a test is marked so and --slow is not given.

    In the test's process and in those that it starts.
    """
    if not _compiles_quickly(item):
        return (yield)
    import jax

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        jax.config.update("jax_disable_most_optimizations", True)
        try:
            return (yield)
        finally:
            jax.config.update("jax_disable_most_optimizations", False)


def pytest_collection_modifyitems(config, items):
    items.sort(key=_order)
    gpu_reason = gpu_missing() if any("gpu" in item.keywords for item in items) else None
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
