"""Programs that bear a machine which stalls, for tests that are not about that."""

from pathlib import Path

_ROOT = Path(__file__).parents[2]
_SITE = "from schemas import fleet\n\nfleet.LEASE_MS = 60_000  # before anybody copies it\n"
REQUESTS = {"TRIVIUM_LOG_REQUEST_TIMEOUT_MS": "60000"}  # to the broker


def lasting_leases_in(folder: Path) -> dict[str, str]:
    """The environment in which every program, and what it starts, takes nobody for dead who is
    silent for less than a minute; Python runs a file from the folder when it begins."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_SITE)
    return {"PYTHONPATH": f"{folder}:{_ROOT}"}
