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


HEAD = """# Accuracy, {date}

`PYTHONPATH=ops python -m bench.studies.accuracy` with {versions}, on {machines}.
*RMS Δp*: the root of the mean squared difference of the next token's probability from float32, in percent, as in
`llama-perplexity --kl-divergence`, over {scored:,} tokens of Python's help texts; ± is 95 %. `accuracy.json` has
divergences and shares of equal tokens.

All files come from the demo model's Q4_1, dequantized to float32, so four bits find the same codes again. *Wide* files
have rows of 768 numbers, which fill blocks of 256. With equal caches of 16 bits both programs are the same; float16 is
not the default, because [steps take longer](int8_steps.md#kv-cache). `int8` has one scale for a row, not
for 32 numbers.

"""
SECTIONS = {"bfloat16": "Each program's own KV cache of 16 bits", "int8": "KV cache in 8 bits"}
"""Penstock's type of the KV cache, and the title of its table."""
_COLUMNS = ("weights", "RMS Δp, penstock", "RMS Δp, llama.cpp", "verdict")


def verdict(ours: Figure, theirs: Figure) -> str:
    """Return how two RMS Δp compare."""
    if ours.overlaps(theirs):
        return "same"
    return "better" if ours.value < theirs.value else "**worse**"


def line(row: Row, runs: dict[str, Any]) -> str:
    """Return a row of the page. A dash stands for what is not measured."""
    pair = [runs.get(run.name) for run in (row.ours, row.theirs)]
    ours, theirs = (None if run is None else Figure(**run["rms_delta_p"]) for run in pair)
    cells = " | ".join("–" if one is None else f"{one.value:.2f} ± {one.error:.2f}" for one in (ours, theirs))
    return f"| {row.title} | {cells} | {verdict(ours, theirs) if ours and theirs else '–'} |\n"


def report(content: dict[str, Any]) -> str:
    """Return the results as a page."""
    windows, runs = content["windows"], content["runs"]
    machines = " and ".join(dict.fromkeys(run["machine"].partition(" (")[0] for run in runs.values()))
    scored = windows * (WINDOW - 1 - WINDOW // 2)
    lines = [HEAD.format(scored=scored, date=content["date"], versions=content["versions"], machines=machines)]
    for kv, title in SECTIONS.items():
        known = [row for row in rows() if row.ours.kv == kv and {row.ours.name, row.theirs.name} & runs.keys()]
        if known:
            lines.append(f"## {title}\n\n| {' | '.join(_COLUMNS)} |\n{'|---' * len(_COLUMNS)}|\n")
            lines += [*(line(row, runs) for row in known), "\n"]
    missing = [run.name for run in _runs() if run.name not in runs]
    lines.append("Not measured yet:\n\n" if missing else "")
    return "".join([*lines, *(f"- {name}\n" for name in missing)]).rstrip("\n") + "\n"


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
