import pytest

from diffusers_h3.planning.cards import CARDS, MINIMUM_CAPABILITY, card_of_device, find_card


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("H200", "H200"),
        ("nvidia h200", "H200"),
        ("RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("rtx4090", "RTX 4090"),
        ("L40", "L40S"),
        ("b200", "B200"),
        ("A100 80GB", "A100 80GB"),
    ],
)
def test_names(name, expected):
    assert find_card(name).name == expected


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("H100", ["may mean H100 SXM, H100 NVL, H100 PCIe"]),
        ("A100", ["may mean A100 80GB, A100 40GB"]),
        ("T4", ["'T4' is not in the table", "RTX 4090", "memory of another card"]),
        ("", ["is not in the table"]),
        ("NVIDIA", ["is not in the table"]),
    ],
)
def test_names_that_mean_no_card_or_several(name, named):
    with pytest.raises(ValueError, match=r".") as error:
        find_card(name)
    for text in named:
        assert text in str(error.value)


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000"),
    ],
)
def test_devices_of_known_models_have_rates_and_their_own_memory(device, expected):
    card = card_of_device(device, 12_500_000_000, (1, 0))
    assert (card.name, card.memory) == (expected, 12.5)
    assert card.rates == find_card(expected).rates
    assert card.capability == find_card(expected).capability


@pytest.mark.parametrize("device", ["Tesla T4", "NVIDIA GeForce RTX 4090 D", "NVIDIA L4", "NVIDIA GH200 480GB"])
def test_other_devices_have_memory_alone(device):
    card = card_of_device(device, 15_000_000_000, (7, 5))
    assert (card.name, card.memory, card.capability, card.rates) == (device, 15.0, (7, 5), None)


def test_every_card_is_complete_and_named_once():
    assert len({card.name for card in CARDS}) == len(CARDS)
    for card in CARDS:
        assert card.source.startswith("NVIDIA ")
        assert card.capability >= (8, 0)
        assert card.rates.bf16 > 0
        assert (card.rates.fp8 is not None) == (card.capability >= (8, 9)), "fp8 units came with Ada"
        if card.rates.fp8 is not None:
            # Half the width, twice the rate, up to the rounding of the published figures.
            assert card.rates.fp8 / card.rates.bf16 == pytest.approx(2, rel=0.02)


def test_pytorchs_own_table_agrees():
    """Inductor's, of the cards in both. Its Hopper figures are those with sparsity, twice the dense ones."""
    table = pytest.importorskip("torch._inductor.analysis.device_info", reason="this PyTorch has no such table")
    import torch

    # The data sheet of the A100 says 312 and 624, Inductor half of 625.
    for name, theirs in (("H100 SXM", "NVIDIA H100"), ("A100 80GB", "NVIDIA A100")):
        card, device = find_card(name), table.lookup_device_info(theirs)
        dense = getattr(device, "tops_sparsity_factor", 2 if name == "H100 SXM" else 1)
        assert card.memory == device.dram_gb
        assert card.rates.memory == device.dram_bw_gbs
        assert card.rates.bf16 == pytest.approx(device.tops[torch.bfloat16] / dense, rel=0.002)
        if card.rates.fp8 is not None:
            assert card.rates.fp8 == pytest.approx(device.tops[torch.float8_e5m2] / dense, rel=0.002)


@pytest.mark.parametrize("name", ["H100 SXM", "B200", "RTX 5090"])
def test_torchaos_table_agrees(name):
    table = pytest.importorskip("torchao.testing.training.roofline_utils").gpu_name_to_specs
    card = find_card(name)
    (specs,) = (specs for device, specs in table.items() if card.devices[0].startswith(device))
    assert card.rates.operations("bf16") == pytest.approx(specs["bf16_peak_tops"], rel=0.005)
    assert card.rates.operations("fp8") == pytest.approx(specs["fp8_peak_tops"], rel=0.005)


@pytest.mark.parametrize(("name", "architecture"), [("RTX 4090", "89"), ("A100 80GB", "80"), ("H100 PCIe", "90")])
def test_tritons_table_agrees(name, architecture):
    """Proton's, which scales one card per architecture; multiprocessors and clock are those of the H100 PCIe."""
    specs = pytest.importorskip("triton.profiler.specs", reason="this Triton has no Proton")
    card = find_card(name)
    for width, rate in ((16, card.rates.bf16), (8, card.rates.fp8)):
        if rate is not None:
            theirs = specs.max_flops("CUDA", architecture, width, num_sms=114, clock_rate=1_755_000)
            assert rate == pytest.approx(theirs / 1e12, rel=0.002)


def test_the_lowest_capability_is_the_kernels_own():
    from diffusers_h3.ops.prefill import machine

    assert machine.MINIMUM_CAPABILITY == MINIMUM_CAPABILITY
