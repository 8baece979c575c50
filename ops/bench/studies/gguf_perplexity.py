"""`PYTHONPATH=ops python -m bench.studies.gguf_perplexity`: perplexity of GGUF files, by penstock and by llama.cpp.

Both read the same windows of the same text. llama-quantize makes the files from the demo model. Most of its rows have
576 numbers, which fill no blocks of 256; so it is also made wider, with zeros that change nothing that it computes. A
file that is there is not made again, and a line in the results is not measured again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, GGUFWriter, dequantize
from numpy.typing import NDArray

from bench import machine, peers
from bench.studies.perplexity import english, native_logits, native_model
from bench.studies.perplexity_report import ratio_of

RESULTS = Path(__file__).parents[1] / "results" / "gguf_perplexity.json"
FOLDER = peers.BUILD / "bench" / "gguf_perplexity"
WINDOW = 512
WINDOW_CHARACTERS = 4096
"""Of the text, for each window: more than enough."""
AS_IT_IS, WIDE = "as it is", "wide"
OURS, LLAMA, WIDENED, FLOAT = "penstock", "llama.cpp", "penstock widened", "llama.cpp float"
FILES = (
    *((WIDE, kind) for kind in ("F16", "Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K", "IQ4_NL", "IQ4_XS")),
    *((WIDE, kind) for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")),
    *((AS_IT_IS, kind) for kind in ("F16", "Q2_K", "Q3_K_M", "Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K")),
    *((AS_IT_IS, kind) for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")),
)
BOUND = 0.005
"""How far penstock's perplexity may be from llama.cpp's for the same file."""
_BLOCK = 256

HEAD = """# Perplexity of GGUF files, {date}

`PYTHONPATH=ops python -m bench.studies.gguf_perplexity` on {cpu}, {cores} cores. Both programs score the second half of
the same {windows} windows of {window} tokens of Python's help texts. `llama-quantize` made the files from the demo
model, with rows padded with zeros to 768, so that they fill blocks of 256. ± is 95 % over the windows.

