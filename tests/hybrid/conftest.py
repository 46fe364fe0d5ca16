"""The hybrid layer a second time: a float64 frame loop written from the formulas, and small layers to compare with it.

Nothing here imports `diffusers_h3` but the configuration, and of that the reference only reads fields.
"""

import math
from dataclasses import dataclass

import pytest
import torch
from diffusers import MiniMaxH3Transformer3DModel
from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep
from torch.nn.functional import softplus


HIDDEN_SIZE = 20
HEADS = 3
HEAD_DIM = 8
ROTARY_DIM = 6


@dataclass(frozen=True)
class Rows:
    """Where the rows of a sequence are; the reference's own word for a layout."""

    text: int
    video_start: int
    num_frames: int
    grid: tuple[int, int]
    seq_len: int

    @property
    def rows_per_frame(self):
        return self.grid[0] * self.grid[1]

    def frame(self, index):
        start = self.video_start + index * self.rows_per_frame
        return slice(start, start + self.rows_per_frame)


@dataclass(frozen=True)
class LayerResult:
    """What one item of a layer computes: all float64, the video rows of `readout` included where it is zero."""

    window: torch.Tensor
    readout: torch.Tensor
    output: torch.Tensor
    covered: bool


def _bounds(config, frame):
    if config.chunk == 0:
        return frame - config.radius, frame + config.radius
    chunk = frame // config.chunk
    return (chunk - config.radius) * config.chunk, (chunk + config.radius + 1) * config.chunk - 1


def _window_mask(config, rows):
    """The boolean `[T, T]` mask, pair by pair of frames."""
    mask = torch.zeros(rows.seq_len, rows.seq_len, dtype=torch.bool)
    video = torch.zeros(rows.seq_len, dtype=torch.bool)
    video[rows.video_start : rows.video_start + rows.num_frames * rows.rows_per_frame] = True
    mask[~video] = True
    mask[:, ~video] = True
    anchors = {0, rows.num_frames - 1}
    for query in range(rows.num_frames):
        low, high = _bounds(config, query)
        for key in range(rows.num_frames):
            seen = low <= key <= high
            seen |= config.anchor_frames in ("columns", "both") and key in anchors
            seen |= config.anchor_frames in ("rows", "both") and query in anchors
            mask[rows.frame(query), rows.frame(key)] = seen
    return mask


def _covered(config, rows):
    bounds = [_bounds(config, frame) for frame in range(rows.num_frames)]
    return all(low <= 0 and high >= rows.num_frames - 1 for low, high in bounds)


