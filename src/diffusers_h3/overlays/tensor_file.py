"""The header of a safetensors file: what is stored where, without reading a weight."""

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

from .errors import IntegrityError


# Bytes per element of every type a file may hold as it is; merging is for the floating ones in `fuse.py`.
_ELEMENT_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64"), 8),
}
# The safetensors library refuses longer headers.
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: its stored type, its shape, and its bytes ``[begin, end)`` after the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> tuple[dict[str, TensorEntry], int]:
    """Return the tensors of a local safetensors file in storage order, and where its data begins.

    Raises:
        IntegrityError: If the header is damaged, or the file is shorter or longer than it says.
    """
    size = path.stat().st_size
    try:
        with path.open("rb") as handle:
            (length,) = struct.unpack("<Q", handle.read(8))
            if length > min(_MAX_HEADER_BYTES, size - 8):
                raise ValueError(f"its header claims {length:,} bytes")
            content = json.loads(handle.read(length))
        content.pop("__metadata__", None)
        tensors = {
            name: TensorEntry(entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"])
            for name, entry in content.items()
        }
        check_entries(tensors)
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise IntegrityError(
            f"{path} is not a readable safetensors file: {error}. Delete it and fetch it again."
        ) from error
    data_start = 8 + length
    expected = data_start + max((entry.end for entry in tensors.values()), default=0)
    if size != expected:
        raise IntegrityError(
            f"{path} holds {size:,} bytes, its header says {expected:,}. Delete it and fetch it again."
        )
    return dict(sorted(tensors.items(), key=lambda item: item[1].begin)), data_start


def check_entries(tensors: dict[str, TensorEntry]) -> None:
    """Refuse entries whose bytes overlap, leave gaps or do not match their shape, with a `ValueError`."""
    position = 0
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.dtype not in _ELEMENT_BYTES:
            raise ValueError(f"tensor {name} has the unknown type {entry.dtype!r}")
        expected = position + prod(entry.shape) * _ELEMENT_BYTES[entry.dtype]
        if (entry.begin, entry.end) != (position, expected):
            raise ValueError(f"tensor {name} spans bytes {entry.begin}-{entry.end}, expected {position}-{expected}")
        position = entry.end
