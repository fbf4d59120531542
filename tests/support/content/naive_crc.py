"""Cyclic checksums by long division, bit by bit: slow, and independent of the libraries that the code uses."""

from typing import Final

from bdn.core.source.upstream import ChecksumKind

# Width and reflected polynomial. All three start with ones and invert the result.
# Source: catalogue of parametrised CRC algorithms (reveng): CRC-32/ISO-HDLC, CRC-32/ISCSI, CRC-64/NVME.
_DIVISORS: Final = {
    ChecksumKind.CRC32: (32, 0xEDB88320),
    ChecksumKind.CRC32C: (32, 0x82F63B78),
    ChecksumKind.CRC64NVME: (64, 0x9A6C9329AC4BC9B5),
}


def naive_crc(kind: ChecksumKind, content: bytes | bytearray) -> str:
    """As hexadecimal digits."""
    width, divisor = _DIVISORS[kind]
    ones = (1 << width) - 1
    rest = ones
    for byte in content:
        rest ^= byte
        for _ in range(8):
            rest = rest >> 1 ^ (divisor if rest & 1 else 0)
    return f"{rest ^ ones:0{width // 4}x}"
