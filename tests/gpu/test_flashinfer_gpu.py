"""FlashInferProcessor on a real card: the sections of `benchmarks/gpu_check_flashinfer.py` that are not timings."""

import importlib.util
import pathlib
import sys

import pytest
import torch


pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_check_flashinfer.py"


@pytest.fixture(scope="module")
def gpu_check():
    """The script as a module and its state; skips without FlashInfer on a Hopper card, whose kernels it names."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper card")
    pytest.importorskip("flashinfer")
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    check = module.Check(torch.device("cuda", 0), full_size=True)
    check.record_calls()
    module.build(check)
    return module, check


@pytest.mark.parametrize(
    "section",
    [
        "values",
        "cudnn_values",
        "fp8_values",
        "tiny_models",
        "threads_and_streams",
        "public_backend",
        "full_size_blocks",
    ],
)
def test_section(gpu_check, section):
    module, check = gpu_check
    torch.manual_seed(0)
    with torch.inference_mode():
        results = getattr(module, section)(check)
    assert results, "nothing was checked"
