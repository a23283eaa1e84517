"""A process that leases pretend devices again and again and notes when it had which.

    PYTHONPATH=workflow/scripts python lease_holder.py FOLDER DEVICES COUNT ROUNDS HOLD_S

It prints `UUID BEGAN ENDED` (monotonic seconds, the same clock in all processes) a line and device, as it goes.
"""

import sys
import time
from pathlib import Path

from rebuild.serving.devices import Device
from rebuild.serving.lease import lease_devices


def pretend_devices(count: int) -> list[Device]:
    """Return devices that exist for leases only."""
    return [Device(f"gpu:{n}", "gpu", n, f"GPU-pretend-{n}", "Pretend", 0) for n in range(count)]


def hold_leases(folder: Path, devices: int, count: int, rounds: int, hold_s: float) -> None:
    """Lease `count` of the devices `rounds` times, each for `hold_s` seconds."""
    for _ in range(rounds):
        with lease_devices(count, pretend_devices(devices), folder=folder) as lease:
            began = time.monotonic()
            print("holding", *lease.descriptors, flush=True)
            time.sleep(hold_s)
            ended = time.monotonic()
        for device in lease.devices:
            print(device.uuid, began, ended, flush=True)


if __name__ == "__main__":
    folder, devices, count, rounds, hold_s = sys.argv[1:]
    hold_leases(Path(folder), int(devices), int(count), int(rounds), float(hold_s))
