"""GPUs by name, with the published figures that estimates are scaled by."""

from dataclasses import dataclass, replace


# Of any attention kernel, of fp8 linear layers with a scale per row or per block of 32, and of fp8 attention.
MINIMUM_CAPABILITY = (8, 0)
FP8_LINEARS_CAPABILITY = (8, 9)
MXFP8_LINEARS_CAPABILITY = (10, 0)
FP8_ATTENTION_CAPABILITY = (9, 0)


@dataclass(frozen=True)
class Rates:
    """Published peaks: dense TFLOP/s in bf16 and fp8 (null without fp8 units), memory and PCIe GB/s one way."""

    bf16: float
    fp8: float | None
    memory: float
    host: float

    def operations(self, precision: str) -> float:
        """Return the peak operations per second of `"bf16"` or `"fp8"`."""
        return {"bf16": self.bf16, "fp8": self.fp8}[precision] * 1e12


@dataclass(frozen=True)
class Card:
    """A GPU: `memory` in GB of 10^9 bytes; what is not known of it is null. `devices` are its driver's names."""

    name: str
    memory: float
    capability: tuple[int, int] | None = None
    rates: Rates | None = None
    source: str | None = None
    devices: tuple[str, ...] = ()


# Without sparsity, and bf16 and fp8 with sums in float32. Memory is the maker's figure, read as GB of 10^9 bytes: the
# driver shows up to 7% more, which is not counted on.
#
# The comment of a card names the published tables whose figures are the same. Memory and capability of every card are
# those of gpuhunt 0.1.34, the rates of a PCIe slot those of its generation. What no table was found for says so.
CARDS = (
    # All: NVIDIA's aiconfigurator 0.3; bf16, fp8: Composer 0.32; bf16: TorchTitan 0.3.
    Card("H200", 141, (9, 0), Rates(989, 1979, 4800, 64), "NVIDIA H200 datasheet, SXM", ("NVIDIA H200",)),
    # All: PyTorch 2.14 (Inductor, with sparsity), llm-analysis 0.2, aiconfigurator 0.3; bf16, fp8: TorchAO, Composer.
    Card("H100 SXM", 80, (9, 0), Rates(989, 1979, 3350, 64), "NVIDIA H100 datasheet, SXM", ("NVIDIA H100 80GB HBM3",)),
    # bf16: TorchTitan 0.3; fp8 is twice that. Memory bandwidth: no table found.
    Card("H100 NVL", 94, (9, 0), Rates(835, 1671, 3900, 64), "NVIDIA H100 datasheet, NVL", ("NVIDIA H100 NVL",)),
    # bf16, fp8: Triton 3.8 (Proton), Composer 0.32, Lightning 2.6; bf16: TorchTitan 0.3; all: llm-analysis 0.2.
    Card("H100 PCIe", 80, (9, 0), Rates(756, 1513, 2000, 64), "NVIDIA H100 datasheet, PCIe", ("NVIDIA H100 PCIe",)),
    # All: aiconfigurator 0.3; bf16, fp8: TorchAO, which counts 7,672 GB/s from the driver's clock and bus.
    Card(
        "B200", 180, (10, 0), Rates(2250, 4500, 8000, 64), "NVIDIA DGX B200 datasheet, one of eight", ("NVIDIA B200",)
    ),
    # All: llm-analysis 0.2, aiconfigurator 0.3, PyTorch 2.14 (bf16 312.5); bf16: Triton 3.8 (Proton), TorchTitan.
    Card(
        "A100 80GB",
        80,
        (8, 0),
        Rates(312, None, 2039, 32),
        "NVIDIA A100 datasheet, SXM 80 GB",
        ("NVIDIA A100-SXM4-80GB",),
    ),
    # All: llm-analysis 0.2; bf16 as A100 80GB.
    Card(
        "A100 40GB",
        40,
        (8, 0),
        Rates(312, None, 1555, 32),
        "NVIDIA A100 datasheet, 40 GB",
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"),
    ),
    # bf16: TorchTitan 0.3. fp8, memory bandwidth: no table found.
    Card("L40S", 48, (8, 9), Rates(362, 733, 864, 32), "NVIDIA L40S datasheet", ("NVIDIA L40S",)),
    # Rates: no table found.
    Card(
        "RTX 6000 Ada",
        48,
        (8, 9),
        Rates(364, 728, 960, 32),
        "NVIDIA RTX 6000 Ada datasheet",
        ("NVIDIA RTX 6000 Ada Generation",),
    ),
    # Rates: no table found; the memory is that of the RTX 5090.
    Card(
        "RTX PRO 6000",
        96,
        (12, 0),
        Rates(504, 1008, 1792, 64),
        "NVIDIA RTX Blackwell PRO architecture paper",
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition",),
    ),
    # bf16, fp8: TorchAO (209.5, 419); memory bandwidth: the same digits there, in other units.
    Card(
        "RTX 5090",
        32,
        (12, 0),
        Rates(210, 419, 1792, 64),
        "NVIDIA RTX Blackwell architecture paper",
        ("NVIDIA GeForce RTX 5090",),
    ),
    # bf16, fp8: Triton 3.8 (Proton), and int8 of Lightning 2.6, divided by 4 and 2. Memory bandwidth: no table found.
    Card(
        "RTX 4090",
        24,
        (8, 9),
        Rates(165, 330, 1008, 32),
        "NVIDIA Ada architecture paper",
        ("NVIDIA GeForce RTX 4090",),
    ),
    # bf16: int8 of Lightning 2.6, divided by 4. Memory bandwidth: no table found.
    Card(
        "RTX 3090",
        24,
        (8, 6),
        Rates(71, None, 936, 32),
        "NVIDIA Ampere GA102 architecture paper",
        ("NVIDIA GeForce RTX 3090",),
    ),
)


def find_card(name: str) -> Card:
    """Return the card of the table that `name`, its own or its driver's, means; case and spaces do not matter.

    Raises:
        ValueError: For a name that means none of them or several.
    """
    wanted = _plain(name)
    exact = [card for card in CARDS if wanted in map(_plain, (card.name, *card.devices))]
    begun = [card for card in CARDS if wanted and _plain(card.name).startswith(wanted)]
    found = exact or begun
    if len(found) == 1:
        return found[0]
    what = "may mean " + ", ".join(card.name for card in found) if found else "is not in the table of cards"
    known = ", ".join(card.name for card in CARDS)
    raise ValueError(f"{name!r} {what}: name one of {known}, or give the memory of another card.")


def card_of_device(device: str, total_bytes: int, capability: tuple[int, int]) -> Card:
    """Return a GPU of this machine with its real memory, and with rates where the table has its model."""
    for card in CARDS:
        if device in card.devices:
            return replace(card, memory=total_bytes / 1e9)
    return Card(device, total_bytes / 1e9, capability)


def _plain(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())


def dotted(capability: tuple[int, int]) -> str:
    """Write a compute capability as NVIDIA does: `(8, 9)` as `"8.9"`."""
    return ".".join(map(str, capability))
