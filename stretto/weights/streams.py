"""Byte streams inside a delta: numbers, arrays that zstandard makes smaller, and a reader for which every shortage is a
CodecError.

    number: LEB128, seven bits a byte, low ones first
    stream: raw length, stored length, bytes     (stored as they are when zstd does not make them smaller)
"""

from __future__ import annotations

import numpy as np
import zstandard

_ESCAPE = 255


class CodecError(ValueError):
    """A sentence: why these bytes are not a delta that this program can apply to that base."""


def put_number(out: bytearray, value: int) -> None:
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def put_stream(out: bytearray, array: np.ndarray) -> None:
    raw = np.ascontiguousarray(array).data.cast("B")
    packed = _compressor().compress(raw) if len(raw) > 16 else raw
    put_number(out, len(raw))
    smaller = packed if len(packed) < len(raw) else raw
    put_number(out, len(smaller))
    out += smaller


def put_escaped(out: bytearray, values: np.ndarray) -> None:
    """One byte each; a value of 255 or more is 255 there and written in full in a second stream."""
    put_stream(out, np.minimum(values, _ESCAPE).astype(np.uint8))
    put_stream(out, values[values >= _ESCAPE])


def put_planes(out: bytearray, values: np.ndarray) -> None:
    """All low bytes, then all the next."""
    for plane in values.view(np.uint8).reshape(-1, values.itemsize).T:
        put_stream(out, plane)


class Reader:
    """Reads what the `put` functions wrote."""

    def __init__(self, data: bytes | memoryview) -> None:
        self.data = memoryview(data).cast("B")
        self.at = 0

    def bytes(self, count: int) -> memoryview:
        if self.at + count > len(self.data):
            raise CodecError(f"delta is cut off: {count} bytes expected, {len(self.data) - self.at} are left")
        self.at += count
        return self.data[self.at - count : self.at]

    def byte(self) -> int:
        return self.bytes(1)[0]

    def number(self) -> int:
        value = 0
        for shift in range(0, 64, 7):
            part = self.byte()
            value |= (part & 0x7F) << shift
            if part < 0x80:
                return value
        raise CodecError("delta is damaged: a number has no end")

    def stream(self, size: int) -> np.ndarray:
        """uint8 [size]"""
        raw, stored = self.number(), self.number()
        if raw != size or stored > raw:
            raise CodecError(f"delta is damaged: a stream of {raw} bytes stored in {stored}, {size} expected")
        data = self.bytes(stored)
        if stored < raw:
            try:
                data = _decompressor().decompress(data, max_output_size=raw)
            except zstandard.ZstdError as error:
                raise CodecError(f"delta is damaged: {error}") from error
            if len(data) != raw:
                raise CodecError(f"delta is damaged: a stream unpacks to {len(data)} bytes, {raw} expected")
        return np.frombuffer(data, np.uint8)

    def escaped(self, count: int, itemsize: int) -> np.ndarray:
        narrow = self.stream(count)
        wide = narrow == _ESCAPE
        values = narrow.astype(f"<u{itemsize}")
        values[wide] = self.stream(int(np.count_nonzero(wide)) * itemsize).view(f"<u{itemsize}")
        return values

    def planes(self, count: int, itemsize: int) -> np.ndarray:
        planes = np.empty((count, itemsize), np.uint8)
        for plane in range(itemsize):
            planes[:, plane] = self.stream(count)
        return planes.reshape(-1).view(f"<u{itemsize}")

    def finish(self) -> None:
        if self.at != len(self.data):
            raise CodecError(f"delta is damaged: {len(self.data) - self.at} bytes too many")


def _parameters() -> zstandard.ZstdCompressionParameters:
    # Level 1: higher ones gain under 1 %. Without magic number and size, which the stream header makes redundant.
    return zstandard.ZstdCompressionParameters.from_level(
        1, format=zstandard.FORMAT_ZSTD1_MAGICLESS, write_content_size=False
    )


def _compressor() -> zstandard.ZstdCompressor:
    return zstandard.ZstdCompressor(compression_params=_parameters())


def _decompressor() -> zstandard.ZstdDecompressor:
    return zstandard.ZstdDecompressor(format=zstandard.FORMAT_ZSTD1_MAGICLESS)
