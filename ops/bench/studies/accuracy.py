"""`PYTHONPATH=ops python -m bench.studies.accuracy`: what each weight format, quantization and KV cache dtype costs.

KL divergence, RMS of the probability difference and agreement of the top token against float32, by penstock and by
`llama-perplexity --kl-divergence` on the same tokens. A run that is in the results is not measured again, unless
--redo names it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gguf import GGUFReader

from bench import machine, peers
from bench.studies import gguf_perplexity
from bench.studies.divergence import Accuracy, BaseFile, Figure, accuracy_of, accuracy_of_output, token_errors
from bench.studies.perplexity import english, native_logits, native_model

RESULTS = Path(__file__).parents[1] / "results" / "accuracy.json"
FOLDER = peers.BUILD / "bench" / "accuracy"
WINDOW = 512
NUM_WINDOWS = 220
"""Nearly the whole text: 112,640 of its 113,108 tokens."""
EXACT, OWN = "F32", "own"
"""All matrices dequantized to float32; and the demo model's file as it is."""
WIDE = "wide "
"""Before a format: of the model with rows of whole blocks of 256; see bench.studies.gguf_perplexity."""
FORMATS = ("BF16", "Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0", "IQ4_NL", "IQ4_XS", "Q3_K_M", "Q2_K")
BLOCKS = ("Q6_K", "Q5_K_M", "Q4_K_M", "IQ4_XS", "Q3_K_M", "Q2_K")
"""Formats with blocks of 256, which the demo model's rows of 576 numbers do not fill."""
PEERS = {"int8": "Q8_0", "int8_group": "Q8_0", "int4": "Q4_1"}
"""llama.cpp's format that is next to a quantization of bf16 weights."""
EIGHT_BIT_KV = (OWN, "BF16", "Q8_0", "Q4_K_M")
"""Files that are measured with a KV cache in 8 bits: what it costs hardly depends on the weights."""
SIXTEEN_BIT_KV = (OWN, "BF16", "Q8_0")
"""Files that penstock computes with keys and values in float16 too."""
LLAMA_KV = {"float32": ("f32", "off"), "float16": ("f16", "auto"), "bfloat16": ("bf16", "auto"), "int8": ("q8_0", "on")}
"""llama.cpp's type of the KV cache, and whether it computes with flash attention."""


@dataclass(frozen=True)
class Run:
    """One engine on one file."""

    engine: str
    kind: str
    quantization: str
    kv: str

    @property
    def name(self) -> str:
        return f"{self.engine} {self.kind}, {self.quantization}, KV {self.kv}"


@dataclass(frozen=True)
class Row:
    """A line of the page: penstock and llama.cpp, with the settings that are next to each other."""

    title: str
    ours: Run
    theirs: Run


def _row(kind: str, quantization: str = "auto", kv: str = "bfloat16") -> Row:
    ours = Run("penstock", kind, quantization, kv)
    their_kind = PEERS.get(quantization, kind)
    theirs = Run("llama.cpp", their_kind, "auto", "float16" if kv == "bfloat16" else kv)
    title = "the demo model's file: layers Q4_1, head Q8_0" if kind == OWN else kind
    return Row(title if quantization == "auto" else f"{kind} with `{quantization}`", ours, theirs)


def rows() -> Iterator[Row]:
    """All lines of the page, the most important first."""
    yield from (_row(kind) for kind in (OWN, *FORMATS))
    both = "BF16, with llama.cpp's KV cache in bfloat16 too"
    yield Row(both, Run("penstock", "BF16", "auto", "bfloat16"), Run("llama.cpp", "BF16", "auto", "bfloat16"))
    yield from (_row("BF16", quantization) for quantization in PEERS)
    yield from (_row(kind, kv="float16") for kind in SIXTEEN_BIT_KV)
    yield from (_row("BF16", quantization, "float16") for quantization in PEERS)
    yield from (_row(kind, kv="int8") for kind in EIGHT_BIT_KV)
    yield from (_row("BF16", quantization, "int8") for quantization in PEERS)
    yield from (_row(WIDE + kind) for kind in BLOCKS)


