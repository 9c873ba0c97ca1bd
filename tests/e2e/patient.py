"""`trivium` in which a member may be silent for a minute: the processes of stacks where none dies.

A machine that stalls for seconds would otherwise end them, as it should elsewhere.
"""

from schemas import fleet

fleet.LEASE_MS = 60_000

from infra.cli.app import main  # noqa: E402  # what it imports copies the number

if __name__ == "__main__":
    main()
