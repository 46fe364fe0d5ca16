"""Check FlashInferProcessor on a real card and time it, in one run of a few minutes.

    python benchmarks/gpu_check_flashinfer.py --output results/flashinfer.json

Builds the kernels side by side, then runs every section of `SECTIONS`; one that fails is recorded with its traceback
and the next one runs. The results are written after every section. `--stand-in` replaces FlashInfer by the tests'
stand-in and shrinks everything, to try the script itself without a card.
"""

import argparse
import contextlib
import json
import pathlib
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F


# The other scripts and the tests' models; neither is a package.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests" / "attention_processors"))

import bench_attention
from diffusers.utils import logging as diffusers_logging
from full_size import random_wan
from tiny_models import make_inputs, make_model

from diffusers_h3 import FlashInferProcessor
from diffusers_h3.attention_processors.flashinfer_backend import backend_for
from diffusers_h3.ops.prefill import PrefillOptions, prefill_attention, prefill_refusal


# Kernel, dtype and head dimension of what the sections call; each is compiled by itself.
VARIANTS = [
    ("fa3", torch.bfloat16, 128),
    ("fa2", torch.bfloat16, 128),
    ("fa3", torch.bfloat16, 64),
    ("fa2", torch.bfloat16, 64),
    ("fa3", torch.bfloat16, 256),
    ("fa3", torch.float16, 128),
    ("fa2", torch.float16, 128),
    ("fa3", torch.float8_e4m3fn, 128),
]


class Check:
    """What the sections share: the device, the sizes, and the FlashInfer calls made so far."""

    def __init__(self, device: torch.device, full_size: bool):
        self.device = device
        self.full_size = full_size
        self.kernels: list[str] = []

    def record_calls(self) -> None:
        """Wrap FlashInfer's two functions, so that it is seen which kernel ran."""
        import flashinfer.cudnn
        import flashinfer.prefill

        single, cudnn = (
            flashinfer.prefill.single_prefill_with_kv_cache,
            flashinfer.cudnn.cudnn_batch_prefill_with_kv_cache,
        )

        def recorded_single(*args, **kwargs):
            self.kernels.append("fp8" if args[0].dtype == torch.float8_e4m3fn else kwargs["backend"])
            return single(*args, **kwargs)

        def recorded_cudnn(*args, **kwargs):
            self.kernels.append("cudnn")
            return cudnn(*args, **kwargs)

        flashinfer.prefill.single_prefill_with_kv_cache = recorded_single
        flashinfer.cudnn.cudnn_batch_prefill_with_kv_cache = recorded_cudnn

    @contextlib.contextmanager
    def expect(self, *kernels: str):
        """Require that exactly these kernels run inside."""
        self.kernels.clear()
        yield
        assert self.kernels == list(kernels), f"expected {kernels}, ran {self.kernels}"

    def normal(self, *shape, dtype=torch.bfloat16):
        return torch.randn(shape, device=self.device, dtype=dtype)

    def to_device(self, inputs: dict) -> dict:
        return {name: value.to(self.device) for name, value in inputs.items()}


def relative_error(actual, expected) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def require_close(actual, baseline, reference, what: str) -> dict:
    """Require an error of at most twice the baseline's, both against the reference; both are returned."""
    error, allowed = relative_error(actual, reference), relative_error(baseline, reference)
    assert error <= 2 * allowed, f"{what}: error {error:.2e}, PyTorch's own {allowed:.2e}"
    return {"error": error, "pytorch": allowed}


def sdpa(query, key, value, allowed=None, is_causal=False):
    rows = (x.transpose(1, 2) for x in (query, key, value))
    if is_causal:
        causal = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool, device=query.device).tril()
        allowed = causal if allowed is None else allowed & causal
    return F.scaled_dot_product_attention(*rows, attn_mask=allowed, enable_gqa=True).transpose(1, 2)


def attend(query, key, value, mask=None, is_causal=False, **options):
    options = PrefillOptions(**options)
    refusal = prefill_refusal(query, key, value, mask, is_causal, None, options)
    assert refusal is None, refusal
    return prefill_attention(query, key, value, mask, is_causal, None, options)


# --- sections --------------------------------------------------------------------------------------------------------


