"""When tests of a GPU may be skipped: where there is none, not where JAX fails to use the one there is."""

import jax
import pytest

from tests import conftest

ERROR = "Unable to initialize backend 'cuda': INTERNAL: no supported devices found for platform CUDA"


def devices_fail(monkeypatch, message):
    def devices(backend):
        raise RuntimeError(message)

    monkeypatch.setattr(jax, "devices", devices)


@pytest.mark.parametrize("has_device, message", [(False, ERROR), (True, "Unknown backend: 'gpu' requested")])
def test_no_gpu_or_no_plugin_is_a_reason(monkeypatch, tmp_path, has_device, message):
    devices_fail(monkeypatch, message)
    monkeypatch.setattr(conftest, "NVIDIA_DEVICE", tmp_path if has_device else tmp_path / "none")
    assert message in conftest.gpu_missing()


def test_gpu_that_jax_cannot_use_is_an_error(monkeypatch, tmp_path):
    devices_fail(monkeypatch, ERROR)
    monkeypatch.setattr(conftest, "NVIDIA_DEVICE", tmp_path)
    with pytest.raises(pytest.UsageError, match="hold its memory.*XLA_PYTHON_CLIENT_PREALLOCATE=false"):
        conftest.gpu_missing()