| file | penstock | llama.cpp | penstock ÷ llama.cpp |
|---|---|---|---|
"""


def padded(values: NDArray[np.float32], axis: int, size: int) -> NDArray[np.float32]:
    """Values with zeros up to a size along an axis."""
    widths = [(0, size - count if i == axis % values.ndim else 0) for i, count in enumerate(values.shape)]
    return np.pad(values, widths)


def with_heads(values: NDArray[np.float32], axis: int, groups: int, size: int) -> NDArray[np.float32]:
    """Values with heads of zeros behind the heads of each group, so that an axis has `size` numbers."""
    grouped = np.moveaxis(values, axis, 0).reshape(groups, -1, values.shape[1 - axis])
    wider = padded(grouped, 1, size // groups).reshape(size, -1)
    return np.moveaxis(wider, 0, axis)


def make_wide(model: Path, path: Path) -> None:
    """Write a Llama with rows of whole blocks of 256, in f16, that computes what `model` computes."""
    reader, writer = GGUFReader(model), GGUFWriter(path, "llama")
    size, num_heads, num_groups = (
        "llama.embedding_length",
        "llama.attention.head_count",
        "llama.attention.head_count_kv",
    )
    epsilon = "llama.attention.layer_norm_rms_epsilon"
    known = {name: reader.fields[name].contents() for name in (size, num_heads, num_groups, epsilon)}
    hidden, groups = known[size], known[num_groups]
    wide = -(-hidden // _BLOCK) * _BLOCK
    # Zeros make the mean square smaller by this factor.
    factor = hidden / wide
    changed = {size: wide, num_heads: known[num_heads] * wide // hidden, epsilon: known[epsilon] * factor}
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            kind, of = field.types[0], field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, changed.get(name, field.contents()), kind, sub_type=of)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1])
        if "attn_q." in tensor.name:
            values = with_heads(values, 0, groups, wide)
        if "attn_output." in tensor.name:
            values = padded(with_heads(values, 1, groups, wide), 0, wide)
        elif "ffn_down." in tensor.name:
            values = padded(values, 0, wide)
        else:
            values = padded(values, -1, wide)
        if values.ndim == 1:
            values = values * math.sqrt(factor)
        writer.add_tensor(tensor.name, values.astype(np.float32 if values.ndim == 1 else np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def file_of(model: Path, shape: str, kind: str) -> Path:
    """Return a file of the model in a format; make it if there is none."""
    path = FOLDER / f"{shape.replace(' ', '-')}-{kind}.gguf"
    if path.exists():
        return path
    FOLDER.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    if shape == WIDE and kind == "F16":
        make_wide(model, part)
    else:
        source = model if kind == "F16" else file_of(model, shape, "F16")
        command = [str(peers.llama_binary("llama-quantize")), "--allow-requantize", str(source), str(part), kind]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return part.rename(path)


def by_llamacpp(path: Path, text: Path, num_windows: int, *, float_inputs: bool = False) -> list[float]:
    """The loss of each window by llama.cpp's own tool. Without its repacked kernels: those for AMX crash on some VMs.

    float_inputs: multiply activations as they are, by widened weights, instead of rounding them to integers.
    """
    sizes = ["-c", str(WINDOW), "-b", str(WINDOW), "--chunks", str(num_windows), "--no-repack"]
    # More threads than cores wait for each other at every barrier.
    sizes += ["-t", str(len(os.sched_getaffinity(0)))]
    command = [str(peers.llama_binary("llama-perplexity")), "-m", str(path), "-f", str(text), *sizes]
    env = dict(os.environ)
    if float_inputs:
        env["GGML_BACKEND_PATH"] = str(peers.llama_float_backend())
        # This option makes the program load the backend. No tensor has that name.
        command += ["--override-tensor", "no_such_tensor=CPU"]
        devices = subprocess.run([command[0], "--list-devices"], check=True, capture_output=True, text=True, env=env)
        if "BLAS" not in devices.stdout + devices.stderr:
            raise ValueError("llama-perplexity does not load its OpenBLAS backend")
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    said = done.stdout + done.stderr
    losses = losses_of(said)
    if len(losses) != num_windows:
        raise ValueError(f"llama-perplexity did not run as told: {said[-500:]}")
    return losses


def losses_of(output: str) -> list[float]:
    """Return the loss of each window from llama-perplexity's output, which has the perplexity up to each window."""
    sums = [int(i) * math.log(float(value)) for i, value in re.findall(r"\[(\d+)\]([\d.]+),", output)]
    return [after - before for before, after in pairwise([0.0, *sums])]


