"""fp8 linear layers through torchao and Diffusers' quantization config."""

from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from diffusers import TorchAoConfig


# What fp8 may touch: the wide projections and feed-forward layers of the block stack, at full size at least 4096
# channels on both sides. Gates, beta, decay, AdaLN, patch and text projections, the output heads and the token refiner
# keep their dtype: they are narrow, or every row of the sequence depends on them.
FP8_LINEARS = (
    r"re:transformer_blocks\.\d+\.(attn\.(to_q|to_k|to_v|to_qkv|to_out\.0|to_out_linear)|ff\.net\.(0\.proj|2))"
)


def fp8_quantization_config() -> "TorchAoConfig":
    """Return the `quantization_config` that loads a transformer with fp8 linear layers.

    Weights and activations are e4m3 with one scale per row, activations quantised as they come. Only the layers of
    `FP8_LINEARS` are touched.

    Returns:
        `TorchAoConfig`: For `VDNH3Transformer3DModel.from_pretrained(..., quantization_config=…)`, and for
        `MiniMaxH3Transformer3DModel`, whose blocks have the same names.

    Raises:
        ImportError: Without torchao: `pip install 'diffusers-h3[fp8]'`.
    """
    try:
        from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, FqnToConfig, PerRow
    except ImportError as error:
        raise ImportError("fp8 linear layers need torchao: `pip install 'diffusers-h3[fp8]'`.") from error
    from diffusers import TorchAoConfig

    rowwise = Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())
    return TorchAoConfig(FqnToConfig({FP8_LINEARS: rowwise}))