def _rotate(states, cos, sin):
    rotary = cos.shape[-1]
    first, second, rest = states[..., : rotary // 2], states[..., rotary // 2 : rotary], states[..., rotary:]
    turned = torch.cat((-second, first), dim=-1)
    return torch.cat((states[..., :rotary] * cos[:, None] + turned * sin[:, None], rest), dim=-1)


def _rms_norm(states, weight, eps):
    return states / (states.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def _window(config, rows, weights, query, key, value, cos, sin, heads):
    query, key, value = (states.unflatten(-1, (heads, -1)) for states in (query, key, value))
    query = _rotate(_rms_norm(query, weights["norm_q.weight"], 1e-5), cos, sin)
    key = _rotate(_rms_norm(key, weights["norm_k.weight"], 1e-5), cos, sin)
    mask = _window_mask(config, rows)
    output = torch.zeros_like(query)
    for head in range(heads):
        scores = query[:, head] @ key[:, head].T / math.sqrt(query.shape[-1])
        output[:, head] = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value[:, head]
    return output


def _spatial(image, weight):
    """Cross-correlate ``[rows, columns, C]`` with ``[C, 1, K, K]``, zero padded, tap by tap."""
    height, width, _ = image.shape
    half = weight.shape[-1] // 2
    output = torch.zeros_like(image)
    for row in range(height):
        for column in range(width):
            for down in range(-half, half + 1):
                for right in range(-half, half + 1):
                    if 0 <= row + down < height and 0 <= column + right < width:
                        tap = weight[:, 0, down + half, right + half]
                        output[row, column] += image[row + down, column + right] * tap
    return output


def _features(name, frames, config, weights, grid, heads, convolve=True):
    """Turn a list of frames ``[S, H·D]`` into features ``[S, H, D]``."""
    if convolve and name in config.short_conv_targets:
        spatial = weights[f"linear_attention.short_conv.{name}_sp.weight"]
        temporal = weights[f"linear_attention.short_conv.{name}_tm.weight"]
        images = [_spatial(frame.unflatten(0, grid), spatial).flatten(0, 1) for frame in frames]
        half = temporal.shape[-1] // 2
        frames = [
            sum(
                images[frame + shift] * temporal[:, 0, shift + half]
                for shift in range(-half, half + 1)
                if 0 <= frame + shift < len(images)
            )
            for frame in range(len(images))
        ]
    features = []
    for frame in frames:
        states = (frame * torch.sigmoid(frame)).unflatten(-1, (heads, -1))
        if name in ("q", "k"):
            states = states / (states.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        features.append(states)
    return features


def _step(state, gram, cross, alpha, rule, rows):
    """One frame of the delta rule for one head."""
    identity = torch.eye(gram.shape[0], dtype=gram.dtype)
    if rule == "sana_scaled":
        return state @ torch.diag(alpha) @ (identity - gram / rows) + cross / math.sqrt(rows)
    if rule == "vdn_scaled":
        gram, cross = gram / rows, cross / math.sqrt(rows)
    return (state @ torch.diag(alpha) + cross) @ torch.linalg.inv(identity + gram)


def _moments(key, value, beta):
    """Sum over rows, one outer product at a time: ``β·k·kᵀ`` and ``β·v·kᵀ``."""
    gram = sum(beta[row] * torch.outer(key[row], key[row]) for row in range(len(key)))
    cross = sum(beta[row] * torch.outer(value[row], key[row]) for row in range(len(key)))
    return gram, cross


def _readout(config, rows, weights, inputs, query, key, value, heads):
    """The branch's output of every video row, ``[F·S, H·D]``."""
    dim = query.shape[-1] // heads
    output = torch.zeros(rows.num_frames * rows.rows_per_frame, heads * dim, dtype=torch.float64)
    dropped = 1 if config.anchor_frames == "both" else 0
    frames = range(dropped, rows.num_frames - dropped)
    if _covered(config, rows) or len(frames) == 0:
        return output

    xs = [inputs[rows.frame(frame)] for frame in frames]
    queries, keys, values = (
        _features(name, [states[rows.frame(frame)] for frame in frames], config, weights, rows.grid, heads)
        for name, states in (("q", query), ("k", key), ("v", value))
    )
    prefix = "linear_attention."
    for head in range(heads):
        channels = slice(head * dim, (head + 1) * dim)
        decay, alphas, moments = weights[prefix + "alpha.A_log"][head].exp(), [], []
        for x, k, v in zip(xs, keys, values, strict=True):
            step = weights[prefix + "alpha.up.weight"] @ (weights[prefix + "alpha.down.weight"] @ x.mean(0))
            step = softplus(step[channels] + weights[prefix + "alpha.dt_bias"][channels])
            alphas.append(torch.exp(-decay * step))
            beta = torch.sigmoid(x @ weights[prefix + "beta_proj.weight"][head])
            moments.append(_moments(k[:, head], v[:, head], beta))

        start = torch.zeros(dim, dim, dtype=torch.float64)
        if config.enable_text_state and rows.text > 0:
            text = slice(0, rows.text)
            (k,), (v,) = (
                _features(name, [states[text]], config, weights, None, heads, convolve=False)
                for name, states in (("k", key), ("v", value))
            )
            beta = torch.sigmoid(inputs[text] @ weights[prefix + "beta_proj.weight"][head])
            # The text is one frame of its own, so the scaled rules divide by its number of rows.
            gram, cross = _moments(k[:, head], v[:, head], beta)
            start = 0.5 * _step(start, gram, cross, torch.ones(dim).double(), config.delta_rule, rows.text)

        count = len(frames)
        after, before = {-1: start}, {count: start}
        for frame in range(count):
            after[frame] = _step(
                after[frame - 1], *moments[frame], alphas[frame], config.delta_rule, rows.rows_per_frame
            )
        for frame in reversed(range(count)):
            before[frame] = _step(
                before[frame + 1], *moments[frame], alphas[frame], config.delta_rule, rows.rows_per_frame
            )

        for frame, original in enumerate(frames):
            low, high = (bound - dropped for bound in _bounds(config, original))
            past, future = after[max(low - 1, -1)], before[min(high + 1, count)]
            if config.bridge == "alpha":
                for inside in range(max(low, 0), frame + 1):
                    past = past * alphas[inside]
                for inside in range(frame, min(high, count - 1) + 1):
                    future = future * alphas[inside]
            read = queries[frame][:, head] @ (past + future).T
            read = _rms_norm(read, weights[prefix + "norm.weight"], 1e-6)
            gate = xs[frame] @ weights[prefix + "output_gate.down.weight"].T
            gate = gate @ weights[prefix + "output_gate.up.weight"][channels].T
            gate = torch.sigmoid(gate + weights[prefix + "output_gate.up.bias"][channels])
            first = original * rows.rows_per_frame
            output[first : first + rows.rows_per_frame, channels] = gate * read
    return output


def _reference_item(config, rows, weights, inputs, cos, sin, heads):
    weights = {name: tensor.double() for name, tensor in weights.items()}
    inputs, cos, sin = inputs.double(), cos.double(), sin.double()
    query, key, value = (inputs @ weights[f"to_{name}.weight"].T for name in ("q", "k", "v"))
    window = _window(config, rows, weights, query, key, value, cos, sin, heads)
    gated = window
    if config.enable_softmax_gate:
        gate = inputs @ weights["softmax_gate.up.weight"].T + weights["softmax_gate.up.bias"]
        gated = window * torch.sigmoid(gate).unsqueeze(-1)
    output = gated.flatten(1) @ weights["to_out.0.weight"].T
    readout = _readout(config, rows, weights, inputs, query, key, value, heads)
    video = slice(rows.video_start, rows.video_start + len(readout))
    output[video] += readout @ weights["to_out_linear.weight"].T
    return LayerResult(window, readout, output, _covered(config, rows))


@pytest.fixture(scope="session")
def make_rows():
    """The reference's row bookkeeping."""
    return Rows


@pytest.fixture(scope="session")
def window_mask():
    """A function returning the boolean ``[T, T]`` mask of a configuration and rows."""
    return _window_mask


@pytest.fixture(scope="session")
def reference_layer():
    """A function computing one item of a layer in float64; see `LayerResult`."""
    return _reference_item


@pytest.fixture(scope="session")
def make_layer():
    """A function building one hybrid attention layer with weights that make every part of it count.

    It returns the `MiniMaxH3Attention` and its weights by name, in float32.
    """
    from diffusers_h3 import apply_hybrid_attention

    def make(config, dtype=torch.float64, seed=0):
        generator = torch.Generator().manual_seed(seed)
        transformer = MiniMaxH3Transformer3DModel(
            num_attention_heads=HEADS,
            attention_head_dim=HEAD_DIM,
            hidden_size=HIDDEN_SIZE,
            num_layers=1,
            num_refiner_layers=1,
            ffn_dim=8,
            in_channels=1,
            audio_in_channels=2,
            text_dim=4,
            freq_dim=4,
            time_embed_hidden_dim=4,
            time_embed_dim=4,
            rope_freq_dim=ROTARY_DIM // 6,
        )
        attn = apply_hybrid_attention(transformer, config).transformer_blocks[0].attn
        for name, parameter in attn.named_parameters():
            scale = 1.0 / math.sqrt(parameter[0].numel()) if parameter.ndim > 1 else 0.5
            offset = 1.0 if name.endswith("norm.weight") or "norm_" in name else 0.0
            drawn = offset + scale * torch.randn(parameter.shape, generator=generator)
            parameter.data = drawn.to(parameter.dtype)
        weights = {name: parameter.detach().clone() for name, parameter in attn.named_parameters()}
        return attn.to(dtype).eval(), weights

    return make


@pytest.fixture(scope="session")
def make_inputs():
    """A function drawing a layer's inputs: hidden states ``[B, T, C]`` and rotary tables ``[T, rotary]``, float32."""

    def make(seq_len, batch=1, seed=1):
        generator = torch.Generator().manual_seed(seed)
        hidden_states = torch.randn(batch, seq_len, HIDDEN_SIZE, generator=generator)
        angles = torch.rand(seq_len, ROTARY_DIM // 2, generator=generator) * 6.0
        angles = torch.cat((angles, angles), dim=-1)
        return hidden_states, angles.cos(), angles.sin()

    return make


@pytest.fixture(scope="session")
def pack():
    """A function packing a request with Diffusers' own block: ``(position_ids, video_indices, text_indices)``."""

    def make(text=3, num_frames=7, grid=(2, 3), audio=2, keyframes=()):
        position_ids, _, video_indices, _, text_indices, _, _ = MiniMaxH3PrepareLayoutStep.build_packed_sequence(
            torch.ones(text, dtype=torch.long),
            num_latent_frames=num_frames,
            latent_height=2 * grid[0],
            latent_width=2 * grid[1],
            num_audio_latents=audio,
            patch_size=(1, 2, 2),
            audio_channels=2,
            audio_tag=2,
            video_tag=0,
            keyframe_anchors=keyframes,
        )
        return position_ids, video_indices, text_indices

    return make