def file_of(model: Path, kind: str) -> Path:
    """Return the model's file in a format; make it of the float32 file if there is none."""
    if kind == OWN:
        return model
    if kind.startswith(WIDE):
        return gguf_perplexity.file_of(model, gguf_perplexity.WIDE, kind.removeprefix(WIDE))
    path = FOLDER / f"{kind}.gguf"
    if not path.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        source, part = model if kind == EXACT else file_of(model, EXACT), path.with_suffix(".part")
        command: list[str | Path] = [peers.llama_binary("llama-quantize"), "--allow-requantize", source, part, kind]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        part.rename(path)
    return path


def llama_perplexity(path: Path, kv: str, *arguments: str | Path) -> str:
    """Return what llama.cpp's program prints. Its repacked kernels are off, because those for AMX crash on some VMs."""
    kv_type, flash = LLAMA_KV[kv]
    command: list[str | Path] = [
        peers.llama_binary("llama-perplexity"),
        "-m",
        path,
        "-c",
        str(WINDOW),
        "-b",
        str(WINDOW),
        "--no-repack",
    ]
    command += ["-ctk", kv_type, "-ctv", kv_type, "-fa", flash, "-t", str(len(os.sched_getaffinity(0))), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"llama-perplexity exited with {done.returncode}: {(done.stdout + done.stderr)[-500:]}")
    return done.stdout + done.stderr


def base_file(model: Path, num_windows: int) -> Path:
    """Return the file with the base's distributions, 25 MB a window; make it if there is none."""
    path = FOLDER / f"base-{num_windows}.bin"
    if not path.exists():
        text, part = FOLDER / "text.txt", path.with_suffix(".part")
        exact = file_of(model, EXACT)
        text.write_text(english())
        arguments: list[str | Path] = ["-f", text, "--chunks", str(num_windows), "--kl-divergence-base", part]
        llama_perplexity(exact, "float32", *arguments)
        part.rename(path)
    return path


def by_penstock(path: Path, run: Run, base: BaseFile, num_windows: int | None = None) -> Accuracy:
    """The accuracy of the native runner over the first windows; None: all."""
    with native_model(str(path), run.quantization, run.kv) as loaded:
        return accuracy_of(
            [
                token_errors(native_logits(loaded, ids)[-base.num_scored - 1 : -1], base.log_probs(i), base.targets(i))
                for i, ids in enumerate(base.tokens[:num_windows])
            ]
        )


def measure(run: Run, model: Path, base: Path) -> dict[str, Any]:
    """One run, as it goes into the results."""
    path, begun_s = file_of(model, run.kind), time.monotonic()
    if run.engine == "penstock":
        found = by_penstock(path, run, BaseFile(base))
    else:
        found = accuracy_of_output(llama_perplexity(path, run.kv, "--kl-divergence", "--kl-divergence-base", base))
    counts = Counter(tensor.tensor_type.name for tensor in GGUFReader(path).tensors if len(tensor.shape) > 1)
    took_s = round(time.monotonic() - begun_s)
    about = {"revision": machine.revision(), "machine": machine_name(machine.describe()), "took_s": took_s}
    return asdict(run) | asdict(found) | {"matrices": counts} | about


def machine_name(described: dict[str, Any]) -> str:
    """Name a machine by what its arithmetic may depend on."""
    features = ", ".join(described["cpu_features"])
    return f"{described['cpu']}, {described['cores']} cores ({features})"


