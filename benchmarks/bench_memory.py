"""What fits on small cards: the full-size VDN-H3 transformer and video VAE on one card whose allocator has a cap.

    python benchmarks/bench_memory.py --output outputs/memory --minutes 7

writes `memory.json` and `memory.md` into the output folder, after every row. A run is
`precision:offload[:stream][:eager]` with precision `fp8` or `bf16` and offload `none`, `block` or `leaf` (Diffusers'
group offload, as `VDNH3Pipeline.enable_group_offload` applies it to the transformer), or `vae:tiles` or `vae:whole`,
which decodes a clip with or without tiling. Every run is called once without a cap, to compile and to learn its peak,
and then timed under the smallest cap above that peak; where memory runs out, under the next. A row fits only where a
whole call ran. The VAE has nothing to compile: it learns its peak on a short clip.

Caps are GB of 10^9 bytes, for everything PyTorch's allocator reserves. The CUDA context and the libraries' own memory
are outside of it (`outside_gb`), as is the display; a card sold as 24 GB has 25.8, which pays for both.

What is compiled stays inside the hooks of the offload: whole blocks where blocks are offloaded, the wide linear layers
where leaves are. `--tiny` runs the same code on small models, on a CPU without caps.
"""

import argparse
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch._dynamo
from bench_attention import environment
from bench_dit import heading, make_parser, number, parse_clip, table, write_texts
from capped_memory import CudaMemory, Memory
from diffusers.hooks import HookRegistry, apply_group_offloading
from diffusers.hooks.group_offloading import (
    _GROUP_OFFLOADING,
    _LAYER_EXECUTION_TRACKER,
    _LAZY_PREFETCH_GROUP_OFFLOADING,
    ModuleGroup,
)
from diffusers.modular_pipelines import MiniMaxH3ModularPipeline, PipelineState
from diffusers.modular_pipelines.minimax_h3.decoders import MiniMaxH3VideoDecodeStep
from full_size import TINY_VAE, random_transformer, random_vae, request_inputs, sizes

from diffusers_h3 import HybridAttnProcessor
from diffusers_h3.models.quantization import FP8_LINEARS
from diffusers_h3.planning.workload import resident_bytes


CPU = torch.device("cpu")
# Streams first, since weights are pinned once for all of them, and in the order of what a row is worth.
RUNS = [
    "fp8:none",
    "fp8:block:stream",
    "fp8:leaf:stream",
    "vae:tiles",
    "fp8:block:stream:eager",
    "fp8:block",
    "vae:whole",
    "fp8:leaf",
    "bf16:none",
]
CAPS_GB = [16.0, 24.0, 32.0, 48.0, 80.0]
# Long enough to have every chunk that a clip is decoded in.
SHORT_CLIP = 39
DOES_NOT_FIT, NOT_RUN = "does not fit", "not run"

# Seconds to expect on an H200, so that no row is begun that would not end in time: of 345 frames called compiled,
# called otherwise and decoded; of moving the weights there and back without streams; of building and placing them.
_CALL_S, _EAGER_CALL_S, _DECODE_S, _MOVE_S, _BUILD_S, _PLACE_S = 11.0, 18.0, 25.0, 20.0, 35.0, 40.0
# Of compiling, for the first time and for another length or precision.
_FIRST_COMPILE_S, _COMPILE_S = 60.0, 15.0


@dataclass(frozen=True)
class Run:
    """Calls of the transformer, as named on the command line."""

    name: str
    precision: str
    offload: str
    use_stream: bool
    compiled: str

    def fields(self) -> dict:
        """Return what a row says of its run; whole blocks are what other benchmarks call compiled."""
        return {
            "run": f"hybrid:{self.precision}",
            "offload": self.offload,
            "use_stream": self.use_stream,
            "compiled": self.compiled == "blocks",
            "compiled_parts": self.compiled,
        }


@dataclass(frozen=True)
class Decoding:
    """Decoding of a clip by the video VAE."""

    name: str
    tiling: bool

    def fields(self) -> dict:
        """Return what a row says of its run."""
        return {"tiling": self.tiling}


def parse_run(name: str) -> Run | Decoding:
    """Return the run that a name of the command line means."""
    match = re.fullmatch(r"(fp8|bf16):(none|block|leaf)(:stream)?(:eager)?", name)
    if match is not None and not name.startswith(("fp8:none:stream", "bf16:none:stream")):
        precision, offload, stream, eager = match.groups()
        compiled = "nothing" if eager else "layers" if offload == "leaf" else "blocks"
        return Run(name, precision, offload, stream is not None, compiled)
    if name in ("vae:tiles", "vae:whole"):
        return Decoding(name, name == "vae:tiles")
    raise argparse.ArgumentTypeError(
        f"{name!r} is no run: `precision:offload[:stream][:eager]` with precision fp8 or bf16 and offload none, block "
        "or leaf (streams only with block or leaf), such as fp8:block:stream; or vae:tiles, vae:whole"
    )


