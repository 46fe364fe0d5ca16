"""One VDN-H3 layer at full size: every operator checked against the reference and timed, then the whole block.

    python benchmarks/bench_layer.py --output outputs/layer

Each section runs on its own: a failing one prints its traceback and the rest goes on. `--tiny` runs the same code on a
small model (any device), to test the script.
"""

import argparse
import contextlib
import copy
import json
import pathlib
import time
import traceback
from unittest import mock

import torch
from bench_dit import profile_kernels
from full_size import TINY_HYBRID, random_transformer, request_inputs

from diffusers_h3.attention_processors.hybrid import HybridAttnProcessor
from diffusers_h3.hybrid.layout import SequenceLayout, plan_branch, plan_window
from diffusers_h3.ops import delta_rule, frame_statistics, linear_state, short_conv
from diffusers_h3.ops.delta_rule import reference as delta_reference
from diffusers_h3.ops.frame_statistics import reference as statistics_reference
from diffusers_h3.ops.linear_state import reference as state_reference
from diffusers_h3.ops.short_conv import reference as conv_reference
from diffusers_h3.ops.window_attention import window_attention


# Rows, columns and warps of the convolution's tile that are tried beside the chosen one.
CONV_TILES = ((4, 2, 4), (4, 2, 8), (2, 4, 4), (3, 3, 4), (3, 3, 8), (3, 2, 4), (2, 2, 4), (4, 2, 2))