def by_penstock(path: Path, text: str, num_windows: int, weights: str = "auto") -> tuple[list[float], float]:
    """The loss of each window by the native runner, and the MiB of its weights."""
    from transformers import AutoTokenizer

    from penstock.gpu_node.model.checkpoint.source import resolve_model

    auto: Any = AutoTokenizer
    tokenizer = auto.from_pretrained(resolve_model(str(path), lambda *_: None).folder)
    ids = np.array(tokenizer(text, verbose=False).input_ids[: WINDOW * num_windows], np.int32)
    losses: list[float] = []
    with native_model(str(path), weights, "bfloat16") as loaded:
        mib = loaded.runner.placement.weight_bytes / 2**20
        for window in ids.reshape(num_windows, WINDOW):
            scored = native_logits(loaded, window)[WINDOW // 2 : -1].log_softmax(-1)
            targets = torch.from_numpy(window[WINDOW // 2 + 1 :].astype(np.int64))
            losses.append(float(-scored.gather(1, targets[:, None]).double().mean()))
    return losses, mib


def measure(model: Path, shape: str, kind: str, num_windows: int) -> dict[str, Any]:
    """One line of the results, without llama.cpp's float backend."""
    path, text = file_of(model, shape, kind), text_of(num_windows)
    counts = Counter(tensor.tensor_type.name for tensor in GGUFReader(path).tensors if len(tensor.shape) > 1)
    ours, mib = by_penstock(path, text.read_text(), num_windows)
    return {
        "model": shape,
        "file": kind,
        "matrices": dict(counts.most_common()),
        "file_mib": path.stat().st_size / 2**20,
        "weights_mib": mib,
        OURS: ours,
        WIDENED: by_penstock(path, text.read_text(), num_windows, "none")[0],
        LLAMA: by_llamacpp(path, text, num_windows),
    }


def text_of(num_windows: int) -> Path:
    """Return a file with the text of all windows, and of some more."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / "text.txt"
    text = english()[: num_windows * WINDOW_CHARACTERS]
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    return path


def compared(run: dict[str, Any], ours: str, theirs: str) -> str:
    """Return the ratio of two perplexities of a run, with its 95 % interval over the choice of windows."""
    if theirs not in run:
        return "–"
    ratio, error = ratio_of(run[ours], run[theirs])
    return f"{ratio:.4f} ± {error:.4f}"


def report(content: dict[str, Any]) -> str:
    """Return the results as a page."""
    facts = content["machine"] | {"windows": content["windows"], "window": WINDOW}
    lines, runs = [HEAD.format(**facts)], [run for run in content["runs"].values() if LLAMA in run]
    for run in (run for run in runs if run["model"] == "wide"):
        figures = f"{perplexity(run[OURS]):.3f} | {perplexity(run[LLAMA]):.3f} | {compared(run, OURS, LLAMA)}"
        lines.append(f"| {run['file']} | {figures} |\n")
    plain = [abs(ratio_of(run[OURS], run[LLAMA])[0] - 1) <= BOUND for run in runs if run["model"] != "wide"]
    lines.append(f"\nOf the files without padding, {sum(plain)} of {len(plain)} are within {BOUND:.1%} of llama.cpp.\n")
    return "".join(lines)


def perplexity(losses: list[float]) -> float:
    """Return the perplexity of windows of equal length."""
    return math.exp(statistics.mean(losses))


def main() -> None:
    """Measure what the results lack; write table and JSON after each file."""
    from penstock.cli.demo_model import demo_model

    parser = argparse.ArgumentParser(prog="bench.studies.gguf_perplexity", description=__doc__)
    parser.add_argument("--model", type=Path, help="a GGUF file of a Llama; the demo model if not given")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--windows", type=int, default=20, help=f"windows of {WINDOW} tokens; 20 if not given")
    parser.add_argument(
        "--float", action="store_true", help="measure llama.cpp with float activations too; needs OpenBLAS"
    )
    parser.add_argument("formats", nargs="*", help="measure only these, such as Q4_K_M; all if none is given")
    options = parser.parse_args(sys.argv[1:])
    model = options.model or demo_model()
    content: dict[str, Any] = json.loads(options.results.read_text()) if options.results.exists() else {"runs": {}}
    content |= {"machine": machine.describe(), "revision": machine.revision(), "versions": peers.versions("llamacpp")}
    content["windows"] = options.windows
    wanted = {f"{shape} {kind}": (shape, kind) for shape, kind in FILES if kind in (options.formats or (kind,))}
    for name, (shape, kind) in wanted.items():
        if name not in content["runs"]:
            content["runs"][name] = measure(model, shape, kind, options.windows)
            written(options.results, content)
    for name, (shape, kind) in wanted.items() if options.float else ():
        if FLOAT not in content["runs"][name]:
            path, text = file_of(model, shape, kind), text_of(options.windows)
            content["runs"][name][FLOAT] = by_llamacpp(path, text, options.windows, float_inputs=True)
            written(options.results, content)


def written(path: Path, content: dict[str, Any]) -> None:
    """Write the results as JSON and as a page."""
    path.write_text(json.dumps(content, indent=1) + "\n")
    path.with_suffix(".md").write_text(report(content))
    print(len(content["runs"]), "files measured", flush=True)


if __name__ == "__main__":
    main()
