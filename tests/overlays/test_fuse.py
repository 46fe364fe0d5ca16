"""Merging one shard: exact sums, one rounding, untouched bytes, bounded memory."""

import hashlib
import json
import struct
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from diffusers_h3.overlays import IntegrityError
from diffusers_h3.overlays.fuse import Delta, fuse_shard
from diffusers_h3.overlays.tensor_file import read_header


def _delta(path, rows, columns, value, scale=1.0, name="x"):
    """An adapter file adding `scale * value` to every entry."""
    save_file({"A": torch.ones(1, columns), "B": torch.full((rows, 1), float(value))}, path)
    return Delta(name, path, "A", "B", scale)


def test_float32_sum_is_rounded_once(make_base, tmp_path):
    """Three deltas of 2⁻⁹ vanish one by one beside a bfloat16 1.0; their sum does not."""
    base = make_base({"w": torch.ones(2, 3, dtype=torch.bfloat16)})
    deltas = [_delta(tmp_path / f"{i}.safetensors", 2, 3, 2.0**-9) for i in range(3)]
    fuse_shard(base, tmp_path / "out.safetensors", {"w": deltas})
    merged = load_file(tmp_path / "out.safetensors")["w"]
    assert merged.dtype == torch.bfloat16
    # 1 + 3·2⁻⁹ rounds to the next bfloat16 after 1, which is 1 + 2⁻⁷.
    assert torch.equal(merged, torch.full((2, 3), 1 + 2.0**-7, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes_are_kept_and_other_tensors_are_untouched(make_base, tmp_path, dtype):
    other = torch.randn(5, 7).to(torch.float8_e4m3fn)
    base = make_base({"w": torch.ones(2, 3, dtype=dtype), "other": other, "count": torch.arange(4)})
    digest = fuse_shard(
        base, tmp_path / "out.safetensors", {"w": [_delta(tmp_path / "d.safetensors", 2, 3, 2, scale=0.25)]}
    )
    merged = load_file(tmp_path / "out.safetensors")
    assert torch.equal(merged["w"], torch.full((2, 3), 1.5, dtype=dtype))
    assert torch.equal(merged["other"].view(torch.uint8), other.view(torch.uint8))
    assert merged["count"].tolist() == [0, 1, 2, 3]
    assert digest == hashlib.sha256((tmp_path / "out.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_products_are_float32_whatever_the_process_allows(make_base, tmp_path, precision):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        allowed, seen = torch.backends.mkldnn.matmul.fp32_precision, set()
        delta = _delta(tmp_path / "d.safetensors", 2, 3, 1)
        fuse_shard(
            make_base({"w": torch.ones(2, 3)}),
            tmp_path / "out.safetensors",
            {"w": [delta]},
            lambda count: seen.add(torch.backends.mkldnn.matmul.fp32_precision),
        )
        assert seen == {"ieee"}
        assert torch.backends.mkldnn.matmul.fp32_precision == allowed
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("default", ["meta", "cpu"])
def test_the_default_device_and_type_do_not_matter(make_base, tmp_path, default):
    base = make_base({"w": torch.ones(2, 3, dtype=torch.bfloat16)})
    delta = _delta(tmp_path / "d.safetensors", 2, 3, 2)
    with torch.device(default):
        fuse_shard(base, tmp_path / "out.safetensors", {"w": [delta]})
    assert torch.equal(load_file(tmp_path / "out.safetensors")["w"], torch.full((2, 3), 3, dtype=torch.bfloat16))


def test_without_deltas_the_file_is_the_same(make_base, tmp_path):
    base = make_base({"w": torch.randn(4, 4), "v": torch.randn(3).bfloat16()})
    fuse_shard(base, tmp_path / "out.safetensors", {})
    assert (tmp_path / "out.safetensors").read_bytes() == base.read_bytes()


@pytest.mark.parametrize(("dtype", "value"), [(torch.float16, 1e6), (torch.bfloat16, float("nan"))])
def test_weights_that_are_not_finite_are_named(make_base, tmp_path, dtype, value):
    base = make_base({"blocks.3.to_q.weight": torch.ones(2, 3, dtype=dtype)})
    delta = _delta(tmp_path / "d.safetensors", 2, 3, value, name="turbo")
    with pytest.raises(IntegrityError, match=r"turbo into blocks\.3\.to_q\.weight .* not finite"):
        fuse_shard(base, tmp_path / "out.safetensors", {"blocks.3.to_q.weight": [delta]})


_MEASURE = """
import sys
from pathlib import Path
from diffusers_h3.overlays.fuse import Delta, fuse_shard
from diffusers_h3.overlays.tensor_file import read_header

def peak():
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024

folder = Path(sys.argv[1])
base = folder / "base.safetensors"
delta = [Delta("x", folder / "d.safetensors", "A", "B", 1.0)] * 2
names = list(read_header(base)[0])
warm_up = {"w": [Delta("x", folder / "e.safetensors", "A", "B", 1.0)]}
fuse_shard(folder / "small.safetensors", folder / "warm.safetensors", warm_up)
Path("/proc/self/clear_refs").write_text("5")
before = peak()
fuse_shard(base, folder / "out.safetensors", dict.fromkeys(names, delta))
print(peak() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak from /proc")
def test_peak_memory_is_one_tensor(tmp_path):
    """A shard of 12 weights of 8 M elements (192 MiB stored) needs about one weight in both precisions."""
    rows, columns, count = 2048, 4096, 12
    save_file(
        {f"w{i}": torch.zeros(rows, columns, dtype=torch.bfloat16) for i in range(count)},
        tmp_path / "base.safetensors",
    )
    save_file({"w": torch.zeros(8, 8, dtype=torch.bfloat16)}, tmp_path / "small.safetensors")
    _delta(tmp_path / "d.safetensors", rows, columns, 1)
    _delta(tmp_path / "e.safetensors", 8, 8, 1)
    result = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(tmp_path)], capture_output=True, text=True, check=True
    )
    stored, in_float32 = 2 * rows * columns, 4 * rows * columns
    # The rest is room for the factors and the allocator, not for a second weight.
    assert in_float32 < int(result.stdout) < stored + 1.4 * in_float32


def _spoil(content, change):
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    change(header)
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + content[8 + length :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:20],
        lambda content: content[:-1],
        lambda content: content + b"\0",
        lambda content: b"\xff" * 8 + content[8:],
        lambda content: content[:8] + b"#" + content[9:],
        lambda content: _spoil(content, lambda header: header["w"].update(dtype="F9")),
        lambda content: _spoil(content, lambda header: header["w"].update(shape=[4, 5])),
        lambda content: _spoil(content, lambda header: header["w"].update(data_offsets=[0, 64])),
        lambda content: _spoil(content, lambda header: header["w"].pop("shape")),
    ],
)
def test_damaged_files_are_refused(make_base, damage):
    path = make_base({"w": torch.ones(4, 4), "v": torch.ones(4, 4)})
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(IntegrityError, match=r"base\.safetensors"):
        read_header(path)