class Bench:
    def __init__(self, arguments):
        self.cuda = torch.cuda.is_available()
        self.device = "cuda" if self.cuda else "cpu"
        self.output = pathlib.Path(arguments.output)
        self.output.mkdir(parents=True, exist_ok=True)
        self.results = {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
        if self.cuda:
            self.results["card"] = torch.cuda.get_device_name()

    def record(self, name, value):
        self.results[name] = value
        print(f"{name:58} {value}", flush=True)
        (self.output / "layer.json").write_text(json.dumps(self.results, indent=1))

    def section(self, name, function):
        started = time.time()
        try:
            function()
        except Exception:  # a section's failure is printed and must not cost the others their run
            print(f"FAILED {name}\n{traceback.format_exc()}", flush=True)
            self.results[f"{name}.failed"] = traceback.format_exc()[-2000:]
        if self.cuda:
            torch.cuda.empty_cache()
        print(f"-- {name}: {time.time() - started:.1f} s", flush=True)

    def time(self, name, function, repeats=5):
        """Record the median of event-timed runs in milliseconds after two warm-ups, without the NaN filling."""
        filling = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(False)
        for _ in range(2):
            function()
        samples = []
        for _ in range(repeats):
            if not self.cuda:
                started = time.perf_counter()
                function()
                samples.append((time.perf_counter() - started) * 1e3)
                continue
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function()
            stop.record()
            torch.cuda.synchronize()
            samples.append(start.elapsed_time(stop))
        torch.use_deterministic_algorithms(filling, warn_only=True)
        self.record(f"{name}.ms", round(sorted(samples)[len(samples) // 2], 3))


def relative(actual, expected):
    actual, expected = actual.double(), expected.double()
    return float((actual - expected).norm() / expected.norm())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="outputs/layer")
    parser.add_argument("--frames", type=int, default=345)
    parser.add_argument("--sections", default="ops,window,error,block")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    bench = Bench(arguments)
    torch.set_grad_enabled(False)
    # Every allocation starts as NaN while results are checked, so that an unwritten output cannot pass.
    torch.use_deterministic_algorithms(True, warn_only=True)
    tiny, size = (TINY_HYBRID, (96, 160)) if arguments.tiny else ({}, (768, 1344))
    model = random_transformer(True, False, bench.device, num_layers=1, **tiny)
    inputs = request_inputs(model, *size, arguments.frames, 200, bench.device)
    layout = SequenceLayout.from_indices(inputs["position_ids"], inputs["video_indices"], inputs["text_indices"])
    bench.record("layout", repr(layout))
    config = model.transformer_blocks[0].attn.linear_attention.config
    heads, dim = model.config.num_attention_heads, model.config.attention_head_dim
    generator = torch.Generator(bench.device).manual_seed(2)

    def randn(*shape, dtype=torch.bfloat16):
        return torch.randn(shape, generator=generator, device=bench.device, dtype=dtype)

    def ops():
        plan = plan_branch(config, layout.num_frames)
        F, S = plan.num_frames, layout.rows_per_frame
        x = randn(1, F, S, heads * dim)
        spatial = randn(heads * dim, 1, 5, 5) / 5
        temporal = randn(heads * dim, 1, 5) / 2
        sample = slice(0, 2 * dim)
        taps = (spatial[sample].double(), temporal[sample].double())
        for label, normalize in (("k", True), ("v", False)):

            def features(normalize=normalize):
                return short_conv.convolved_features(x, spatial, temporal, layout.grid, heads, normalize)

            expected = conv_reference.convolved_features(x[..., sample].double(), *taps, layout.grid, 2, normalize)
            if bench.cuda:
                from diffusers_h3.ops.short_conv import triton as conv_kernels

                chosen = conv_kernels.TILES[normalize]
                for tile in CONV_TILES:
                    conv_kernels.TILES[normalize] = conv_kernels.Tile(*tile)
                    bench.time(f"convolved_features.{label}.{'x'.join(map(str, tile))}", features)
                conv_kernels.TILES[normalize] = chosen
            bench.record(f"convolved_features.{label}.error", relative(features()[..., :2, :], expected))
            bench.time(f"convolved_features.{label}", features)
        del expected
        q = short_conv.pointwise_features(x, heads, True)
        expected = conv_reference.pointwise_features(x[..., sample].double(), 2, True)
        bench.record("pointwise_features.q.error", relative(q[..., :2, :], expected))
        bench.time("pointwise_features.q", lambda: short_conv.pointwise_features(x, heads, True))
        k = short_conv.convolved_features(x, spatial, temporal, layout.grid, heads, True)
        other = randn(1, F, S, heads * dim)
        v = short_conv.convolved_features(other, spatial, temporal, layout.grid, heads, False)
        del other
        beta = torch.sigmoid(randn(1, F, S, heads))
        gram, cross = frame_statistics.frame_statistics(k, v, beta)
        expected = statistics_reference.frame_statistics(
            k[:, :3, :, :2].double(), v[:, :3, :, :2].double(), beta[:, :3, :, :2].double()
        )
        for name, actual, wanted in zip(("gram", "cross"), (gram, cross), expected, strict=True):
            bench.record(f"frame_statistics.{name}.error", relative(actual[:, :3, :2], wanted))
        bench.time("frame_statistics", lambda: frame_statistics.frame_statistics(k, v, beta))
        log_alpha = -torch.rand((1, F, heads, dim), generator=generator, device=bench.device) * 0.2
        alpha = log_alpha.exp()
        transition, update = delta_rule.delta_factors(gram, cross, alpha, "vdn_solve", S)
        wanted = delta_reference.solve_factors(
            gram[:, :9, :2].double(), cross[:, :9, :2].double(), alpha[:, :9, :2].double(), 1.0, 1.0
        )
        for name, actual, expected in zip(("transition", "update"), (transition, update), wanted, strict=True):
            bench.record(f"delta_factors.{name}.error", relative(actual[:, :9, :2], expected))
        bench.time("delta_factors", lambda: delta_rule.delta_factors(gram, cross, alpha, "vdn_solve", S))
        initial = randn(1, heads, dim, dim, dtype=torch.float32) * 0.1

        def states(transition, update, initial, log_alpha):
            return linear_state.linear_states(transition, update, initial, log_alpha, plan.prefix, plan.suffix)

        actual = states(transition, update, initial, log_alpha)
        wanted = states(transition[:, :, :2].double(), update[:, :, :2].double(), initial[:, :2].double(),
                        log_alpha[:, :, :2].double())  # fmt: skip
        bench.record("linear_states.error", relative(actual[:, :, :2], wanted))
        bench.time("linear_states", lambda: states(transition, update, initial, log_alpha))
        gate, weight = randn(1, F, S, heads * dim), randn(dim) / 4 + 1
        y = linear_state.readout(actual, q, gate, weight, 1e-6)
        expected = state_reference.readout(
            actual[:, :4, :2].double(),
            q[:, :4, :, :2].double(),
            gate[:, :4, :, : 2 * dim].double(),
            weight.double(),
            1e-6,
        )
        bench.record("readout.error", relative(y[:, :4, :, : 2 * dim], expected))
        bench.time("readout", lambda: linear_state.readout(actual, q, gate, weight, 1e-6))

    def window():
        q, k, v = (randn(1, layout.seq_len, heads, dim) for _ in range(3))
        gate = randn(1, layout.seq_len, heads)
        groups = plan_window(config, layout.num_frames)
        rows = torch.randint(layout.seq_len, (64,), generator=generator, device=bench.device).cpu().tolist()
        expected = []
        for row in rows:
            frame = -1 if row < layout.video_start else (row - layout.video_start) // layout.rows_per_frame
            keys = next(keys for queries, keys in groups if any(a <= frame < b for a, b in queries))
            keys = [layout.rows(*frames) for frames in keys]
            key, value = (torch.cat([t[0, a:b] for a, b in keys]).double() for t in (k, v))
            logits = torch.einsum("hd,khd->hk", q[0, row].double(), key) * dim**-0.5
            expected.append(
                torch.einsum("hk,khd->hd", logits.softmax(-1), value) * gate[0, row].double().sigmoid()[:, None]
            )
        expected = torch.stack(expected)

        def sdpa(query, key, value):
            rows = (rows.transpose(1, 2) for rows in (query, key, value))
            return torch.nn.functional.scaled_dot_product_attention(*rows).transpose(1, 2)

        for backend, fp8 in (("sdpa", False), ("torch_flash", False), ("cudnn", False), ("flashinfer", False),
                             ("flashinfer", True)):  # fmt: skip
            name = f"window.{backend}{'.fp8' if fp8 else ''}"

            def run(backend=backend, fp8=fp8):
                return window_attention(q, k, v, groups, sdpa, gate, backend, fp8, layout.rows)

            def check(name=name, run=run):
                started = time.time()
                actual = run()
                bench.record(f"{name}.first_call.s", round(time.time() - started, 1))
                bench.record(f"{name}.error", relative(actual[0, rows], expected))
                bench.time(name, run, repeats=3)

            bench.section(name, check)

    def error():
        """The attention layer in bf16, by its kernels and by the eager references, against float32 references."""
        attn = model.transformer_blocks[0].attn
        hidden = randn(1, layout.seq_len, model.config.hidden_size)
        rotary = (*model.rope.forward(inputs["position_ids"]), layout)
        attn.set_processor(HybridAttnProcessor())
        kernels = attn(hidden, rotary)
        assert kernels.isfinite().all()
        attn.set_processor(HybridAttnProcessor(backend="sdpa"))
        modules = (short_conv, frame_statistics, delta_rule, linear_state)
        with contextlib.ExitStack() as stack:
            for module in modules:
                stack.enter_context(mock.patch.object(module, "use_triton", return_value=False))
            eager = attn(hidden, rotary)
            if bench.cuda:
                torch.cuda.empty_cache()
            expected = copy.deepcopy(attn).float()(hidden.float(), rotary)
        bench.record("layer.bf16.kernels.error", relative(kernels, expected))
        bench.record("layer.bf16.eager.error", relative(eager, expected))
        video = slice(*layout.rows(1, layout.num_frames - 1))
        bench.record("layer.bf16.kernels.worst_frame.error", max(
            relative(one, other) for one, other in zip(
                kernels[0, video].split(layout.rows_per_frame), expected[0, video].split(layout.rows_per_frame),
                strict=True,
            )
        ))  # fmt: skip

    def block():
        block = model.transformer_blocks[0]
        hidden = randn(1, layout.seq_len, model.config.hidden_size)
        temb = randn(2, model.config.time_embed_dim, dtype=torch.float32)
        adaln = inputs["timestep_indices"] * 3 + inputs["token_tags"]
        rotary = (*model.rope.forward(inputs["position_ids"]), layout)
        processors = {"auto": HybridAttnProcessor(), "auto.fp8": HybridAttnProcessor(fp8=True)}
        eager = None
        for precision in ("bf16", "fp8"):
            if precision == "fp8":
                if not bench.cuda:
                    return
                quantized = random_transformer(True, True, bench.device, num_layers=1, **tiny)
                block = quantized.transformer_blocks[0]
            for label, processor in processors.items():
                if label == "auto.fp8" and (precision == "bf16" or not bench.cuda):
                    continue
                block.attn.set_processor(processor)
                if precision == "bf16":
                    eager = block(hidden, temb, adaln, rotary)
                    bench.time("block.bf16.eager", lambda block=block: block(hidden, temb, adaln, rotary), repeats=3)
                torch._dynamo.reset()
                compiled = torch.compile(block, fullgraph=True)
                torch.use_deterministic_algorithms(False)
                name = f"block.{precision}.{label}.compiled"
                started = time.time()
                actual = compiled(hidden, temb, adaln, rotary)
                bench.record(f"{name}.first_call.s", round(time.time() - started, 1))
                bench.record(f"{name}.difference_to_bf16_eager", relative(actual, eager))
                bench.time(name, lambda compiled=compiled: compiled(hidden, temb, adaln, rotary), repeats=3)
                if bench.cuda:
                    bench.results[f"{name}.profile"] = profile_kernels(
                        lambda compiled=compiled: compiled(hidden, temb, adaln, rotary), bench.device
                    )[:28]

    for name in arguments.sections.split(","):
        torch.use_deterministic_algorithms(name != "block", warn_only=True)
        bench.section(name, {"ops": ops, "window": window, "error": error, "block": block}[name])
    if bench.cuda:
        bench.record("peak.gb", round(torch.cuda.max_memory_allocated() / 1e9, 2))


if __name__ == "__main__":
    main()