REMARKS = """\
- `auto` and `int8_group` round activations to 8 bits with a scale for 32 of them, as llama.cpp does for these formats.
- BF16 with penstock's default cache is further from float32 than llama.cpp is with its own. Nothing is quantized there,
  so all of it is rounding to 16 bits. Penstock keeps keys, values, queries and attention weights in bfloat16, which has
  8 significant bits. llama.cpp keeps keys and values in float16, which has 11. With equal caches, both in bfloat16 or
  both in float16, the programs are the same: the cache is the whole difference.
- float16 is not penstock's default on CPUs, because steps take longer with it. CPUs with AVX-512 BF16 multiply pairs of
  bfloat16 in one instruction, but widen float16 first. [Times by cache](int8_steps.md#kv-cache) are on another page.
- `int8` has one scale for a whole row of weights or activations, not one for 32, which is why it is faster. What finer
  scales cost in speed stands in [int8 in steps](int8_steps.md).
- An int8 KV cache has one scale for each value, and one for each 32 channels of a key. Keys and queries are rotated
  before, because a few channels of a key are far larger than the others. It adds 0.07 to the RMS Δp of the demo model's
  file, and 0.25 to that of BF16. With BF16 it is 7 % further from float32 than q8_0 in llama.cpp: penstock also keeps
  the weights of the attention in 8 bits.
- The rows of `int4` do not compare two ways to quantize: the weights were in Q4_1 before, so `llama-quantize` finds the
  same codes again. Its Q4_0 of the same weights is at 13.8.
- In the *wide* files, llama.cpp rounds activations with one scale for 256 numbers where the weights have blocks of 256,
  and penstock with one for 32. That is why penstock is closer to float32 there.
"""
HEAD = """# Accuracy, {date}

`PYTHONPATH=ops python -m bench.studies.accuracy` with {versions}, after `make bench-peers`. All values compare with
float32. *KL* is the mean divergence in nats. *RMS Δp* is the root of the mean squared difference of the next token's
probability, in percent. *Same top* is how often the likeliest token is the same, in percent. The definitions are those
of `llama-perplexity --kl-divergence`, whose own output is the column llama.cpp. ± is 95 %; it takes tokens as
independent, as `llama-perplexity` does.

- **Text**: Python's help texts (`pydoc_data.topics`), {tokens:,} tokens in {windows} windows of {window}. As in
  `llama-perplexity`, the second half of each window is scored: {scored:,} tokens.
- **float32**: the demo model exists only as a file of Q4_1 layers and a Q8_0 head. `llama-quantize` dequantized all of
  it to float32; every other file is made from the float32 file. So the table has the distance from this file, not from
  the model as it was trained. Its own row has no error of weights: all of it is rounding of activations.
- **The base** is llama.cpp on the float32 file with keys and values in float32 and without flash attention. Both
  programs are compared with the same stored distributions, which have 16 bits for each log probability.
- **Weights**: a file runs as it is stored (`--quantization auto`). `int8`, `int8_group` and `int4` are quantizations by
  penstock of the BF16 file; beside them stands llama.cpp's file of the same width. The demo model's rows of 576 numbers
  do not fill K-quants' blocks of 256, so `llama-quantize` takes other formats for them. *Wide* files are of the same
  model with zeros up to 768, which fills the blocks and changes nothing that the model computes.
- **KV cache**: penstock's default is bfloat16 and llama.cpp's is float16. Further tables have penstock's
  `--kv-cache-dtype float16` beside float16, and `int8` beside q8_0.
- **Verdict** compares RMS Δp: *same* if the two intervals overlap.
- **Machines** are those of penstock's run and of llama.cpp's. The base was computed anew on each, with the same
  settings.
{machines}

What the rows say:

{remarks}
"""
SECTIONS = {
    "bfloat16": "Each program's own KV cache of 16 bits",
    "float16": "KV cache in float16 by both",
    "int8": "KV cache in 8 bits",
}
"""Penstock's type of the KV cache, and the title of its table."""
_COLUMNS = (
    "weights",
    "matrices",
    *(f"{figure}, {engine}" for figure in ("KL", "RMS Δp", "same top") for engine in ("penstock", "llama.cpp")),
    "verdict",
    "machines",
)


def verdict(ours: Figure, theirs: Figure) -> str:
    """Return how two RMS Δp compare."""
    if ours.overlaps(theirs):
        return "same"
    return "better" if ours.value < theirs.value else "**worse**"


