"""Predict the seconds of one transformer call on 1 to 64 GPUs from the parts measured on one.

    python benchmarks/parallel_cost_model.py

writes `results/parallel_cost_model.md`. Nothing is measured here: the parts are those of RESULTS.md, the machine's
figures are assumptions, printed with the table, and what is sent follows from the shapes.
"""

import pathlib
from dataclasses import dataclass


REPORT = pathlib.Path(__file__).parent / "results" / "parallel_cost_model.md"

LAYERS, HEADS, HEAD_DIM, HIDDEN = 50, 56, 128, 5376
# 345 frames of 1344×768 with audio and 200 rows of text; the branch leaves out the two anchor frames.
ROWS, FRAMES, ROWS_PER_FRAME = 104_166, 100, 1008
BF16, FP32 = 2, 4

# RESULTS.md, "Where the 9.82 s go", in seconds a call. Every rank does its share of the rows …
BY_ROWS = {"matrix products": 2.992, "SwiGLU and quantisation": 0.251, "other pointwise": 0.430}
# … its share of the heads …
BY_HEADS = {
    "spatial convolution": 0.341,
    "delta factors": 0.199,
    "temporal convolution": 0.164,
    "QK norm and rotary embedding": 0.171,
    "frame statistics": 0.129,
    "readout": 0.095,
    "merge": 0.057,
}
WINDOW = 4.892  # by heads too, and what the readout travels beneath
# … and all of this: a scan is a chain over frames, as long for one head as for 56.
SERIAL = {"scans": 0.093}
# One of the three projections, fp8: 16.7 ms for all on one card (see `matrix products`).
PROJECTION = 0.0167 / 3

# Stock dense H3 in bf16: 33.3 s, of which 547 ms a layer are attention.
DENSE_ATTENTION, DENSE_REST = 27.35, 5.95


@dataclass(frozen=True)
class Machine:
    """Assumptions, none of them measured: bytes a second in one direction and GPU, and seconds.

    Attributes:
        gpus_per_node: GPUs that reach each other through NVLink.
        inside, between: What an exchange gets of NVLink 4 (450 GB/s) and of one 400 Gb/s adapter a GPU (50 GB/s).
        latency: One collective, from its call to its first byte; twice that between nodes.
        memory: Copies on the card, which pack and unpack what is exchanged (measured: 3.6 TB/s).
    """

    gpus_per_node: int = 8
    inside: float = 340e9
    between: float = 38e9
    latency: float = 25e-6
    memory: float = 3.6e12

    def exchange(self, size: float, ranks: int) -> float:
        """Return the seconds of an all-to-all or all-gather in which every rank has `size` bytes to begin with."""
        if ranks == 1:
            return 0.0
        near = min(ranks, self.gpus_per_node)
        inside, between = size * (near - 1) / ranks, size * (ranks - near) / ranks
        latency = self.latency * (2 if ranks > near else 1)
        return latency + max(inside / self.inside, between / self.between)


def sent_per_layer(ranks: int) -> dict[str, float]:
    """Return what a rank has to exchange in a layer, in bytes, its own share included."""
    rows = ROWS / ranks
    projection = rows * HEADS * HEAD_DIM * BF16
    return {
        "query": projection,
        "key": projection,
        "value": projection,
        "gate": rows * HEADS * BF16,
        "beta": rows * HEADS * BF16,
        "window": projection,
        "readout": FRAMES * ROWS_PER_FRAME * HEADS * HEAD_DIM * BF16 / ranks,
        # Gathered: every rank's piece goes to all others, and the sum goes out and back.
        "output gate": rows * HEAD_DIM * BF16 * ranks,
        "frame means": 2 * FRAMES * HIDDEN * FP32,
    }


