"""The transformer benchmark: what it is asked, where a kernel's time goes, its report, and a run at toy size."""

import argparse
import importlib
import json
import pathlib
import re
import sys

import pytest
import torch


ROOT = pathlib.Path(__file__).resolve().parents[2]
H200 = ROOT / "benchmarks/results/2026-12-02-h200-dit.json"
TOY = ["--tiny", "--layers", "1", "--text-rows", "20", "--repeats", "3"]


@pytest.fixture
def bench(monkeypatch):
    """The script as a module; it imports its neighbours by name."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("bench_dit")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dense:bf16", (False, False, False, True)),
        ("dense:bf16:eager", (False, False, False, False)),
        ("dense:fp8:bf16", (False, True, False, True)),
        ("hybrid:bf16", (True, False, False, True)),
        ("hybrid:fp8:fp8", (True, True, True, True)),
        ("hybrid:bf16:fp8:eager", (True, False, True, False)),
    ],
)
def test_a_run_is_parsed(name, expected, bench):
    run = bench.parse_run(name)
    assert (run.name, run.hybrid, run.fp8, run.fp8_attention, run.compiled) == (name, *expected)


@pytest.mark.parametrize(
    "name", ["hybrid", "hybrid:fp16", "sparse:bf16", "hybrid:bf16:eager:fp8", "hybrid:bf16:", "dense:bf16:fp8"]
)
def test_another_run_is_refused_by_name(name, bench):
    with pytest.raises(argparse.ArgumentTypeError, match=f"'{name}'"):
        bench.parse_run(name)


@pytest.mark.parametrize(("frames", "nearest"), [("120", "107 and 124"), ("346", "345 and 362"), ("5", "22 and 39")])
def test_a_length_that_h3_has_not_is_refused(frames, nearest, bench):
    with pytest.raises(argparse.ArgumentTypeError, match=nearest):
        bench.parse_frames(frames)
    assert [bench.parse_frames(text) for text in ("22", "124", "345")] == [22, 124, 345]


@pytest.mark.parametrize(
    "arguments", [["--repeats", "0"], ["--layers", "0"], ["--height", "750"], ["--runs", "dense"], ["--frames", "100"]]
)
def test_bad_arguments_end_before_anything_is_built(arguments, check_refused):
    check_refused(arguments)


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        (
            "void flashinfer::PrefillWithKVCacheKernel<flashinfer::CollectiveMainloop<cutlass::float_e4m3_t>",
            "attention",
        ),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<cutlass::bfloat16_t>>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_6_128x128x128", "attention"),
        ("void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<128>>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention)", "attention"),
        ("triton_red_fused__scaled_mm__to_copy_abs_amax_clamp_div_mul_silu_split_13", "pointwise (Inductor)"),
        ("triton_poi_fused_convolution_native_layer_norm_2", "pointwise (Inductor)"),
        ("triton_tem_fused_addmm_3", "other matrix products"),
        ("nvjet_sm90_qqtst_128x128_128x6_1x2_h_bz_ovscale_TNT", "fp8 matrix products"),
        ("nvjet_sm100_qqtst_256x128_128x5_2x1_2cta_v_bz_TNT", "fp8 matrix products"),
        ("void cutlass::device_kernel<enable_3x_kernel_for_sm9x<float_e4m3_t>>", "fp8 matrix products"),
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_bias_TNT", "other matrix products"),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x32x8", "other matrix products"),
        ("void cublasLt::splitKreduce_kernel<32, 16>", "other matrix products"),
        ("aten::addmm", "other matrix products"),
        ("conv2d_c1_k1_nhwc_specialized", "spatial convolution"),
        ("void at::native::conv_depthwise2d_forward_kernel<5, 1>", "spatial convolution"),
        ("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32", "spatial convolution"),
        ("_convolved_features_kernel", "branch features"),
        ("_pointwise_features_kernel", "branch features"),
        ("_frame_statistics_kernel", "statistics"),
        ("_delta_factors_kernel", "delta factors"),
        ("_scan_kernel", "scans"),
        ("_bridge_states_kernel", "scans"),
        ("_readout_kernel", "readout"),
        ("_merge_two_kernel", "merge"),
        ("void flashinfer::MergeStateKernel<8, __nv_bfloat16, __nv_bfloat16>", "merge"),
        ("void at::native::float8_copy_kernel_cuda(at::TensorIteratorBase&)", "other"),
        ("void at::native::convert_something_kernel<float>", "other"),
        ("Memcpy DtoD (Device -> Device)", "other"),
    ],
)
def test_a_kernel_belongs_to_its_part(kernel, part, bench):
    assert bench.part_of(kernel) == part


def test_every_kernel_of_the_package_has_a_part(bench):
    sources = (ROOT / "src/diffusers_h3/ops").glob("*/triton*.py")
    kernels = [name for path in sources for name in re.findall(r"def (_\w+_kernel)\(", path.read_text())]
    assert len(kernels) >= 7
    assert [name for name in kernels if bench.part_of(name) == "other"] == []


def test_the_breakdown_adds_up(bench):
    kernels = [
        ["nvjet_sm90_qqtst_a", 10, 100.0],
        ["_scan_kernel", 2, 8.0],
        ["nvjet_sm90_qqtst_b", 1, 50.5],
        ["_bridge_states_kernel", 1, 1.0],
        ["Memset (Device)", 7, 0.25],
        ["something new", 1, 0.5],
    ]
    parts = bench.breakdown(kernels)
    assert list(parts.items()) == [("fp8 matrix products", 150.5), ("scans", 9.0), ("other", 0.75)]
    assert sum(parts.values()) == 160.25
    assert bench.breakdown([]) == {}


def test_the_breakdown_of_the_committed_run(bench):
    """The figures of `RESULTS.md`, from the profile they were read off."""
    (profile,) = [run["kernels"] for run in json.loads(H200.read_text())["runs"] if run["run"] == "hybrid:fp8"]
    parts = bench.breakdown(profile)
    expected = {
        "attention": 4912.2,
        "fp8 matrix products": 3068.4,
        "pointwise (Inductor)": 832.0,
        "branch features": 437.7,
        "delta factors": 195.4,
        "statistics": 127.2,
        "scans": 118.2,
        "readout": 107.8,
        "other matrix products": 88.3,
        "merge": 56.7,
    }
    assert {part: round(parts[part], 1) for part in expected} == expected
    assert sum(parts.values()) == pytest.approx(sum(kernel[2] for kernel in profile))
    assert parts["other"] < 0.005 * sum(parts.values())


def _row(run, frames, rows, seconds, **figures):
    return {"run": run, "frames": frames, "rows": rows, "s_per_call": seconds, "first_call_s": 9.0, **figures}


@pytest.fixture
def report():
    """Three runs at two lengths: times that grow with known powers of the rows, one run failed, two profiled."""
    return {
        "environment": {"device": "H200", "torch": "2.11"},
        "settings": {"layers": 50},
        "runs": [
            _row("dense:bf16", 124, 1000, 4.0),
            _row("dense:bf16", 345, 3000, 36.0, peak_gb=80.12, parts_ms={"attention": 27000.0, "other": 9000.0}),
            _row("dense:bf16:eager", 345, 3000, 45.0),
            _row("hybrid:fp8", 345, 3000, 6.0, parts_ms={"attention": 3000.0, "scans": 2000.0, "other": 1000.0}),
            _row("hybrid:fp8", 124, 1000, 2.0),
            {"run": "hybrid:bf16", "frames": 345, "failed": "Traceback\nOutOfMemoryError: 80 GB"},
        ],
        "growth": [],
    }


def test_growth_is_the_exponent_of_the_rows(bench, report):
    growth = bench.growth(report["runs"])
    assert [(each["run"], each["frames"]) for each in growth] == [
        ("dense:bf16", [124, 345]),
        ("hybrid:fp8", [124, 345]),
    ]
    assert growth[0]["exponent"] == pytest.approx(2.0)
    assert growth[1]["exponent"] == pytest.approx(1.0)


def test_markdown_sets_every_run_beside_the_dense_ones(bench, report):
    report["growth"] = bench.growth(report["runs"])
    text = bench.markdown(report)
    lines = text.splitlines()
    assert lines[0] == "device H200, torch 2.11"
    assert (
        "| run | frames | rows | s per call | times as fast as dense:bf16 | times as fast as dense:bf16:eager |"
        in text
    )
    assert "| dense:bf16 | 345 | 3000 | 36.000 | 1.00× | 1.25× | 80.1 | – | 9.0 |" in lines
    assert "| hybrid:fp8 | 345 | 3000 | 6.000 | 6.00× | 7.50× | – | – | 9.0 |" in lines
    assert "| hybrid:fp8 | 124 | 1000 | 2.000 | 2.00× | – | – | – | 9.0 |" in lines
    assert "| hybrid:bf16 | 345 | – | failed | – | – | – | – | – |" in lines
    assert "| hybrid:fp8 | 124 to 345 | 1.000 |" in lines
    assert "| part | dense:bf16, 345 frames | hybrid:fp8, 345 frames |" in lines
    assert "| scans | 0.0 | 2000.0 |" in lines
    assert "| all | 36000.0 | 6000.0 |" in lines
    assert lines[-1] == "hybrid:bf16, 345 frames: OutOfMemoryError: 80 GB"


def test_bars_share_out_the_median(bench, report):
    labels, heights = bench.bars(report)
    assert labels == [
        "dense:bf16\n124 frames",
        "dense:bf16\n345 frames",
        "dense:bf16:eager\n345 frames",
        "hybrid:fp8\n345 frames",
        "hybrid:fp8\n124 frames",
    ]
    assert heights["attention"] == [0.0, 27.0, 0.0, 3.0, 0.0]
    assert heights["not profiled"] == [4.0, 0.0, 45.0, 0.0, 2.0]
    assert [sum(values) for values in zip(*heights.values(), strict=True)] == pytest.approx([4, 36, 45, 6, 2])


def test_the_plot_is_a_picture(bench, report, tmp_path):
    pytest.importorskip("matplotlib")
    assert bench.plot(report, tmp_path / "dit.png")
    assert (tmp_path / "dit.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_or_figures_nothing_is_drawn(bench, report, tmp_path, monkeypatch):
    assert not bench.plot({**report, "runs": report["runs"][-1:]}, tmp_path / "dit.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not bench.plot(report, tmp_path / "dit.png")
    assert not (tmp_path / "dit.png").exists()


def test_a_failing_run_costs_no_other(bench, tmp_path, monkeypatch, capsys):
    """What is measured is on disk before the next run starts, and what a run found before it failed is kept."""
    seen = []

    def measure(arguments, run, frames, device, row, kept):
        seen.append(json.loads((tmp_path / "dit.json").read_text())["runs"] if seen else [])
        row["weights_gb"] = 49.4
        if run.fp8:
            raise RuntimeError("no memory left")
        row |= {"rows": 10 * frames, "s_per_call": 1.0, "first_call_s": 2.0}

    monkeypatch.setattr(bench, "measure", measure)
    runs = ["hybrid:bf16", "hybrid:fp8", "dense:bf16"]
    assert bench.main([*TOY, "--runs", *runs, "--output", str(tmp_path)]) == 1
    assert [[row["run"] for row in rows] for rows in seen] == [[], runs[:1], runs[:2]]
    first, failed, last = json.loads((tmp_path / "dit.json").read_text())["runs"]
    assert first["s_per_call"] == last["s_per_call"] == 1.0
    assert failed["weights_gb"] == 49.4
    assert failed["failed"].endswith("RuntimeError: no memory left\n")
    assert "| hybrid:fp8 | 345 | – | failed | – | – | 49.4 | – |" in (tmp_path / "dit.md").read_text()
    assert "no memory left" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".part") == []


def test_a_toy_run_end_to_end(bench, tmp_path):
    """Dense and hybrid, eager, at two lengths, profiled."""
    runs = ["dense:bf16:eager", "hybrid:bf16:eager"]
    arguments = [*TOY, "--num-frames", "22", "39", "--profile", "--runs", *runs, "--output", str(tmp_path)]
    assert bench.main(arguments) == 0
    report = json.loads((tmp_path / "dit.json").read_text())
    assert [(row["run"], row["frames"]) for row in report["runs"]] == [(run, n) for run in runs for n in (22, 39)]
    for row in report["runs"]:
        # 96 × 160 pixels are 15 rows a latent frame; 20 rows of text, two audio channels at 40 Hz.
        assert row["rows"] == 20 + {22: 7 * 15 + 2 * 37, 39: 12 * 15 + 2 * 65}[row["frames"]]
        assert row["finite"]
        assert sorted(row["samples"])[1] == row["s_per_call"] > 0
        assert sum(row["parts_ms"].values()) == pytest.approx(sum(kernel[2] for kernel in row["kernels"]))
        assert row["parts_ms"]["attention"] > 0
    assert [each["run"] for each in report["growth"]] == runs
    assert "| hybrid:bf16:eager | 39 | 330 |" in (tmp_path / "dit.md").read_text()


def test_a_toy_run_in_fp8(bench, tmp_path, monkeypatch):
    """As on a card whose fp8 scales rows, which PyTorch multiplies on the CPU too."""
    quant_api = pytest.importorskip("torchao.quantization.quant_api")
    monkeypatch.setattr("diffusers_h3.models.quantization.cuda_capability", lambda: (9, 0))
    monkeypatch.setattr(quant_api, "_check_hardware_support", lambda granularity: None)
    products = []
    scaled_mm = torch._scaled_mm
    monkeypatch.setattr(
        torch, "_scaled_mm", lambda *args, **options: products.append(1) or scaled_mm(*args, **options)
    )
    arguments = [*TOY, "--frames", "39", "--runs", "hybrid:fp8:eager", "--output", str(tmp_path)]
    assert bench.main(arguments) == 0
    (row,) = json.loads((tmp_path / "dit.json").read_text())["runs"]
    assert row["finite"]
    # One block of seven linear layers, the branch's output among them; a first call and three that are timed.
    assert len(products) == 4 * 7


@pytest.mark.slow
def test_a_toy_run_compiled(bench, tmp_path):
    """One graph for both blocks of each model, without breaks, by Inductor's own C++ code."""
    runs = ["dense:bf16", "hybrid:bf16"]
    arguments = [*TOY, "--layers", "2", "--frames", "22", "--runs", *runs, "--output", str(tmp_path)]
    assert bench.main(arguments) == 0
    rows = json.loads((tmp_path / "dit.json").read_text())["runs"]
    assert [row["run"] for row in rows] == runs
    for row in rows:
        assert row["finite"]
        assert row["first_call_s"] > row["s_per_call"]  # it compiled
