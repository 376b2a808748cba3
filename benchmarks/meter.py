"""Clocks and power of the GPU, read while it works.

By NVML's own functions: they take microseconds, where a call of nvidia-smi takes 50 ms and more.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"
_SM_CLOCK = 1  # NVML_CLOCK_SM
_POWER_INSTANT = 186  # NVML_FI_DEV_POWER_INSTANT; nvmlDeviceGetPowerUsage is a mean of one second


@dataclass(frozen=True)
class Reading:
    """Of one moment: the multiprocessors' clock in MHz, the card's power in W."""

    clock: float
    watts: float


class _FieldValue(ctypes.Structure):
    """nvmlFieldValue_t; its value is a union of 8 bytes, here an unsigned int."""

    _fields_ = [
        ("field", ctypes.c_uint),
        ("scope", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latency", ctypes.c_longlong),
        ("type", ctypes.c_uint),
        ("status", ctypes.c_uint),
        ("value", ctypes.c_uint),
        ("rest", ctypes.c_uint),
    ]


class MeterError(Exception):
    """NVML is not there, or does not answer; the message says which call."""


class Meter:
    """NVML's view of one GPU."""

    def __init__(self, uuid: str, library: Any = None) -> None:
        """Open it.

        Args:
            uuid: of the GPU, as CUDA gives it: NVML counts GPUs that a process may not see.
            library: NVML, by default the driver's.

        Raises:
            MeterError: it has no NVML, or not this GPU.
        """
        try:
            self._nvml = ctypes.CDLL(_LIBRARY) if library is None else library
        except OSError as error:
            raise MeterError(f"{_LIBRARY}: {error}") from None
        self._call("nvmlInit_v2")
        self._device = ctypes.c_void_p()
        name = f"GPU-{uuid.removeprefix('GPU-')}".encode()
        self._call("nvmlDeviceGetHandleByUUID", ctypes.c_char_p(name), ctypes.byref(self._device))

    def read(self) -> Reading:
        """Clock and power of this moment.

        Raises:
            MeterError: NVML does not say.
        """
        clock = ctypes.c_uint()
        self._call("nvmlDeviceGetClockInfo", self._device, _SM_CLOCK, ctypes.byref(clock))
        power = _FieldValue(field=_POWER_INSTANT)
        self._call("nvmlDeviceGetFieldValues", self._device, 1, ctypes.byref(power))
        if power.status:
            raise MeterError(f"field {_POWER_INSTANT} of nvmlDeviceGetFieldValues: {power.status}")
        return Reading(float(clock.value), power.value / 1e3)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._nvml, name)(*arguments)
        if status:
            raise MeterError(f"{name}: {status}")
