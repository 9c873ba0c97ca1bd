"""Small indexes of tests are walked here too, as in `tests/workers/vector`."""

from tests.workers.vector.conftest import walked as walked