def head_share(ranks: int) -> float:
    """Return the largest share of the heads that one rank has: the others wait for it."""
    return -(-HEADS // ranks) / HEADS


@dataclass(frozen=True)
class Prediction:
    """Seconds a call: computing, copying for the exchanges, and waiting for those that nothing hides."""

    ranks: int
    compute: float
    copies: float
    waiting: float
    sent: float

    @property
    def total(self) -> float:
        return self.compute + self.copies + self.waiting


def predict(ranks: int, machine: Machine) -> Prediction:
    """Predict VDN-H3 with fp8 linear layers on `ranks` GPUs.

    Raises:
        ValueError: For more ranks than heads.
    """
    if not 1 <= ranks <= HEADS:
        raise ValueError(f"{HEADS} heads are for 1 to {HEADS} ranks, got {ranks}.")
    share = head_share(ranks)
    compute = sum(BY_ROWS.values()) / ranks + (sum(BY_HEADS.values()) + WINDOW) * share + sum(SERIAL.values())
    sent = sent_per_layer(ranks)
    seconds = {name: machine.exchange(size, ranks) for name, size in sent.items()}
    # Query and key travel beneath the next projection and the readout beneath the window; all else is waited for.
    hidden_beneath = {"query": PROJECTION / ranks, "key": PROJECTION / ranks, "readout": WINDOW * share / LAYERS}
    waiting = sum(max(0.0, time - hidden_beneath.get(name, 0.0)) for name, time in seconds.items())
    # Packed once each, and unpacked what comes back; every copy reads and writes.
    copied = sent["query"] * 3 + (sent["window"] + sent["readout"]) * 2
    copies = 0.0 if ranks == 1 else 2 * copied / machine.memory
    return Prediction(ranks, compute, LAYERS * copies, LAYERS * waiting, LAYERS * sum(sent.values()) * (1 - 1 / ranks))


def diffusers_shares(heads: int, ranks: int) -> bool:
    """Return whether Diffusers' own Ulysses can share so many heads: all ranks but the last get equally many."""
    return (ranks - 1) * -(-heads // ranks) < heads


def predict_dense(ranks: int, machine: Machine) -> float | None:
    """Predict stock dense H3 under Diffusers' own Ulysses, which hides nothing.

    None where Diffusers cannot share the heads.
    """
    if not diffusers_shares(HEADS, ranks):
        return None
    exchange = machine.exchange(sent_per_layer(ranks)["query"], ranks)
    return DENSE_ATTENTION * head_share(ranks) + DENSE_REST / ranks + LAYERS * 4 * exchange


def table(machine: Machine, counts=(1, 2, 4, 7, 8, 14, 16, 28, 32, 56, 64)) -> str:
    """Return the predictions as Markdown."""
    lines = [
        "| GPUs | heads | computing | copies | waiting | sent, GB a GPU | **s per call** | times one GPU | dense H3 |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    alone = predict(1, machine).total
    for ranks in counts:
        if ranks > HEADS:
            lines.append(f"| {ranks} | – | | | | | not possible: {HEADS} heads | | |")
            continue
        result = predict(ranks, machine)
        dense = predict_dense(ranks, machine)
        lines.append(
            f"| {ranks} | {round(head_share(ranks) * HEADS)} | {result.compute:.2f} | {result.copies:.2f} | "
            f"{result.waiting:.2f} | {result.sent / 1e9:.1f} | **{result.total:.2f}** | {alone / result.total:.1f} | "
            f"{'not possible' if dense is None else f'{dense:.2f}'} |"
        )
    return "\n".join(lines)


def report(machine: Machine) -> str:
    inside, between = f"{machine.inside / 1e9:.0f} GB/s", f"{machine.between / 1e9:.0f} GB/s"
    latency, memory = f"{machine.latency * 1e6:.0f} µs", f"{machine.memory / 1e12:.1f} TB/s"
    return f"""# One transformer call on many GPUs, predicted

`benchmarks/parallel_cost_model.py`; nothing here is measured but the parts on one H200 that it starts from.
345 frames of 1344×768 with audio, {ROWS:,} rows; seconds. VDN-H3 with fp8 linear layers, and stock dense H3 in bf16.

{table(machine)}

Assumptions:

- Every kernel is as fast on its share as on the whole; only the scans, chains over frames, do not get shorter.
  Launches are not counted: beyond 16 GPUs that flatters the prediction.
- A GPU sends {inside} inside a node of {machine.gpus_per_node} and {between} to others.
- A collective begins after {latency}, between nodes after twice that; copies run at {memory}.
- Query and key travel beneath the next projection, the readout beneath the window, as far as these last. All else is
  waited for: value, gate, beta, the low-rank gate, the frame means, and the window's way back.
- Where heads do not divide, all wait for the ranks that have one more.
- Not in it: encoding, decoding, which the first GPU does alone, and the two small gathers at the end of a call.
"""


if __name__ == "__main__":
    REPORT.write_text(report(Machine()), encoding="utf-8")
    print(REPORT)
