"""Models with changed files: each is refused with a sentence that names the file, or it loads and answers.

    python -m hostile.model_files --count 5000 --first 0

Each is loaded by a fork of a process that has imported everything, with limits of memory and time.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import re
import resource
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NoReturn

import torch
from fixtures.gguf_file import write_gguf
from fixtures.quantized_checkpoint import LAYOUTS, write_quantized
from fixtures.random_adapters import make_adapter
from fixtures.random_families import make_family_model
from fixtures.tiny_model import make_tiny_model
from hostile.mutations import FileChange, change
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM

from penstock import ConfigError, Engine, RequestError, SamplingParams
from penstock.gpu_node.engine.text import chat, template_worker
from penstock.gpu_node.model.native import load as _native  # noqa: F401  so that no fork imports it
from penstock.gpu_node.model.torch_cpu import load as _torch_cpu  # noqa: F401

SEED = 68
MAX_BYTES = 4 << 30
MAX_CPU_S = 10
PATIENCE_S = 240.0
"""Wall time of what may take MAX_CPU_S; the machine may have other work."""
PROGRESS = 250
ADAPTER, UNCHANGED = "tuned", "unchanged"
RARE = ("gemma3.gguf", "llama classes")
"""transformers converts these, which takes a second of CPU time."""
TEXTS = ("the gate opens by pressure", "Größe 水門 🌊 ''' 12345  \n\n<|im_end|> the the the")
_NAMES_FILE = re.compile(r"/|\b(json|jinja|safetensors|gguf)\b")
_PLACES = (
    *("tensors? ", r"at line \d", "header", "metadata", "offset", "not JSON", "no config", "cut short"),
    *("has no .", "rope scaling", "not there", r"\.weight"),
)
_NAMES_PLACE = re.compile("|".join(_PLACES))
"""What tells the place instead of a field: several fields may be wrong if two of them contradict each other."""
SETTINGS: Mapping[str, Any] = {
    "dtype": "bfloat16",
    "num_threads": 1,
    "num_kv_blocks": 64,
    "max_num_seqs": 2,
    "weight_cache": False,
}


def make_bases(folder: Path, *, few: bool = False) -> list[Path]:
    """Write models of each format, one in a folder. A folder `tuned` inside has an adapter. few: the main formats."""
    tiny = make_tiny_model(folder / "llama")
    (tiny / "1_Pooling").mkdir()
    (tiny / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    _write_shards(_copy(tiny, "index"), with_index=True)
    adapted = _copy(tiny, "adapter")
    make_adapter(adapted / ADAPTER, AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16))
    _write_gguf(tiny, folder / "llama.gguf", "llama")
    if few:
        return sorted(folder.iterdir())
    for name in ("qwen3", "gemma3", "phi3", "falcon 40b", "gpt-neox", "mixtral", "llama 3"):
        make_family_model(folder / name, name, "bfloat16")
    for name in ("awq", "gptq int4 any order", "packed int4 any order", "fp8 in blocks", "int8 by row with zeros"):
        write_quantized(tiny, LAYOUTS[name], folder / name)
    _write_shards(_copy(tiny, "shards"), with_index=False)
    _write_unigram(_copy(tiny, "unigram"))
    _edit(_copy(tiny, "llama classes") / "tokenizer_config.json", tokenizer_class="LlamaTokenizer")
    _write_gguf(tiny, folder / "llama parts.gguf", "llama", split_max_tensors=8)
    _write_gguf(folder / "gemma3", folder / "gemma3.gguf", "gemma3")
    return sorted(folder.iterdir())


def _write_gguf(base: Path, target: Path, architecture: str, **options: Any) -> None:
    target.mkdir()
    write_gguf(base, target / "model.gguf", architecture, **options)


def _copy(tiny: Path, name: str) -> Path:
    return Path(shutil.copytree(tiny, tiny.parent / name))


def _edit(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def _write_shards(folder: Path, *, with_index: bool) -> None:
    tensors = load_file(folder / "model.safetensors")
    names, owners = sorted(tensors), dict[str, str]()
    for i, part in enumerate((names[::2], names[1::2]), 1):
        shard = f"model-{i:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / shard)
        owners |= dict.fromkeys(part, shard)
    (folder / "model.safetensors").unlink()
    if with_index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": owners}))


def _write_unigram(folder: Path) -> None:
    """Replace the tokenizer by one of SentencePiece's kind, with each sort of normalizer."""
    words = ["<unk>", "<|im_start|>", "<|im_end|>", "▁", "▁the", "▁gate", *map(chr, range(97, 123))]
    pieces = [(word, -float(i)) for i, word in enumerate(words + [f"<0x{byte:02X}>" for byte in range(256)])]
    backend: Any = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " "), normalizers.Prepend("▁")]
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\d|\s+"), "isolated"), pre_tokenizers.Metaspace()]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.save(str(folder / "tokenizer.json"))


