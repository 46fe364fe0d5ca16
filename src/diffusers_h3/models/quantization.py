"""fp8 linear layers through torchao and Diffusers' quantization config."""

from typing import TYPE_CHECKING

import torch

from ..notices import inform_once, warn_once


if TYPE_CHECKING:
    from diffusers import TorchAoConfig
    from torchao.core.config import AOBaseConfig


# What fp8 may touch: the wide projections and feed-forward layers of the block stack, at full size at least 4096
# channels on both sides. Gates, beta, decay, AdaLN, patch and text projections, the output heads and the token refiner
# keep their dtype: they are narrow, or every row of the sequence depends on them.
FP8_LINEARS = (
    r"re:transformer_blocks\.\d+\.(attn\.(to_q|to_k|to_v|to_qkv|to_out\.0|to_out_linear)|ff\.net\.(0\.proj|2))"
)

# The lowest compute capability of each recipe, as torchao documents it.
MINIMUM_CAPABILITY = {"rowwise": (8, 9), "mxfp8": (10, 0)}


def cuda_capability() -> tuple[int, int] | None:
    """Return the compute capability of the current CUDA device, or None where there is none."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability()


def fp8_quantization_config(recipe: str = "auto") -> "TorchAoConfig":
    """Return the `quantization_config` that loads a transformer with fp8 linear layers.

    Weights and activations are e4m3, activations quantised as they come. Only the layers of `FP8_LINEARS` are touched.

    Args:
        recipe (`str`): `"rowwise"` scales every row by a float32 number, from compute capability 8.9 on. `"mxfp8"`
            scales every 32 channels of a row by a power of two (MXFP8 of the OCP specification), from 10.0 on.
            `"auto"` takes MXFP8 on a card of 10.x where torchao has it, and rows anywhere else.

    Returns:
        `TorchAoConfig`: For `VDNH3Transformer3DModel.from_pretrained(..., quantization_config=…)`, and for
        `MiniMaxH3Transformer3DModel`, whose blocks have the same names.

    Raises:
        ValueError: If the recipe has another name.
        RuntimeError: If the current CUDA device does not multiply fp8 that way, or there is none.
        ImportError: Without torchao (`pip install 'diffusers-h3[fp8]'`), or with one that has no MXFP8.

    Examples:
        >>> from diffusers_h3 import fp8_quantization_config
        >>> config = fp8_quantization_config("rowwise")  # on a card of compute capability 8.9 or higher
        >>> type(config).__name__
        'TorchAoConfig'
        >>> fp8_quantization_config("int4")
        Traceback (most recent call last):
            ...
        ValueError: `recipe` must be 'auto', 'rowwise' or 'mxfp8', got 'int4'.
    """
    if recipe not in ("auto", *MINIMUM_CAPABILITY):
        raise ValueError(f"`recipe` must be 'auto', 'rowwise' or 'mxfp8', got {recipe!r}.")
    try:
        from torchao.quantization import FqnToConfig
    except ImportError as error:
        raise ImportError("fp8 linear layers need torchao: `pip install 'diffusers-h3[fp8]'`.") from error
    from diffusers import TorchAoConfig

    _check_capability(recipe)
    if recipe == "auto":
        recipe = _best_recipe()
        inform_once(f"fp8 linear layers: {recipe}.")
    layers = _mxfp8() if recipe == "mxfp8" else _rowwise()
    return TorchAoConfig(FqnToConfig({FP8_LINEARS: layers}))


def _check_capability(recipe: str) -> None:
    capability = cuda_capability()
    minimum = MINIMUM_CAPABILITY["rowwise" if recipe == "auto" else recipe]
    if capability is not None and capability >= minimum:
        return
    found = "there is none" if capability is None else f"this one has {capability[0]}.{capability[1]}"
    way_out = "load without `quantization_config`"
    if capability is not None and capability >= MINIMUM_CAPABILITY["rowwise"]:
        way_out = "use `recipe='rowwise'`"
    raise RuntimeError(
        f"fp8 linear layers (recipe {recipe!r}) need a CUDA device of compute capability {minimum[0]}.{minimum[1]} or "
        f"higher, and {found}: {way_out} here."
    )


def _best_recipe() -> str:
    # MXFP8 was made for SM100; 11.x and 12.x have it too, but no measurement says that it is the better choice there.
    if cuda_capability()[0] != 10:
        return "rowwise"
    try:
        _mxfp8()
    except ImportError as error:
        warn_once(f"fp8 linear layers use one scale per row: {error}")
        return "rowwise"
    return "mxfp8"


def _rowwise() -> "AOBaseConfig":
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow

    # torchao's setting of Inductor would be for the whole process, and tune every pointwise kernel by measuring, which
    # takes minutes at full size. `TORCHINDUCTOR_COORDINATE_DESCENT_TUNING=1` asks for it.
    return Float8DynamicActivationFloat8WeightConfig(granularity=PerRow(), set_inductor_config=False)


def _mxfp8() -> "AOBaseConfig":
    try:
        from torchao.prototype.mx_formats import MXDynamicActivationMXWeightConfig
    except ImportError as error:
        raise ImportError("MXFP8 needs a newer torchao: `pip install -U torchao`.") from error
    return MXDynamicActivationMXWeightConfig()
