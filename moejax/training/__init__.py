"""Training: state, optimizer, one compiled step, the loop around it, and what a person sees of it.

Read `state.py`, then `step.py`, then `loop.py`.
"""
