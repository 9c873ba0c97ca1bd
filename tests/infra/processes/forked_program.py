"""The program that tests fork: `python -m tests.infra.processes.forked_program FILE NAME=VALUE`."""

import sys

from tests.infra.processes import forked_family

if __name__ == "__main__":
    forked_family.main(*sys.argv[1:])
