"""How busy a MIG device's GPU instance is, from the driver's counters to what a scrape reads."""

import itertools
import threading

from live import GIB, GPU
from nvml_stand_in.stand_in import Device, Mig

MIG = "MIG-9b2e6f6e-5a0f-5b2d-8f63-0d8a6c1c7f10"


def test_a_scrape_tells_how_busy_a_gpu_instance_is_and_of_no_container(start, stand_in):
    def write(number):
        mig = Mig(uuid=MIG, gpu_instance=1, gpm_counters=(number * 30, number * 120), memory_total=40 * GIB)
        stand_in.write(Device(uuid=GPU, name="NVIDIA H100 80GB HBM3", migs=(mig,), has_gpm=True))

    # A quarter of the time, whatever two moments the daemon takes its samples at; equal counters are no time at all.
    stop = threading.Event()

    def tick():
        for number in itertools.count(1):
            write(number)
            if stop.wait(0.05):
                return

    write(0)
    ticking = threading.Thread(target=tick)
    ticking.start()
    try:
        daemon = start()
        daemon.wait_for(0.25, "fgpu_gpu_sm_utilization_ratio", gpu_uuid=MIG)
        assert daemon.value("fgpu_gpu_sm_utilization_ratio", gpu_uuid=GPU) is None
        assert daemon.value("fgpu_container_sm_utilization_ratio") is None
    finally:
        stop.set()
        ticking.join()
