"""Plan before you rent: what a run needs on a mesh, and how fast it can be at best, without its hardware.

    python -m moejax.estimate configs/quickstart.yaml --mesh data=1,fsdp=9,expert=8

Read `memory.py` (bytes per device), `work.py` (FLOPs, traffic, roofline) and `hardware.py` (what the GPUs can do);
`docs/estimate.md` says how far to trust it.
"""
