"""CPU time of processes."""

from infra.bench.cpu_time import CpuMeter, cpu_s


def test_cpu_time_of_this_process_is_seen() -> None:
    import os

    meter = CpuMeter({"me": os.getpid(), "nobody": 2**22 + 1})
    while meter.used_s()["me"] == 0:  # 10 ms of work at most
        sum(range(10_000))
    assert meter.used_s()["nobody"] == 0 and cpu_s(os.getpid()) > 0
