"""moejax: mixture-of-experts language models in JAX at the speed of hand-written kernels."""

__version__ = "0.1.0"