def build(check: Check) -> dict:
    """Compile all kernels at once; FlashInfer itself would compile each at its first call, one after the other."""
    if not check.full_size:
        return {}
    from flashinfer.jit.attention import gen_single_prefill_module
    from flashinfer.quantization import packbits

    def compile_one(variant):
        kernel, dtype, head_dim = variant
        output = torch.bfloat16 if dtype == torch.float8_e4m3fn else dtype
        start = time.perf_counter()
        gen_single_prefill_module(
            kernel, dtype, dtype, output, head_dim, head_dim, 0, False, False, False
        ).build_and_load()
        return time.perf_counter() - start

    with ThreadPoolExecutor(len(VARIANTS) + 1) as pool:
        masks = pool.submit(packbits, torch.ones(64, dtype=torch.bool, device=check.device), "little")
        times = list(pool.map(compile_one, VARIANTS))
        masks.result()
    names = [f"{kernel} {dtype} {head_dim}" for kernel, dtype, head_dim in VARIANTS]
    return dict(zip(names, times, strict=True))


def values(check: Check) -> dict:
    """Every kernel against float64: self, cross, grouped heads, causal, padding, both, one item and three."""
    rows, keys = (777, 513) if check.full_size else (37, 29)
    results = {}
    for kernel, dtype, head_dim in VARIANTS:
        if dtype == torch.float8_e4m3fn:
            continue
        for batch in (1, 3):
            for heads, key_heads in ((8, 8), (8, 2)):
                for case in ("self", "cross", "causal", "padding", "padding and causal"):
                    if kernel == "fa3" and "padding" in case:
                        continue
                    columns = keys if case == "cross" else rows
                    query = check.normal(batch, rows, heads, head_dim, dtype=dtype)
                    key, value = (check.normal(batch, columns, key_heads, head_dim, dtype=dtype) for _ in range(2))
                    mask = None
                    if "padding" in case:
                        lengths = torch.tensor([columns, columns // 2, 1][:batch], device=check.device)
                        mask = torch.arange(columns, device=check.device) < lengths[:, None]
                    allowed = None if mask is None else mask[:, None, None]
                    causal = "causal" in case
                    with check.expect(*[kernel] * batch):
                        actual = attend(query, key, value, mask, causal, kernel=kernel)
                    reference = sdpa(*(x.double() for x in (query, key, value)), allowed, causal)
                    name = f"{kernel} {dtype} {head_dim} {case}, batch {batch}, {heads}/{key_heads} heads"
                    baseline = sdpa(query, key, value, allowed, causal)
                    results[name] = require_close(actual, baseline, reference, name)
    query, key = check.normal(1, 64, 2, 128), check.normal(1, 64, 2, 128)
    mask = torch.zeros(1, 1, 64, 64, dtype=torch.bool, device=check.device)
    mask[:, :, 1:] = True
    assert (attend(query, key, key, mask)[0, 0] == 0).all(), "a row without keys is not zero"
    return results


def cudnn_values(check: Check) -> dict:
    """cuDNN against float64, contiguous inputs and views of one packed buffer, in both orders."""
    rows, results = (777 if check.full_size else 37), {}
    for dtype in (torch.bfloat16, torch.float16):
        for first in ("contiguous", "packed"):
            # Another length for each order, so that each meets graphs of its own.
            rows += 1
            packed = check.normal(3, rows, 3, 8, 128, dtype=dtype)
            views = packed.unbind(2)
            copies = [view.contiguous() for view in views]
            reference, baseline = sdpa(*(x.double() for x in copies)), sdpa(*copies)
            for inputs in (copies, views) if first == "contiguous" else (views, copies):
                with check.expect("cudnn"):
                    actual = attend(*inputs, prefill="cudnn")
                for item in range(3):
                    name = f"{dtype} {first} first, item {item}"
                    results[name] = require_close(actual[item], baseline[item], reference[item], name)
        for case in ("cross", "causal", "grouped"):
            query = check.normal(3, rows, 8, 128, dtype=dtype)
            size = (3, rows // 2 if case == "cross" else rows, 2 if case == "grouped" else 8, 128)
            key, value = check.normal(*size, dtype=dtype), check.normal(*size, dtype=dtype)
            with check.expect("cudnn"):
                actual = attend(query, key, value, is_causal=case == "causal", prefill="cudnn")
            reference = sdpa(*(x.double() for x in (query, key, value)), None, case == "causal")
            baseline = sdpa(query, key, value, None, case == "causal")
            results[f"{dtype} {case}"] = require_close(actual, baseline, reference, f"cudnn {dtype} {case}")
    return results


def fp8_values(check: Check) -> dict:
    """The error of float8 inputs, on normal numbers and on heads of very different size."""
    results = {}
    for name, spread in (("equal heads", 0.0), ("heads from 0.01 to 100", 2.0)):
        size = (1, 4096 if check.full_size else 64, 8, 128)
        query, key, value = (check.normal(*size) for _ in range(3))
        value = value * torch.logspace(-spread, spread, 8, device=check.device)[:, None].bfloat16()
        with check.expect("fp8"):
            actual = attend(query, key, value, fp8=True)
        reference = sdpa(*(x.double() for x in (query, key, value)))
        error = max(relative_error(actual[:, :, head], reference[:, :, head]) for head in range(8))
        results[name] = {
            "largest error of a head": error,
            "pytorch": relative_error(sdpa(query, key, value), reference),
        }
        # Inputs in e4m3 alone give 0.047; the kernel also rounds the probabilities to it.
        assert error < 2**-3, f"{name}: {error}"
    return results


def tiny_models(check: Check) -> dict:
    """Whole tiny models, both prefills, one item and three, equal to the stock processor up to rounding."""
    results = {}
    for kind in ("wan", "wan_i2v", "wan_expand_timesteps", "h3"):
        for batch in (1, 3):
            for prefill in ("single", "cudnn"):
                changes = {"added_kv_proj_dim": 256} if kind == "wan_i2v" else {}
                model = make_model(kind, attention_head_dim=128, **changes).to(check.device)
                inputs = check.to_device(make_inputs(kind, batch))
                reference = model(**inputs, return_dict=False)[0]
                model = model.to(torch.bfloat16)
                baseline = model(**inputs_as(inputs, torch.bfloat16), return_dict=False)[0]
                model.set_attn_processor(FlashInferProcessor(prefill=prefill))
                self_and_cross = {"wan": 4, "wan_i2v": 6, "wan_expand_timesteps": 4, "h3": 5}[kind]
                kernels = ["cudnn"] * self_and_cross if prefill == "cudnn" else ["fa3"] * self_and_cross * batch
                with check.expect(*kernels):
                    actual = model(**inputs_as(inputs, torch.bfloat16), return_dict=False)[0]
                name = f"{kind}, batch {batch}, {prefill}"
                results[name] = require_close(actual, baseline, reference, name)
    return results


def inputs_as(inputs: dict, dtype: torch.dtype) -> dict:
    return {
        name: value.to(dtype)
        if value.is_floating_point() and "timestep" not in name and name != "position_ids"
        else value
        for name, value in inputs.items()
    }


def make_block(check: Check, kind: str, rows: int):
    """Return one block of full size with random weights, and the arguments of its forward call."""
    from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3TransformerBlock
    from diffusers.models.transformers.transformer_wan import WanTransformerBlock

    torch.manual_seed(0)
    heads = 56 if kind == "h3" else 12
    width, hidden, inner = (5376, 14336, 2688) if kind == "h3" else (1536, 8960, None)
    if not check.full_size:
        heads, width, hidden, inner = 2, 64 if kind == "h3" else 256, 64, 32
    with torch.device(check.device):
        if kind == "h3":
            block = MiniMaxH3TransformerBlock(width, heads, 128, hidden, inner, 1e-5, 1e-5)
            angles = torch.rand(rows, 96) * 6
            arguments = (
                check.normal(1, rows, width),
                check.normal(2, inner),
                torch.randint(0, 6, (rows,)),
                (angles.cos(), angles.sin()),
            )
        else:
            block = WanTransformerBlock(width, hidden, heads, cross_attn_norm=True)
            angles = (torch.rand(1, rows, 1, 64) * 6).repeat_interleave(2, -1)
            arguments = (
                check.normal(1, rows, width),
                check.normal(1, 512, width),
                check.normal(1, 6, width),
                (angles.cos(), angles.sin()),
            )
    return block.to(torch.bfloat16).requires_grad_(False).eval(), arguments


def set_processor(block, processor_class) -> None:
    for module in block.modules():
        if hasattr(module, "set_processor"):
            module.set_processor(processor_class(module))


def stock(module):
    return module._default_processor_cls()


def full_size_blocks(check: Check) -> dict:
    """One block of each model at full width against the same block in float32, eager and compiled."""
    results = {}
    rows = 4000 if check.full_size else 40
    for kind in ("wan", "h3"):
        block, arguments = make_block(check, kind, rows)
        wide = [x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in arguments]
        reference = block.float()(*wide)
        block = block.to(torch.bfloat16)
        baseline = block(*arguments)
        layers = 2 if kind == "wan" else 1
        for prefill in ("single", "cudnn"):
            processor = FlashInferProcessor(prefill=prefill)
            set_processor(block, lambda module, processor=processor: processor)
            kernel = "cudnn" if prefill == "cudnn" else "fa3"
            with check.expect(*[kernel] * layers):
                eager = block(*arguments)
            name = f"{kind}, {prefill}"
            results[name] = require_close(eager, baseline, reference, name)
            if prefill == "cudnn":
                continue
            torch._dynamo.reset()
            compiled_block = torch.compile(
                block, fullgraph=True, backend="inductor" if check.full_size else "aot_eager"
            )
            with check.expect(*[kernel] * layers):
                compiled = compiled_block(*arguments)
            results[f"{name}, compiled"] = require_close(compiled, baseline, reference, f"{name}, compiled")
            results[f"{name}, compiled against eager"] = relative_error(compiled, eager)
    return results


def threads_and_streams(check: Check) -> dict:
    """Four threads, each on a stream of its own, both prefills at once."""
    errors, failures = [], []

    def work(index):
        try:
            stream = torch.cuda.Stream(check.device) if check.device.type == "cuda" else None
            with torch.inference_mode(), torch.cuda.stream(stream):
                query, key, value = (check.normal(2, 200 + index, 4, 128) for _ in range(3))
                reference, baseline = sdpa(*(x.double() for x in (query, key, value))), sdpa(query, key, value)
                for _ in range(10):
                    actual = attend(query, key, value, prefill="cudnn" if index % 2 else "single")
                errors.append(require_close(actual, baseline, reference, f"thread {index}")["error"])
        except Exception:
            failures.append(traceback.format_exc())

    workers = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures, failures[0]
    return {"errors": errors}


def attention_speed(check: Check) -> dict:
    """Attention alone at the two shapes of the README, and single against cuDNN by batch for `prefill="auto"`."""
    if check.full_size:
        shapes, backends = bench_attention.SHAPES, bench_attention.BACKENDS
        names = [("Wan 1.3B 832×480×81 self", (1, 2, 4), 7), ("Wan 1.3B 832×480×81 text", (1, 4, 8), 7)]
        names.append(("MiniMax-H3 1344×768×345", (1,), 3))
    else:
        shapes, backends = bench_attention.SMALL_SHAPES, bench_attention.BACKENDS
        names = [("small self", (1, 2), 1)]
    rows = []
    for name, batches, repeats in names:
        for batch in batches:
            results = bench_attention.measure(shapes[name], batch, check.device, repeats, backends)
            rows.append({"shape": name, "batch": batch, "results": results})
    table = bench_attention.markdown({"environment": {}, "rows": rows})
    print(table, flush=True)
    speedups = {}
    for row in rows:
        times = {name: result.get("median_s") for name, result in row["results"].items()}
        if times.get("SDPA flash") and times.get("FlashInfer single fa3") and row["batch"] == 1:
            speedups[row["shape"]] = times["SDPA flash"] / times["FlashInfer single fa3"]
    return {"rows": rows, "fa3 against SDPA flash": speedups}


def default_kernel(check: Check) -> dict:
    """Name the kernels that Diffusers' default attention runs on this card, by the profiler."""
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    rows = 8192 if check.full_size else 64
    query, key, value = (check.normal(1, rows, 12, 128) for _ in range(3))
    dispatch_attention_fn(query, key, value)
    activity = torch.profiler.ProfilerActivity
    activities = [activity.CUDA if check.device.type == "cuda" else activity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        dispatch_attention_fn(query, key, value)
        if check.device.type == "cuda":
            torch.cuda.synchronize(check.device)
    kernels = [event.key for event in profiler.key_averages()]
    print(kernels, flush=True)
    return {"kernels": kernels}


def compare_forward(check: Check, run, set_processors, compile_blocks, repeats: int) -> dict:
    """Time a forward pass with the stock processor and with FlashInfer, eager and then compiled."""
    results = {}
    for mode in ("eager", "compiled"):
        if mode == "compiled":
            torch._dynamo.reset()
            compile_blocks()
        functions = {}
        kinds = {"default": stock, "FlashInfer": None, "FlashInfer fp8": "fp8"}
        for name, make in kinds.items():

            def forward(make=make):
                set_processors(make)
                run()

            functions[name] = forward
        times = bench_attention.time_in_turns(functions, check.device, repeats, warmups=1)
        results[mode] = times
        default = times["default"].get("median_s")
        for name in ("FlashInfer", "FlashInfer fp8"):
            if default and times.get(name, {}).get("median_s"):
                results[f"{name} speedup, {mode}"] = default / times[name]["median_s"]
    print({name: round(value, 3) for name, value in results.items() if isinstance(value, float)}, flush=True)
    return results


def processor_setter(modules):
    """Return a function that sets the stock (`stock`), the 16-bit (None) or the float8 (`"fp8"`) processor."""
    processors = {None: FlashInferProcessor(), "fp8": FlashInferProcessor(fp8=True)}

    def set_processors(kind):
        for module in modules:
            module.set_processor(stock(module) if kind is stock else processors[kind])

    return set_processors


def wan_speed(check: Check) -> dict:
    """Wan 2.1 1.3B with random weights at 832×480×81, seconds per forward pass."""
    model, inputs = random_wan(check.device, tiny=not check.full_size)
    setter = processor_setter([module for module in model.modules() if hasattr(module, "set_processor")])
    backend = "inductor" if check.full_size else "aot_eager"
    return compare_forward(
        check,
        lambda: model(**inputs),
        setter,
        lambda: model.compile_repeated_blocks(fullgraph=True, backend=backend),
        5 if check.full_size else 1,
    )


def h3_speed(check: Check) -> dict:
    """One of MiniMax-H3's 50 equal blocks at 345 frames, 104,512 rows; they are nearly all of a forward pass."""
    block, arguments = make_block(check, "h3", 104_512 if check.full_size else 40)
    setter = processor_setter([block.attn])
    backend = "inductor" if check.full_size else "aot_eager"
    return compare_forward(
        check,
        lambda: block(*arguments),
        setter,
        lambda: block.compile(fullgraph=True, backend=backend),
        3 if check.full_size else 1,
    )


def public_backend(check: Check) -> dict:
    """`set_attention_backend` with the registered name on stock processors."""
    from diffusers_h3.attention_processors.flashinfer_backend import register_backend

    register_backend()
    model = make_model("wan").to(check.device, torch.bfloat16)
    model.set_attention_backend("flashinfer")
    with check.expect(*["fa3"] * 4):
        model(**check.to_device(make_inputs("wan", dtype=torch.bfloat16)))
    model.set_attention_backend("native")
    return {"private name": backend_for(PrefillOptions()).value}


SECTIONS = [
    build,
    values,
    cudnn_values,
    fp8_values,
    tiny_models,
    threads_and_streams,
    public_backend,
    default_kernel,
    attention_speed,
    wan_speed,
    h3_speed,
    full_size_blocks,
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("results/flashinfer.json"))
    parser.add_argument("--sections", nargs="+", choices=[section.__name__ for section in SECTIONS])
    parser.add_argument("--budget", type=float, default=500.0, help="seconds after which no further section starts")
    parser.add_argument("--stand-in", action="store_true", help="try the script without a card")
    arguments = parser.parse_args()

    if arguments.stand_in:
        import pytest
        from flashinfer_stand_in import install, pretend_hopper

        monkeypatch = pytest.MonkeyPatch()
        pretend_hopper(monkeypatch)
        install(monkeypatch)
    device = torch.device("cpu") if arguments.stand_in else torch.device("cuda", 0)
    diffusers_logging.set_verbosity_error()
    check = Check(device, full_size=not arguments.stand_in)
    torch.manual_seed(0)
    check.record_calls()
    report = {"environment": bench_attention.environment(device), "sections": {}}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    for section in SECTIONS:
        if arguments.sections and section.__name__ not in arguments.sections:
            continue
        begin = time.perf_counter()
        if begin - start > arguments.budget:
            report["sections"][section.__name__] = {"passed": None, "left_out": "out of time"}
            continue
        try:
            with torch.inference_mode():
                result = {"passed": True, "results": section(check)}
        except Exception as error:
            # Every section is to run whatever the others found; the failure is printed, recorded and returned.
            traceback.print_exc()
            result = {"passed": False, "error": str(error), "traceback": traceback.format_exc()}
        result["seconds"] = time.perf_counter() - begin
        report["sections"][section.__name__] = result
        arguments.output.write_text(json.dumps(report, indent=1))
        print(
            f"{section.__name__}: {'passed' if result['passed'] else 'FAILED'} in {result['seconds']:.0f} s",
            flush=True,
        )
        if device.type == "cuda":
            torch.cuda.empty_cache()
    arguments.output.write_text(json.dumps(report, indent=1))
    return 0 if all(result["passed"] for result in report["sections"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
