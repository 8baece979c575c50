"""ONNX Runtime, OpenVINO and llama.cpp's server as contestants of the study of encoders, in eight bits each.

The interpreter of the peers needs torch, transformers and tokenizers, and for the first two onnx, onnxruntime and
onnxscript, or openvino and nncf. LLAMA_SERVER names llama.cpp's server, LLAMA_QUANTIZE its program that quantizes, and
LLAMA_CPP the folder of its sources, whose converter makes the file. Vectors are means of all tokens, of length 1.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.child import free_port

MAX_TOKENS = 256
BATCH = 32
START_TIMEOUT_S = 60.0
PARALLEL = 8
"""Texts of a request to llama.cpp's server that it computes together."""

Embed = Callable[[list[str]], Any]


def _module(folder: Path) -> Any:
    """Return the model as a module from token ids and a mask to vectors."""
    import torch
    from transformers import AutoModel

    class Pooled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model: Any = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            states = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            mask = attention_mask.unsqueeze(-1).float()
            return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)

    return Pooled().eval()


def _batches(folder: Path, texts: list[str]) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the places, token ids and masks of texts of about equal length."""
    import numpy as np
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(MAX_TOKENS)
    found = [one.ids for one in tokenizer.encode_batch(texts)]
    order = np.argsort([-len(ids) for ids in found], kind="stable")
    for first in range(0, len(order), BATCH):
        places = order[first : first + BATCH]
        longest = len(found[places[0]])
        ids, mask = np.zeros((len(places), longest), np.int64), np.zeros((len(places), longest), np.int64)
        for row, at in enumerate(places):
            ids[row, : len(found[at])], mask[row, : len(found[at])] = found[at], 1
        yield places, ids, mask


def _by_batches(folder: Path, compute: Callable[[Any, Any], Any]) -> Embed:
    import numpy as np

    def embed(texts: list[str]) -> Any:
        rows: Any = None
        for places, ids, mask in _batches(folder, texts):
            found = compute(ids, mask)
            if rows is None:
                rows = np.empty((len(texts), found.shape[1]), np.float32)
            rows[places] = found
        return rows

    return embed


def onnx_runtime(folder: Path, num_threads: int) -> Embed:
    """Return the model in ONNX Runtime: weights in int8 by channel, activations quantized as they come."""
    import onnxruntime
    import torch
    from onnxruntime.quantization import QuantType, quantize_dynamic

    made = Path(tempfile.mkdtemp(prefix="onnx"))
    example = {"input_ids": torch.ones(2, 16, dtype=torch.long), "attention_mask": torch.ones(2, 16, dtype=torch.long)}
    axes = {name: {0: "texts", 1: "tokens"} for name in example}
    torch.onnx.export(
        *(_module(folder), tuple(example.values()), str(made / "model.onnx")),
        input_names=[*example],
        output_names=["vectors"],
        dynamic_axes=axes,
        dynamo=False,
    )
    quantize_dynamic(made / "model.onnx", made / "int8.onnx", weight_type=QuantType.QInt8, per_channel=True)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads
    session = onnxruntime.InferenceSession(str(made / "int8.onnx"), options, providers=["CPUExecutionProvider"])
    return _by_batches(folder, lambda ids, mask: session.run(None, {"input_ids": ids, "attention_mask": mask})[0])


def openvino(folder: Path, num_threads: int) -> Embed:
    """Return the model in OpenVINO: weights and activations in int8, calibrated on texts of random tokens."""
    import nncf
    import numpy as np
    import openvino as ov
    import torch

    example = {"input_ids": torch.ones(2, 16, dtype=torch.long), "attention_mask": torch.ones(2, 16, dtype=torch.long)}
    model = ov.convert_model(_module(folder), example_input=example)
    rng = np.random.default_rng(0)
    samples = [
        {"input_ids": rng.integers(1000, 20_000, (1, 64)), "attention_mask": np.ones((1, 64), np.int64)}
        for _ in range(100)
    ]
    quantized = nncf.quantize(model, nncf.Dataset(samples), model_type=nncf.ModelType.TRANSFORMER)
    core = ov.Core()
    core.set_property("CPU", {"INFERENCE_NUM_THREADS": num_threads})
    compiled = core.compile_model(quantized, "CPU")
    return _by_batches(folder, lambda ids, mask: compiled({"input_ids": ids, "attention_mask": mask})[0])


def llama_cpp(folder: Path, num_threads: int) -> Embed:
    """Return llama.cpp's server with the model in Q8_0, which gets the texts of a turn in requests of 64."""
    import numpy as np

    made = Path(tempfile.mkdtemp(prefix="llama"))
    converter = Path(os.environ["LLAMA_CPP"]) / "convert_hf_to_gguf.py"
    words = [sys.executable, str(converter), str(folder), "--outfile", str(made / "m.gguf"), "--outtype", "q8_0"]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    port = free_port()
    context = str(PARALLEL * 2 * MAX_TOKENS)
    options = ["--embedding", "--pooling", "mean", "--parallel", str(PARALLEL), "--ctx-size", context]
    options += ["--batch-size", context, "--ubatch-size", context, "--threads", str(num_threads), "--port", str(port)]
    log = (made / "server.log").open("w")
    server = subprocess.Popen(
        [os.environ["LLAMA_SERVER"], "--model", str(made / "m.gguf"), *options], stdout=log, stderr=log
    )
    _wait_for(port, server)
    tokens = _cut(folder)

    def embed(texts: list[str]) -> Any:
        rows = []
        for first in range(0, len(texts), 64):
            body = json.dumps({"input": [tokens(text) for text in texts[first : first + 64]]}).encode()
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/embeddings", body, headers)
            with urllib.request.urlopen(request, timeout=600) as answer:
                rows += [one["embedding"] for one in json.load(answer)["data"]]
        return np.array(rows, np.float32)

    return embed


def _cut(folder: Path) -> Callable[[str], list[int]]:
    """Return what makes the token ids of a text, with its marks and at most as many as the model takes."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(MAX_TOKENS)
    return lambda text: list(tokenizer.encode(text).ids)


def _wait_for(port: int, server: subprocess.Popen[Any]) -> None:
    until_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < until_s and server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError("llama.cpp's server does not answer")


FURTHER: Mapping[str, Callable[[Path, int], Embed]] = {
    "ONNX Runtime, int8": onnx_runtime,
    "OpenVINO, int8": openvino,
    "llama.cpp's server, Q8_0": llama_cpp,
}
"""Further contestants by name."""
