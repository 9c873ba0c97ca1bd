"""Runs at the start of each Python program whose PYTHONPATH names this folder.

`tests/long_leases.py` uses it.
"""

from schemas import fleet

fleet.LEASE_MS = 60_000  # before any module copies it
