"""What importing the package costs and needs: nothing optional, no GPU, and next to no time."""

import json
import statistics
import subprocess
import sys
import time

import pytest

import diffusers_h3


OPTIONAL = ("triton", "flashinfer", "flash_attn", "flash_attn_interface", "torchao")
HEAVY = (
    "torch",
    "diffusers",
    "transformers",
    "accelerate",
    "peft",
    "safetensors",
    "numpy",
    "PIL",
    "av",
    "huggingface_hub",
)

# Runs first in a fresh interpreter: none of the optional packages can be imported or found.
HIDE = f"""
import importlib.util, sys

class Hidden:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in {OPTIONAL}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hidden)
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: (
    None if name.partition(".")[0] in {OPTIONAL} else find_spec(name, package)
)
"""

FORWARD = """
import torch
import diffusers_h3
from diffusers_h3 import HybridAttentionConfig, SequenceLayout, VDNH3Transformer3DModel

assert not torch.cuda.is_available()
model = VDNH3Transformer3DModel(
    num_attention_heads=2, attention_head_dim=16, hidden_size=24, num_layers=2, num_refiner_layers=1, ffn_dim=16,
    in_channels=2, audio_in_channels=3, text_dim=5, freq_dim=8, time_embed_hidden_dim=8, time_embed_dim=6,
    rope_freq_dim=2, hybrid_attention=HybridAttentionConfig(chunk=2, linear_head_dim=16).to_dict(),
)
for block in model.transformer_blocks:
    torch.nn.init.normal_(block.attn.to_out_linear.weight)
called = []
model.transformer_blocks[0].attn.linear_attention.register_forward_hook(lambda *_: called.append(1))
text, frames = 3, 9
positions = torch.zeros(text + frames * 4, 3)
positions[:text, 0] = torch.arange(text)
positions[text:] = torch.cartesian_prod(torch.arange(text, text + frames), torch.arange(2), torch.arange(2))
rows = torch.arange(len(positions))
tags = (rows < text).long()
with torch.no_grad():
    output = model(
        hidden_states=torch.randn(1, frames * 4, 8), audio_hidden_states=torch.randn(1, 0, 3),
        encoder_hidden_states=torch.randn(1, text, 5), timestep=torch.tensor([0.5]),
        timestep_indices=torch.zeros_like(rows), token_tags=tags, position_ids=positions, video_indices=rows[text:],
        audio_indices=rows[:0], text_indices=rows[:text],
    ).sample
assert output.shape == (1, frames * 4, 8)
assert output.isfinite().all() and output.std() > 0
assert called == [1]
print("forward done")
"""


def _run(code):
    """Run `code` in a fresh interpreter without a GPU and return what it prints."""
    environment = {"CUDA_VISIBLE_DEVICES": "", "PATH": "", "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_import_and_forward_without_optional_packages():
    output = _run(HIDE + FORWARD + f"print(sorted(set(sys.modules) & set({OPTIONAL})))")
    assert output.splitlines()[-2:] == ["forward done", "[]"]


@pytest.mark.slow
def test_every_public_name_resolves_without_optional_packages():
    names = _run(
        HIDE + "import diffusers_h3\n"
        "print([name for name in diffusers_h3.__all__ if getattr(diffusers_h3, name) is not None])"
    )
    assert names.strip().splitlines()[-1] == str(diffusers_h3.__all__)


def test_optional_packages_are_hidden_by_the_finder():
    """The tests above would be worth nothing if it did not hide them."""
    for name in OPTIONAL:
        _run(
            HIDE + f"assert importlib.util.find_spec({name!r}) is None\n"
            f"try:\n    import {name}\nexcept ModuleNotFoundError as error:\n    assert error.name == {name!r}\n"
            "else:\n    raise AssertionError('not hidden')"
        )


def test_import_loads_nothing_heavy():
    loaded = json.loads(_run("import json, sys, diffusers_h3; print(json.dumps(sorted(sys.modules)))"))
    assert "diffusers_h3" in loaded
    assert set(loaded) & {*HEAVY, *OPTIONAL} == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    "module", ["attention_processors.flashinfer_backend", "attention_processors.hybrid", "models.install", "cli.plan"]
)
def test_any_module_may_be_imported_first(module):
    """Registration with Diffusers runs inside imports of it, which any of these may be the first to make."""
    code = "from diffusers.models.attention_dispatch import AttentionBackendName as names"
    assert _run(f"import diffusers_h3.{module}\n{code}\nprint(names('flashinfer').name)") == "FLASHINFER\n"


def test_import_is_fast():
    """At most 0.2 s over an empty interpreter; taken in turns, so that both see the same machine."""

    def seconds(code):
        start = time.perf_counter()
        _run(code)
        return time.perf_counter() - start

    pairs = [(seconds("pass"), seconds("import diffusers_h3")) for _ in range(7)]
    assert statistics.median(with_import - empty for empty, with_import in pairs) < 0.2


@pytest.mark.parametrize("name", diffusers_h3.__all__)
def test_public_names(name):
    value = getattr(diffusers_h3, name)
    if name == "__version__":
        assert value.count(".") == 2
        return
    assert value.__name__ == name
    assert value.__module__.startswith("diffusers_h3.")
    assert value.__doc__
    assert name in dir(diffusers_h3)
    assert vars(diffusers_h3)[name] is value  # looked up once


def test_public_names_are_listed_once_and_in_order():
    assert len(set(diffusers_h3.__all__)) == len(diffusers_h3.__all__)
    expected = {
        "FlashInferProcessor",
        "HybridAttentionConfig",
        "HybridAttnProcessor",
        "Overlay",
        "SequenceLayout",
        "VDNH3Pipeline",
        "VDNH3PipelineOutput",
        "VDNH3Transformer3DModel",
        "apply_hybrid_attention",
        "fp8_quantization_config",
        "load_overlay",
        "materialize_overlay",
    }
    assert expected <= set(diffusers_h3.__all__)


@pytest.mark.parametrize("name", ["VDNH3", "torch", "_PUBLIC", "vdnh3pipeline"])
def test_an_unknown_name_is_an_attribute_error(name):
    with pytest.raises(AttributeError, match=f"module 'diffusers_h3' has no attribute '{name}'"):
        getattr(diffusers_h3, name)
