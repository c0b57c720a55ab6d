"""What this machine is, whether Squall can train on it, and how fast its memory and its loopback are.

`facts.py` looks, `speeds.py` measures, `judge.py` decides what of it is fine, `examination.py` puts the three together.
The command is ``squall doctor``; benchmarks write the same facts beside their figures.
"""
