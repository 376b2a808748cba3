"""Numbers with their units, for people."""

from __future__ import annotations


def with_prefix(number: float, unit: str) -> str:
    """`1.23 TFLOP`; no more than four digits."""
    prefixes = ["", "k", "M", "G", "T", "P", "E"]
    while number >= 999.5 and len(prefixes) > 1:
        number, prefixes = number / 1000, prefixes[1:]
    digits = 0 if number >= 99.5 or number == int(number) else 1 if number >= 9.95 else 2
    return f"{number:.{digits}f} {prefixes[0]}{unit}"


def in_bytes(number: int) -> str:
    """Bytes, in powers of 1000."""
    return with_prefix(number, "B")


def in_seconds(seconds: float) -> str:
    """`0.04 ns`, `12.3 us` or `4.56 ms`."""
    micro = seconds * 1e6
    if micro >= 999.5:
        return f"{micro / 1000:.2f} ms"
    if micro < 0.995:
        return f"{micro * 1000:.3g} ns"
    return f"{micro:.1f} us" if micro >= 9.95 else f"{micro:.2f} us"