# --- one model


@dataclass(frozen=True)
class Tried:
    """What became of a model with one change."""

    number: int
    base: str
    change: str
    field: str | None
    file: str
    end: str
    """`refused`, `answered`, `request refused`, or what no user may meet: `fault` or `killed`."""
    message: str = ""

    @property
    def problem(self) -> str | None:
        """What is wrong with this end; None if nothing is."""
        if self.end in ("fault", "killed") or (self.change == UNCHANGED and self.end == "refused"):
            return self.end
        if self.end != "refused":
            return None
        if not _NAMES_FILE.search(self.message):
            return "names no file"
        is_named = not self.field or self.field[:100].rstrip("s") in self.message
        # What is wrong in a config is always told by its field.
        if not is_named and (self.file == "config.json" or not _NAMES_PLACE.search(self.message)):
            return "names no field"
        return None


def case_of(number: int, bases: list[Path]) -> tuple[Random, Path]:
    """Return the random numbers of a case and its model. Negative numbers are the models without a change."""
    random = Random(f"{SEED} {number}")
    if number < 0:
        return random, bases[~number]
    base = random.choice(bases)
    if base.name in RARE and random.random() < 0.7:
        base = random.choice(bases)
    return random, base


def changed_copy(number: int, bases: list[Path], folder: Path) -> tuple[Path, Path, FileChange]:
    """Write the model of a case to a new folder. Return the base, the model, and what was changed."""
    random, base = case_of(number, bases)
    model = Path(shutil.copytree(base, folder / "model"))
    files = sorted(path for path in (model / ADAPTER if base.name == "adapter" else model).rglob("*") if path.is_file())
    made = FileChange(model, UNCHANGED) if number < 0 else change(random, random.choice(files))
    return base, model, made


def try_model(model: Path) -> tuple[str, str]:
    """Load a model and ask it. Return the end and the message, as `Tried` has them."""
    lora = {ADAPTER: model / ADAPTER} if (model / ADAPTER).exists() else {}
    try:
        engine = Engine(str(model), lora=lora, **SETTINGS)
    except ConfigError as error:
        return "refused", error.message
    params = SamplingParams(temperature=0, max_tokens=4)
    ends = []
    prompts: list[Any] = [*TEXTS]
    if (model / "chat_template.jinja").exists():
        prompts.append([{"role": "user", "content": TEXTS[0]}])
    for prompt in prompts:
        try:
            engine.generate([prompt], params, adapters=ADAPTER if lora else None)
        except RequestError as error:
            ends.append(error.message)
    return ("request refused", ends[0]) if ends else ("answered", "")


class _Forked:
    """The process of a chat template as a fork of this one. A start by its command takes a tenth of a second."""

    def __init__(self, module: str, child_end: socket.socket, environment: Mapping[str, str]) -> None:
        own = child_end.fileno()
        self._pid = os.fork()
        if self._pid == 0:
            os.closerange(3, own)
            os.closerange(own + 1, 256)
            sys.argv = [module, str(own)]
            try:
                template_worker.main()
            finally:
                os._exit(0)

    def wait(self, timeout_s: float = 0.0) -> None:
        """Not needed: it ends with this process."""

    def kill(self) -> None:
        """End it."""
        os.kill(self._pid, signal.SIGKILL)