def groups(model: torch.nn.Module) -> list[ModuleGroup]:
    """Return the groups that an offload moves."""
    registries = [module._diffusers_hook for module in model.modules() if hasattr(module, "_diffusers_hook")]
    hooks = [registry.get_hook(_GROUP_OFFLOADING) for registry in registries]
    return list({id(hook.group): hook.group for hook in hooks if hook is not None}.values())


def detach(model: torch.nn.Module) -> None:
    """Take an offload's hooks off, leaving the weights where they are, and what was compiled."""
    registry = HookRegistry.check_if_exists_or_initialize(model)
    for name in (_LAZY_PREFETCH_GROUP_OFFLOADING, _LAYER_EXECUTION_TRACKER, _GROUP_OFFLOADING):
        registry.remove_hook(name, recurse=True)
    for module in model.modules():
        module.__dict__.pop("forward", None)


def compile_parts(model: torch.nn.Module, run: Run) -> None:
    """Compile what hooks will go around: `Module.compile` would take them into the graph, which they break."""
    pattern = FP8_LINEARS.removeprefix("re:")
    for name, module in model.named_modules():
        is_block = type(module).__name__ in model._repeated_blocks
        if is_block if run.compiled == "blocks" else run.compiled == "layers" and re.fullmatch(pattern, name):
            # Not dynamic, so that the second length compiles as the first did, and not for all lengths.
            module.forward = torch.compile(module.forward, fullgraph=True, dynamic=False)


