"""The sizes of the tiny VDN-H3: stock classes, small enough for a release of a few megabytes."""

import torch
from diffusers import (
    AutoencoderKLMiniMaxH3,
    AutoencoderKLMiniMaxH3Audio,
    MiniMaxH3Scheduler,
    MiniMaxH3Transformer3DModel,
)

from diffusers_h3 import HybridAttentionConfig


# Of the schedules, as released.
VIDEO_SHIFT, AUDIO_SHIFT = 12.0, 3.0

VIDEO_LATENT_CHANNELS = 8
AUDIO_LATENT_CHANNELS = 8
# FlashInfer's kernels begin at 64.
HEAD_DIM = 64

# Where the autoencoders' pixels are: ImageNet's statistics, as diffusers' decode step expects.
PIXEL_MEAN = (0.485, 0.456, 0.406)
PIXEL_STD = (0.229, 0.224, 0.225)

_FIRST_LOG_VARIANCE = -6.0

HYBRID_ATTENTION = HybridAttentionConfig(linear_head_dim=HEAD_DIM)


def make_vae() -> AutoencoderKLMiniMaxH3:
    """Build the video VAE: 16× smaller in space, 17 frames to 5 latents in time, as released."""
    vae = AutoencoderKLMiniMaxH3(
        latent_channels=VIDEO_LATENT_CHANNELS,
        block_out_channels=(8, 24, 32, 40, 40, 40),
        layers_per_block=1,
        norm_num_groups=8,
        decoder_num_layers=4,
        decoder_num_attention_heads=4,
        decoder_attention_head_dim=32,
        decoder_ffn_mult=2,
        latents_mean=(0.0,) * VIDEO_LATENT_CHANNELS,
        latents_std=(1.0,) * VIDEO_LATENT_CHANNELS,
    )
    # A fresh decoder scales every block's contribution by zero, from where training is slow.
    for name, parameter in vae.decoder.named_parameters():
        if name.endswith((".scale1", ".scale2")):
            torch.nn.init.constant_(parameter, 0.2)
    # A fresh posterior is all noise, which hides the signal; start with a narrow one.
    torch.nn.init.constant_(vae.quant_conv.bias[VIDEO_LATENT_CHANNELS:], _FIRST_LOG_VARIANCE)
    return vae


def make_audio_vae() -> AutoencoderKLMiniMaxH3Audio:
    """Build the audio VAE: 800 mono samples at 32 kHz to one latent, as released, by a decoder of one long stage.

    Its transposed convolution is a dictionary of waveforms twice as long as a latent, from which tones are learnt in
    minutes; the released decoder's seven stages would take most of the time and bytes of everything here.
    """
    vae = AutoencoderKLMiniMaxH3Audio(
        encoder_dim=4,
        latent_dim=64,
        latent_channels=AUDIO_LATENT_CHANNELS,
        num_attention_heads=4,
        decoder_dim=16,
        decoder_rates=(800,),
        decoder_kernel_sizes=(1600,),
        resblock_kernel_sizes=(3,),
        resblock_dilation_sizes=((1, 3),),
        latents_mean=[0.0] * AUDIO_LATENT_CHANNELS,
        latents_std=[1.0] * AUDIO_LATENT_CHANNELS,
    )
    torch.nn.init.constant_(vae.logs_proj.bias, _FIRST_LOG_VARIANCE / 2)
    # A fresh encoder of 40 convolutions loses the wave among its own offsets, and does not find it again for long.
    for name, parameter in vae.encoder.named_parameters():
        if name.endswith("weight_g"):
            parameter.data.mul_(2.5)
        elif name.endswith("bias"):
            parameter.data.mul_(0.5)
    # The output is as loud as the clips from the start.
    vae.decoder.ups[0][0].weight_g.data.mul_(2.0)
    return vae


def make_transformer(text_dim: int) -> MiniMaxH3Transformer3DModel:
    """Build the dense transformer; as in the release the attention is wider than the residual stream."""
    return MiniMaxH3Transformer3DModel(
        num_attention_heads=3,
        attention_head_dim=HEAD_DIM,
        hidden_size=128,
        num_layers=6,
        num_refiner_layers=1,
        ffn_dim=320,
        in_channels=VIDEO_LATENT_CHANNELS,
        audio_in_channels=AUDIO_LATENT_CHANNELS,
        text_dim=text_dim,
        freq_dim=64,
        time_embed_hidden_dim=128,
        time_embed_dim=32,
        rope_freq_dim=8,
    )


def make_schedulers() -> tuple[MiniMaxH3Scheduler, MiniMaxH3Scheduler]:
    """Build the video and the audio scheduler, each with its own shift."""
    return MiniMaxH3Scheduler(shift=VIDEO_SHIFT), MiniMaxH3Scheduler(shift=AUDIO_SHIFT)
