"""Pure functions of arrays and frozen specs: the functional core. Nothing here imports Flax."""
