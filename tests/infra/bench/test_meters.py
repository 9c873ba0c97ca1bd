"""CPU time of processes."""

import os
import threading

from infra.bench.meters import CpuMeter, cpu_s, wakeups


def test_cpu_meter_reads_time_of_this_process() -> None:
    meter = CpuMeter({"me": os.getpid(), "nobody": 2**22 + 1})
    while meter.used_s()["me"] == 0:  # 10 ms of work at most
        sum(range(10_000))
    assert meter.used_s()["nobody"] == 0 and cpu_s(os.getpid()) > 0


def test_wakeups_count_waits_of_threads() -> None:
    ask, answer = threading.Semaphore(0), threading.Semaphore(0)

    def answering() -> None:
        for _ in range(100):
            ask.acquire()
            answer.release()

    thread = threading.Thread(target=answering)
    thread.start()
    before = wakeups(os.getpid())
    for _ in range(100):
        ask.release()
        answer.acquire()
    assert wakeups(os.getpid()) >= before
    thread.join()
    assert wakeups(2**22 + 1) == 0
