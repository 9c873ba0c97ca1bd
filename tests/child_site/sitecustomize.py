"""Runs at the start of each Python program whose PYTHONPATH names this folder.

`tests/long_leases.py` uses it.
"""

import os

from schemas import fleet

fleet.LEASE_MS = int(os.environ["TEST_LEASE_MS"])  # before any module copies it
