"""`results/larger`: penstock beside the best peer on models of 1B and 3B, and as shares of the machine's ceilings."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from bench import peers, report, weights
from bench.contestants import Contestant, Entry
from bench.journal import Journal, journal_path
from bench.larger import ceilings, costs
from bench.larger.ceilings import Ceilings
from bench.larger.contestants import LARGER, bits_of
from bench.larger.models import MODEL_SHAPES
from bench.report import Scene
from bench.verdicts import Medians, best, medians

FORMATS = {16: "bf16", 8: "8 bits", 4: "Q4_K_M"}
CEILINGS = peers.BUILD / "bench" / "ceilings.json"


@dataclass(frozen=True)
class Row:
    """A comparison with the best peer of the same entry."""

    text: str
    metric: str
    entry: Entry
    bits: int
    workload: str = "larger"
    lowest: bool = True
    bound: float = 1.0
    """What ours ÷ the peer's must reach, or must not exceed."""

    def counts(self, peer_bits: int) -> bool:
        """Return whether a peer counts: one with weights at least as wide, or one that loads the same file."""
        return peer_bits == self.bits if self.workload == "load" else peer_bits >= self.bits


@dataclass(frozen=True)
class Compared:
    """A row's result."""

    row: Row
    ours: str
    our_value: float
    other: str
    other_value: float

    @property
    def ratio(self) -> float:
        """Ours ÷ the peer's."""
        return self.our_value / self.other_value

    @property
    def is_met(self) -> bool:
        """Whether penstock is ahead as far as it must be."""
        return self.ratio <= self.row.bound if self.row.lowest else self.ratio >= self.row.bound


def _rows() -> Iterator[Row]:
    for bits, name in FORMATS.items():
        yield Row(f"one stream, {name}, in process, ms a token", "itl_mean_ms", "process", bits)
        yield Row(f"one stream, {name}, HTTP, ms a token", "itl_mean_ms", "http", bits)
    for bits, name in FORMATS.items():
        bound = 1.6 if bits == 16 else 1.0
        metric = "batch_tokens_per_s"
        yield Row(f"16 at once, {name}, in process, tokens/s", metric, "process", bits, lowest=False, bound=bound)
        yield Row(f"16 at once, {name}, HTTP, tokens/s", metric, "http", bits, lowest=False)
    for bits, name in FORMATS.items():
        yield Row(f"prompt of 512 tokens, {name}, in process, ms", "prompt_ttft_p50_ms", "process", bits)
    for bits, name in list(FORMATS.items())[1:]:
        yield Row(f"first load to first token, {name}, s", "first_token_s", "process", bits, "load")
    for bits, name in FORMATS.items():
        yield Row(f"gap between a stream's events, {name}, HTTP, ms", "itl_p50_ms", "http", bits)


ROWS = tuple(_rows())


def prepare(shape: str, chosen: Iterable[Contestant]) -> None:
    """Make the weights that the chosen engines need, and measure the machine's ceilings."""
    for failure in weights.make_all(shape, {one.weights for one in chosen if one.is_installed}):
        print(f"not made: {failure}", file=sys.stderr)
    ceilings.best(CEILINGS)


def compared(table: Medians) -> list[Compared]:
    """Each row that both sides were measured for."""
    found = []
    for row in ROWS:
        among = [one for one in LARGER.values() if one.entry == row.entry and row.workload in one.workloads]
        cells = table.get(row.workload, {})
        among = [one for one in among if one.name in cells and row.metric in cells[one.name].values]
        ours = [one for one in among if one.is_ours and bits_of(one.name) == row.bits]
        others = [one for one in among if not one.is_ours and row.counts(bits_of(one.name))]
        our_best = best(table, row.workload, row.metric, ours, lowest=row.lowest)
        other_best = best(table, row.workload, row.metric, others, lowest=row.lowest)
        if our_best and other_best:
            found.append(Compared(row, *our_best, *other_best))
    return found


def write(folder: Path, scene: Scene, campaign: str) -> str:
    """Write the results of all shapes that a campaign has runs of; return the text."""
    journals = {shape: Journal(journal_path(campaign, shape)).runs for shape in MODEL_SHAPES}
    journals = {shape: runs for shape, runs in journals.items() if runs}
    highest = ceilings.best(CEILINGS, runs=0)
    every_run = [run for runs in journals.values() for run in runs]
    content = asdict(scene) | {"ceilings": asdict(highest) if highest else None, "shapes": {}}
    sections = [report.head("larger models", scene, every_run)]
    for shape, runs in journals.items():
        table = _of_rows(medians(runs), shape)
        results = compared(table)
        shares = shares_of(table, shape, highest) if highest else []
        sections += [f"## {shape}", "", _verdicts(results)]
        sections.append(report.not_measured(scene, runs))
        content["shapes"][shape] = {
            "rows": [asdict(one) | {"is_met": one.is_met} for one in results],
            "shares": [asdict(one) for one in shares],
            "runs": [asdict(run) for run in runs],
        }
    text = "\n".join(sections)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "larger.md").write_text(text)
    report.write_raw("larger", content)
    return text


def _of_rows(table: Medians, shape: str) -> Medians:
    """The table with the shape's workload under the name that rows have for it."""
    return {name.removesuffix(f"-{shape}"): cells for name, cells in table.items()}


def _verdicts(results: list[Compared]) -> str:
    lines = ["| | penstock | best peer | ours ÷ theirs | goal |", "|---|---|---|---|---|"]
    for one in results:
        goal = report.goal_of(one.row.bound, lowest=one.row.lowest, is_met=one.is_met)
        lines.append(
            f"| {one.row.text} | {one.our_value:.2f} | {one.other_value:.2f} ({one.other}) | {one.ratio:.2f} | {goal} |"
        )
    return "\n".join([*lines, ""])


@dataclass(frozen=True)
class Share:
    """What an engine reaches of the machine's ceilings."""

    engine: str
    decode: float
    """Bytes that the single stream's token must read ÷ bytes that all cores could read in its time."""
    prompt: float
    """Operations of the long prompt ÷ its time ÷ the measured peak of bfloat16, or of int8 for narrower weights."""


def shares_of(table: Medians, shape: str, highest: Ceilings) -> list[Share]:
    """Return the shares of all engines that ran in process."""
    found = []
    for name, cell in table.get("larger", {}).items():
        place = weights.path(LARGER[name].weights, shape)
        if LARGER[name].entry != "process" or place is None:
            continue
        peak = highest.bf16_gop_per_s if bits_of(name) == 16 else highest.int8_gop_per_s
        decode = costs.decode_bytes(name, shape, place) / 1e6 / cell.values["readable_mb_per_token"]
        operations_per_s = costs.prompt_operations(shape) / (cell.values["prompt_ttft_p50_ms"] / 1e3)
        found.append(Share(name, decode, operations_per_s / 1e9 / peak))
    return found
