"""One model in every format that an engine wants, each made once from ours, under build/bench/weights/.

The model is a .gguf file or a Hugging Face folder; llama.cpp's formats need the file. Or it is the name of a shape, and
its weights are random. `rm -r build/bench/weights/NAME` frees their disk space.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Collection
from pathlib import Path

from bench import peers
from bench.larger import models

FOLDER = peers.BUILD / "bench" / "weights"
GGUF_TYPES = {"gguf-bf16": "BF16", "gguf-q8_0": "Q8_0"}
SHAPE_TYPES = {"q8_0.gguf": "Q8_0", "q4_k_m.gguf": "Q4_K_M"}
"""Made of a shape's `bf16.gguf`."""
OPENVINO_ARGUMENTS = {
    "openvino-fp16": ("--weight-format", "fp16"),
    "openvino-int8": ("--weight-format", "int8"),
    # The width of the demo model is no multiple of the usual 128.
    "openvino-int4": ("--weight-format", "int4", "--group-size", "64"),
}


def path(kind: str, model: str) -> Path | None:
    """Where weights of a kind are; None where they were not made."""
    if kind == "ours":
        return Path(model)
    if kind == "gguf":
        return Path(model) if model.endswith(".gguf") else None
    found = FOLDER / Path(model).stem / kind
    return found if found.exists() else None


def make_all(model: str | None = None, kinds: Collection[str] | None = None) -> list[str]:
    """Makes what is missing, of some kinds or all; answers what could not be made, and why."""
    from penstock.cli.demo_model import demo_model

    model = model or str(demo_model())
    makers: dict[str, Callable[[str, Path], None]] = {}
    if model in models.MODEL_SHAPES:
        makers |= {"hf-bf16": models.write_folder, "bf16.gguf": models.write_gguf}
        makers |= dict.fromkeys(SHAPE_TYPES, _quantize_shape)
    else:
        makers |= {"hf-bf16": _make_hf, **dict.fromkeys(GGUF_TYPES, _make_gguf)}
    makers |= dict.fromkeys(OPENVINO_ARGUMENTS, _make_openvino)
    failed = []
    for kind, make in makers.items():
        place = FOLDER / Path(model).stem / kind
        if place.exists() or (kinds is not None and kind not in kinds):
            continue
        building = place.with_name(f".{kind}")
        building.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(building, ignore_errors=True)
        building.unlink(missing_ok=True)
        try:
            make(model, building)
        except (OSError, subprocess.CalledProcessError) as error:
            failed.append(f"{kind}: {error}")
        else:
            building.rename(place)
    return failed


def _make_hf(model: str, place: Path) -> None:
    from fixtures.dequantized import dequantized

    shutil.copytree(dequantized(model), place)


def _make_gguf(model: str, place: Path) -> None:
    if not model.endswith(".gguf"):
        raise OSError(f"{model} is no .gguf file")
    kind = GGUF_TYPES[place.name.removeprefix(".")]
    subprocess.run([peers.llama_binary("llama-quantize"), "--allow-requantize", model, place, kind], check=True)


def _quantize_shape(shape: str, place: Path) -> None:
    kind = SHAPE_TYPES[place.name.removeprefix(".")]
    source = FOLDER / shape / "bf16.gguf"
    subprocess.run([peers.llama_binary("llama-quantize"), source, place, kind], check=True)


def _make_openvino(model: str, place: Path) -> None:
    python = peers.interpreter("openvino-export")
    if python is None:
        raise OSError("openvino-export is not installed")
    command = (python.with_name("optimum-cli"), "export", "openvino", "--task", "text-generation-with-past")
    source = FOLDER / Path(model).stem / "hf-bf16"
    arguments = OPENVINO_ARGUMENTS[place.name.removeprefix(".")]
    subprocess.run([*command, "--model", source, *arguments, place], check=True)