def _child(number: int, bases: list[Path], folder: Path, answer: int) -> NoReturn:
    """Try a model within the limits, and write what became of it."""
    os.setpgid(0, 0)
    log = os.open(folder / "log", os.O_RDWR | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable(log)
    base, model, made = changed_copy(number, bases, folder)
    told = {"number": number, "base": base.name, "change": made.what, "field": made.field, "file": made.path.name}
    os.write(answer, json.dumps(told | {"end": "killed"}).encode() + b"\n")
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    chat.start_process = _Forked  # type: ignore[assignment,attr-defined]
    try:
        end, message = try_model(model)
    except BaseException:
        end, message = "fault", traceback.format_exc()
    with suppress(BrokenPipeError):
        os.write(answer, json.dumps(told | {"end": end, "message": message[-8000:]}).encode() + b"\n")
    os._exit(0)


class _Running:
    """A fork that tries a model."""

    def __init__(self, number: int, bases: list[Path], scratch: Path) -> None:
        self._folder = Path(tempfile.mkdtemp(dir=scratch))
        self.answer, child_end = os.pipe()
        self._ends_s = time.monotonic() + PATIENCE_S
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.answer)
            _child(number, bases, self._folder, child_end)
        os.close(child_end)
        self._content = b""

    def read(self) -> bool:
        """Read what the fork has written. Return whether it has ended."""
        content = os.read(self.answer, 1 << 16)
        self._content += content
        return not content

    def end_if_late(self) -> None:
        """Kill a fork that waits for what does not come."""
        if time.monotonic() > self._ends_s:
            os.killpg(self.pid, signal.SIGKILL)

    def result(self) -> Tried:
        """Return what became of the model, after the end of the fork."""
        os.close(self.answer)
        _, status = os.waitpid(self.pid, 0)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        told = json.loads(self._content.splitlines()[-1])
        if told["end"] == "killed":
            log = (self._folder / "log").read_text(errors="replace")[-3000:]
            told["message"] = f"status {os.waitstatus_to_exitcode(status)}\n{log}"
        # A folder that the model's change made unreadable stays.
        shutil.rmtree(self._folder, ignore_errors=True)
        return Tried(**told)


@dataclass
class Found:
    """The results of a campaign."""

    ends: Counter[str] = field(default_factory=Counter)
    problems: list[Tried] = field(default_factory=list)
    tried: list[Tried] = field(default_factory=list)


def try_models(numbers: list[int], bases: list[Path], scratch: Path, at_once: int = 2) -> Found:
    """Try the models of these numbers, some at once. This process must have only one thread."""
    found, waiting = Found(), iter(numbers)
    running: dict[int, _Running] = {}
    while True:
        while len(running) < at_once and (number := next(waiting, None)) is not None:
            one = _Running(number, bases, scratch)
            running[one.answer] = one
        if not running:
            return found
        readable, _, _ = select.select(list(running), [], [], 1.0)
        for answer in readable:
            if running[answer].read():
                tried = running.pop(answer).result()
                found.ends[tried.end] += 1
                found.tried.append(tried)
                if len(found.tried) % PROGRESS == 0:
                    print(f"{len(found.tried)} tried: {dict(found.ends)}", flush=True)
                if tried.problem is not None:
                    found.problems.append(tried)
                    print(f"{tried.number} {tried.base}/{tried.file}: {tried.change} -> {tried.problem}", flush=True)
                    print("    " + tried.message[-2000:].replace("\n", "\n    "), flush=True)
        for one in running.values():
            one.end_if_late()


def main() -> None:
    """Run a part of the campaign, and print what is wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--few", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        bases_folder = Path(scratch) / "bases"
        bases_folder.mkdir()
        bases, began_s = make_bases(bases_folder, few=given.few), time.monotonic()
        numbers = [*(~i for i in range(len(bases))), *range(given.first, given.first + given.count)]
        found = try_models(numbers, bases, Path(scratch), given.at_once)
        for one in found.tried if given.all else ():
            print(f"{one.number} {one.base}/{one.file}: {one.change} -> {one.problem or one.end}\n    {one.message}")
        took, used = time.monotonic() - began_s, resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = used.ru_utime + used.ru_stime
        memory_mib = used.ru_maxrss >> 10
        print(
            f"{dict(found.ends)}, {len(found.problems)} problems, {took:.0f} s, {cpu_s:.0f} s of CPU time, "
            f"at most {memory_mib:,} MiB in a process"
        )
    sys.exit(bool(found.problems))


if __name__ == "__main__":
    main()