def line(row: Row, runs: dict[str, Any], letters: dict[str, str]) -> str:
    """A row of the page. A dash stands for what is not measured. `letters` are the machines' names on the page."""
    pair = [runs.get(run.name) for run in (row.ours, row.theirs)]

    def cells(name: str, digits: int) -> str:
        return " | ".join(
            "–" if run is None else f"{run[name]['value']:.{digits}f} ± {run[name]['error']:.{digits}f}" for run in pair
        )

    counts: dict[str, int] = next((run["matrices"] for run in pair if run), {})
    matrices = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    ours, theirs = (None if run is None else Figure(**run["rms_delta_p"]) for run in pair)
    judged = verdict(ours, theirs) if ours and theirs else "–"
    cells_of_row = f"{cells('kl', 5)} | {cells('rms_delta_p', 2)} | {cells('same_top', 2)}"
    machines = ", ".join("–" if run is None else letters[run["machine"]] for run in pair)
    return f"| {row.title} | {matrices} | {cells_of_row} | {judged} | {machines} |\n"


def report(content: dict[str, Any]) -> str:
    """The results as a page."""
    windows, runs = content["windows"], content["runs"]
    letters = {name: chr(ord("A") + i) for i, name in enumerate(dict.fromkeys(run["machine"] for run in runs.values()))}
    facts = {
        "date": content["date"],
        "versions": content["versions"],
        "windows": windows,
        "window": WINDOW,
        "remarks": REMARKS,
        "machines": "\n".join(f"  - {letter}: {name}" for name, letter in letters.items()),
    }
    lines = [HEAD.format(tokens=windows * WINDOW, scored=windows * (WINDOW - 1 - WINDOW // 2), **facts)]
    for kv, title in SECTIONS.items():
        lines.append(f"## {title}\n\n| {' | '.join(_COLUMNS)} |\n{'|---' * len(_COLUMNS)}|\n")
        known = [row for row in rows() if row.ours.kv == kv and {row.ours.name, row.theirs.name} & runs.keys()]
        lines += [line(row, runs, letters) for row in known]
        lines.append("\n")
    missing = [run.name for run in _runs() if run.name not in runs]
    lines.append("Every run is measured.\n" if not missing else "Not measured yet, and measured by the next start:\n\n")
    lines += [f"- {name}\n" for name in missing]
    return "".join(lines)


def _runs() -> list[Run]:
    return list(dict.fromkeys(run for row in rows() for run in (row.ours, row.theirs)))


def written(path: Path, content: dict[str, Any]) -> None:
    """Write the results as JSON and as a page."""
    path.write_text(json.dumps(content, indent=1) + "\n")
    path.with_suffix(".md").write_text(report(content))


def main() -> None:
    """Measure what the results lack, and write table and JSON after each run."""
    from penstock.cli.demo_model import demo_model

    parser = argparse.ArgumentParser(prog="bench.studies.accuracy", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--windows", type=int, default=NUM_WINDOWS, help=f"windows of {WINDOW} tokens; {NUM_WINDOWS}")
    parser.add_argument("--redo", nargs="+", default=[], help="measure again the runs whose names have these parts")
    parser.add_argument("--report", action="store_true", help="only write the page")
    parser.add_argument("--only", nargs="+", default=[""], help="measure only runs whose names have one of these parts")
    options = parser.parse_args(sys.argv[1:])
    content: dict[str, Any] = json.loads(options.results.read_text()) if options.results.exists() else {"runs": {}}
    if content.get("windows", options.windows) != options.windows:
        parser.error(f"{options.results} has {content['windows']} windows; name another file or the same number")
    content |= {"date": time.strftime("%Y-%m-%d"), "versions": peers.versions("llamacpp"), "windows": options.windows}
    model = demo_model()
    for run in () if options.report else _runs():
        again = any(part in run.name for part in options.redo)
        if (run.name in content["runs"] and not again) or not any(part in run.name for part in options.only):
            continue
        content["runs"][run.name] = measure(run, model, base_file(model, options.windows))
        written(options.results, content)
        print(run.name, content["runs"][run.name]["rms_delta_p"], flush=True)
    written(options.results, content)


if __name__ == "__main__":
    main()
