"""Merge adapters into one shard of a base transformer, one tensor at a time."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open

from .errors import IntegrityError
from .files import flush
from .tensor_file import read_header


_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Delta:
    """Add ``scale · B @ A`` of an adapter, with ``B`` ``[out, rank]`` and ``A`` ``[rank, in]`` read from `file`."""

    adapter: str
    file: Path
    lora_a: str
    lora_b: str
    scale: float


def fuse_shard(
    source: Path,
    target: Path,
    deltas: Mapping[str, Sequence[Delta]],
    progress: Callable[[int], Any] = lambda count: None,
) -> str:
    """Write `source` with `deltas` merged to `target` and return the SHA-256 of what was written.

    Names, types, shapes and order of the tensors stay as stored, so the header is taken over as it is and so are the
    bytes of every tensor without a delta. A merged tensor is summed in float32, in the order of its deltas, and
    rounded once. At most one tensor is in memory.

    Args:
        source, target (`Path`): safetensors files; `target` is created, and flushed to the disk.
        deltas (`Mapping[str, Sequence[Delta]]`): By the name of the weight; names of other shards are ignored.
        progress (`Callable`): Called with the number of bytes as they are written.

    Raises:
        IntegrityError: If a merged weight is not finite.
    """
    tensors, data_start = read_header(source)
    digest = hashlib.sha256()
    with source.open("rb") as reader, target.open("wb") as writer, _exact_products():
        write(writer, digest, reader.read(data_start))
        progress(data_start)
        for name, entry in tensors.items():
            data = bytearray(entry.end - entry.begin)
            reader.readinto(data)
            if name in deltas:
                _merge(name, torch.frombuffer(data, dtype=_DTYPES[entry.dtype]).view(entry.shape), deltas[name])
            write(writer, digest, data)
            progress(len(data))
            del data  # before the next one is allocated
        flush(writer)
    return digest.hexdigest()


def write(writer: BinaryIO, digest: Any, data: bytes | bytearray) -> None:
    """Write `data` and add it to `digest`."""
    writer.write(data)
    digest.update(data)


@contextmanager
def _exact_products() -> Iterator[None]:
    """Keep float32 products in float32, whatever `torch.set_float32_matmul_precision` allows the CPU to do."""
    matmul = torch.backends.mkldnn.matmul
    previous = matmul.fp32_precision
    matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = previous


@torch.no_grad()
def _merge(name: str, weight: torch.Tensor, deltas: Sequence[Delta]) -> None:
    """Merge `deltas` into `weight` ``[out, in]`` in place."""
    total = weight.float() if weight.dtype != torch.float32 else weight.clone()
    for delta in deltas:
        with safe_open(delta.file, framework="pt") as adapter:
            lora_a, lora_b = adapter.get_tensor(delta.lora_a).float(), adapter.get_tensor(delta.lora_b).float()
        total.addmm_(lora_b, lora_a, alpha=delta.scale)
    weight.copy_(total)
    del total
    # Both extremes are NaN where any value is; unlike `isfinite`, they need no memory of the weight's size.
    if not all(extreme.isfinite() for extreme in weight.aminmax()):
        raise IntegrityError(
            f"Merging {' and '.join(delta.adapter for delta in deltas)} into {name} gives values that are not finite "
            f"in {str(weight.dtype).removeprefix('torch.')}; the base or an adapter is damaged."
        )