class Bench:
    """The models, kept between rows, and where they are."""

    def __init__(self, arguments: argparse.Namespace, memory: Memory):
        self.arguments = arguments
        self.memory = memory
        self.model: torch.nn.Module | None = None
        self.vae: torch.nn.Module | None = None
        self.placed: Run | None = None
        self.not_placed: Run | None = None
        self.compiled: set[tuple[str, str, int]] = set()

    def expected_seconds(self, run: Run | Decoding, frames: int) -> float:
        """Return about how long a row takes, from where the weights are now."""
        share, placed = frames / 345, self.placed
        if isinstance(run, Decoding):
            return 5 + _DECODE_S * share
        call = (_CALL_S if run.compiled == "blocks" else _EAGER_CALL_S) * share
        call += _MOVE_S if run.offload != "none" and not run.use_stream else 0
        seconds = 2 * call
        if placed is None or placed.precision != run.precision:
            seconds += _BUILD_S
        if placed != run and run.offload != "none" and not (placed and placed.use_stream and run.use_stream):
            seconds += _PLACE_S
        if run.compiled != "nothing" and (run.compiled, run.precision, frames) not in self.compiled:
            seconds += _COMPILE_S if self.compiled else _FIRST_COMPILE_S
        return seconds

    def place(self, run: Run) -> None:
        """Build the run's model, unless it is there, and put its weights and hooks where the run wants them."""
        if self.placed == run:
            return
        # A failure on the way leaves the weights anywhere, and the next run a model of its own.
        model, placed, self.model, self.placed = self.model, self.placed, None, None
        self.not_placed, self.vae = run, None
        self.memory.limit(None)
        if model is None or placed.precision != run.precision:
            del model
            self.memory.limit(None)
            is_fp8 = run.precision == "fp8"
            config = sizes(True, self.arguments.tiny)
            model = random_transformer(True, is_fp8, self.memory.device, self.arguments.layers, **config)
            model.set_attn_processor(HybridAttnProcessor(backend=self.arguments.backend))
        elif not (placed.use_stream and run.use_stream):
            # Only from streams to streams can weights stay where they are: pinned, and they need no second copy.
            for group in groups(model):
                group.onload_()
            self.memory.synchronize()
        detach(model)
        compile_parts(model, run)
        if run.offload != "none":
            self.memory.free_pinned()  # or the weights would be in the computer's memory twice
            apply_group_offloading(
                model,
                onload_device=torch.device(self.memory.device),
                offload_device=CPU,
                offload_type=f"{run.offload}_level",
                num_blocks_per_group=1 if run.offload == "block" else None,
                use_stream=run.use_stream,
            )
        self.memory.synchronize()
        self.model, self.placed, self.not_placed = model, run, None

    # Blocks and layers are compiled for every length and both kinds of weights, each with a graph of its own.
    @torch._dynamo.config.patch(recompile_limit=64)
    @torch.no_grad()
    def call(self, run: Run, frames: int, row: dict) -> None:
        """Time one call of the transformer under the smallest cap that it fits."""
        clip, started = self.arguments, time.perf_counter()
        self.place(run)
        row["place_s"], row["pinned_gb"] = time.perf_counter() - started, self.memory.pinned_gb()
        inputs = request_inputs(self.model, clip.height, clip.width, frames, clip.text_rows, self.memory.device)
        row["rows"] = inputs["position_ids"].shape[0]
        row["weights_gb"] = resident_bytes(run.precision, run.offload, run.use_stream) / 1e9

        def once() -> tuple[float, bool]:
            started = time.perf_counter()
            video, audio = self.model(**inputs)
            self.memory.synchronize()
            return time.perf_counter() - started, bool(video.isfinite().all() and audio.isfinite().all())

        self.memory.limit(None)
        row["first_call_s"], _ = once()
        self.compiled.add((run.compiled, run.precision, frames))
        row["uncapped_peak_gb"] = self.memory.peak()["peak_gb"]
        self.under_a_cap(once, row, row["uncapped_peak_gb"])

    def recover(self) -> None:
        """Take off the card what a call has left there that did not end."""
        self.memory.limit(None)
        if self.model is not None:
            try:
                for group in groups(self.model):
                    group.offload_()
            except RuntimeError:  # weights that cannot be moved any more: the next run has a model of its own
                self.model = self.placed = None

    @torch.no_grad()
    def decode(self, run: Decoding, frames: int, row: dict) -> None:
        """Time the decoding of one clip, to arrays in the computer's memory, under the smallest cap it fits."""
        if self.placed is not None and self.placed.offload == "none":
            self.model = self.placed = None
        self.memory.limit(None)
        if self.vae is None:
            self.vae = random_vae(self.memory.device, **(TINY_VAE if self.arguments.tiny else {}))
        self.vae.enable_tiling() if run.tiling else self.vae.disable_tiling()
        row["weights_gb"] = sum(weight.nbytes for weight in self.vae.parameters()) / 1e9
        components = MiniMaxH3ModularPipeline(blocks=MiniMaxH3VideoDecodeStep())
        components.update_components(vae=self.vae)

        def once(length: int) -> tuple[float, bool]:
            state = PipelineState()
            state.set("latents", self.latents(length))
            state.set("output_type", "np")
            started = time.perf_counter()
            _, state = MiniMaxH3VideoDecodeStep()(components, state)
            self.memory.synchronize()
            seconds = time.perf_counter() - started
            (video,) = state.get("videos")
            expected = (length, self.arguments.height, self.arguments.width, 3)
            if video.shape != expected:
                raise RuntimeError(f"decoded to {video.shape} instead of {expected}")
            return seconds, bool(torch.from_numpy(video[-1]).isfinite().all())

        once(SHORT_CLIP)
        # What comes after the VAE has the decoded video and two copies of it in float32 at once.
        copies = 3 * frames * self.arguments.height * self.arguments.width * (2 + 4 + 4) / 1e9
        least_peak = max(self.memory.peak()["peak_gb"], row["weights_gb"] + copies)
        self.under_a_cap(lambda: once(frames), row, least_peak)

    def latents(self, frames: int) -> torch.Tensor:
        """Return random latents of a clip."""
        clip = self.arguments
        shape = (1, 24, (frames - 5) // 17 * 5 + 2, clip.height // 16, clip.width // 16)
        generator = torch.Generator(self.memory.device).manual_seed(2)
        return torch.randn(shape, generator=generator, device=self.memory.device)

    def under_a_cap(self, function: Callable, row: dict, peak_gb: float) -> None:
        """Run `function` under one cap after the other until it ends, and enter what it took into the row."""
        for cap in self.memory.caps(self.arguments.caps, peak_gb):
            self.memory.limit(cap)
            try:
                seconds, finite = function()
            except torch.OutOfMemoryError:
                row.setdefault("too_small_gb", []).append(cap)
            else:
                row |= {"s_per_call": seconds, "finite": finite, "memory_cap_gb": cap, **self.memory.peak()}
                return
            # Out here, where the exception no longer holds what the call had allocated.
            self.recover()
        row["failed"] = (
            f"{DOES_NOT_FIT}: its peak is {peak_gb:.1f} GB or more, the largest cap {max(self.arguments.caps):g}"
        )


def parts_of(row: dict) -> str:
    """Name the settings of a transformer row."""
    offload = {"none": "no offload", "block": "offload by block", "leaf": "offload by leaf"}[row["offload"]]
    streams = " with streams" if row["use_stream"] else ""
    compiled = {"blocks": "blocks compiled", "layers": "linear layers compiled", "nothing": "eager"}
    return f"{row['run'].partition(':')[2]}, {offload}{streams}, {compiled[row['compiled_parts']]}"


def _cap(row: dict) -> str:
    if "failed" in row:
        return next((reason for reason in (DOES_NOT_FIT, NOT_RUN) if row["failed"].startswith(reason)), "failed")
    return "no cap" if row["memory_cap_gb"] is None else f"{row['memory_cap_gb']:g}"


def _figures(row: dict) -> list[str]:
    return [_cap(row), number(row, "s_per_call", 2), *(number(row, key, 1) for key in ("peak_gb", "reserved_gb"))]


def transformer_table(report: dict) -> list[str]:
    """Return the lines of the table of transformer calls."""
    header = ["transformer", "frames", "fits in GB", "s per call", "peak GB", "reserved GB", "pinned GB"]
    return table(
        header,
        [
            [parts_of(row), str(row["frames"]), *_figures(row), number(row, "pinned_gb", 1)]
            for row in sorted(report["runs"], key=lambda row: row["frames"])
        ],
    )


def decoding_table(report: dict) -> list[str]:
    """Return the lines of the table of decoded clips."""
    rows = sorted(report["decoding"], key=lambda row: row["frames"])
    return table(
        ["video VAE", "frames", "fits in GB", "seconds", "peak GB", "reserved GB"],
        [["in tiles" if row["tiling"] else "whole frames", str(row["frames"]), *_figures(row)] for row in rows],
    )


def markdown(report: dict) -> str:
    """Return the report's tables, and what failed."""
    lines = [*heading(report), *transformer_table(report), "", *decoding_table(report)]
    for row in (*report["runs"], *report["decoding"]):
        if "failed" in row:
            name = parts_of(row) if "offload" in row else f"VAE, tiling {row['tiling']}"
            lines += ["", f"{name}, {row['frames']} frames: {row['failed'].strip().splitlines()[-1]}"]
    return "\n".join(lines) + "\n"


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__, frames=[124, 345], output="outputs/memory")
    parser.add_argument("--runs", type=parse_run, nargs="+", default=[parse_run(name) for name in RUNS])
    parser.add_argument("--caps", type=float, nargs="+", default=CAPS_GB, help="GB of 10^9 bytes")
    parser.add_argument("--minutes", type=float, default=60.0, help="no row is begun that would end later")
    arguments = parse_clip(parser, argv)
    if arguments.layers < 1 or min(arguments.caps) <= 0:
        parser.error(f"`--layers` and `--caps` must be positive, got {arguments.layers} and {min(arguments.caps):g}")
    return arguments


def main(argv: list[str] | None = None) -> int:
    started = time.perf_counter()
    arguments = parse_arguments(argv)
    # Fragments would count against the cap; read when the allocator is first used.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    memory = CudaMemory() if torch.cuda.is_available() else Memory()
    bench = Bench(arguments, memory)
    report = {
        "environment": environment(torch.device(memory.device)),
        "settings": {
            "canvas": f"{arguments.width}×{arguments.height}",
            **{key: getattr(arguments, key) for key in ("layers", "text_rows", "backend", "caps", "tiny")},
            "allocator": os.environ["PYTORCH_ALLOC_CONF"],
        },
        "runs": [],
        "decoding": [],
    }
    clip = {key: getattr(arguments, key) for key in ("height", "width", "text_rows")}
    for run in arguments.runs:
        is_decoding = isinstance(run, Decoding)
        for frames in arguments.frames:
            row = {**run.fields(), "frames": frames, **clip}
            elapsed = time.perf_counter() - started
            expected = bench.expected_seconds(run, frames)
            if run == bench.not_placed:
                row["failed"] = f"{NOT_RUN}: its weights could not be placed for the length before"
            elif elapsed + expected > 60 * arguments.minutes:
                row["failed"] = f"{NOT_RUN}: about {expected:.0f} s more after {elapsed:.0f} s exceed `--minutes`"
            else:
                try:
                    (bench.decode if is_decoding else bench.call)(run, frames, row)
                except Exception:  # one run that fails must not cost the others
                    row["failed"] = traceback.format_exc()[-1500:]
                if "failed" in row:
                    bench.recover()
            row["ended_s"] = time.perf_counter() - started
            report["decoding" if is_decoding else "runs"].append(row)
            texts = {"memory.json": json.dumps(report, indent=1), "memory.md": markdown(report)}
            write_texts(arguments.output, texts)
            print(f"{run.name}: {json.dumps(row)}", flush=True)
    print(markdown(report))
    return 1 if any("failed" in row for row in (*report["runs"], *report["decoding"])) else 0


if __name__ == "__main__":
    sys.exit(main())
