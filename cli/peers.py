"""Options and commands of other servers (vLLM, SGLang, llama-server, TGI, Ollama), what they are here, and how values
are written.

An option of another server is one of ours under another name, has no effect here, or is refused with what to do
instead. The tables are facts of these servers' documentation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Values = Literal["none", "one", "maybe"]
Words = Sequence[tuple[str, str | None]]
"""Our options with their values; None for a flag."""


@dataclass(frozen=True, slots=True)
class Peer:
    """What an option of another server is here."""

    values: Values
    flag: str = ""
    """Our option that means the same."""
    words: Callable[[str], Words | str] | None = None
    """Returns our options for a value, none if it has no effect, or a text that says what to do instead."""
    needless: str = ""
    """Why it has no effect."""
    instead: str = ""
    """What to do instead."""


MODEL = "MODEL"
"""Stands for the model's argument in the tables."""
MANY = frozenset(("aliases", "lora", "api_key"))
"""Settings whose option takes several values in other servers."""

LEFT_OPEN = frozenset(("max_model_len", "num_threads", "max_num_seqs", "max_num_batched_tokens"))
"""Settings that 0 and -1 leave to the server under other servers' names, as in `-c 0`."""

_SAME = {
    MODEL: "--model --model-path --model-id -m -hf -hfr --hf-repo -hff --hf-file",
    "--max-model-len": "-c --ctx-size --context-length --max-seq-len",
    "--num-threads": "-t --threads",
    "--max-num-seqs": "-np --parallel --max-running-requests --max-batch-size",
    "--max-num-batched-tokens": "-b --batch-size --chunked-prefill-size --max-batch-prefill-tokens",
    "--max-open-jobs": "--max-concurrent-requests",
    "--max-body-bytes": "--payload-limit",
    "--host": "--hostname",
    "--port": "-p",
    "--metrics-port": "--prometheus-port",
    "--otlp-traces-endpoint": "--otlp-endpoint",
    "--drain-s": "--graceful-termination-timeout",
    "--max-prefill-beside-decode": "--long-prefill-token-threshold",
    "--block-size": "--page-size",
    "--num-kv-blocks": "--num-gpu-blocks",
    "--gpu-memory-utilization": "--mem-fraction-static -gmu --cuda-memory-fraction",
    "--tensor-parallel-size": "-tp --tp --tp-size --num-shard",
    "--pipeline-parallel-size": "-pp --pp --pp-size",
    "--replicas": "-dp --dp --dp-size --data-parallel-size",
    "--lora-modules": "--lora-paths",
    "--kv-cache-dtype": "-ctk --cache-type-k",
    "--quantization": "-q --quantize",
    "--tool-parser": "--tool-call-parser",
    "--chat-template": "--chat-template-file",
    "--generation-config": "--override-generation-config",
    "--scheduling-policy": "--schedule-policy",
    "--preemption": "--preemption-mode",
    "--enforce-eager": "--disable-cuda-graph",
    "--no-enable-prefix-caching": "--disable-radix-cache --no-cache-prompt",
    "--enable-prefix-caching": "--cache-prompt",
    "--deterministic": "--enable-deterministic-inference",
    "--no-log-jobs": "--disable-log-requests --no-enable-log-requests",
    "--log-jobs": "--enable-log-requests --log-requests",
    "--log-level": "--uvicorn-log-level --log-level-http",
    "--stall-after-s": "--watchdog-timeout",
    "--send-timeout-s": "-to --timeout",
    "--api-key": "--api-keys",
    "--max-draft-tokens": "--draft-max --draft --draft-n --num-speculative-tokens --spec-draft-n-max",
}
_FLAGS_OF_OURS = {"--enforce-eager", "--deterministic"}

_WITHOUT_EFFECT: tuple[tuple[str, str, str], ...] = (
    ("code that comes with a checkpoint never runs", "--trust-remote-code", ""),
    ("adapters need no switch: --lora or --lora-dir gives them", "--enable-lora --lora-init-without-apply", ""),
    ("adapters stay in files until they are used", "--fully-sharded-loras", "--max-cpu-loras"),
    ("chat templates are always rendered as Jinja", "--jinja", "--chat-template-content-format --response-role"),
    ("attention is chosen by the device", "--no-flash-attn", "--attention-backend --sampling-backend"),
    ("attention is chosen by the device", "", "--prefill-attention-backend --decode-attention-backend"),
    (
        "a node computes on one kind of device: --device",
        "-nkvo --kv-offload --op-offload --cpu-moe",
        "-sm --split-mode",
    ),
    ("a node computes on one kind of device: --device", "", "-mg --main-gpu -ts --tensor-split --fit -fit"),
    ("tool calls need no switch; --tool-parser names their syntax", "--enable-auto-tool-choice", ""),
    ("reasoning is found by the chat template; --reasoning-parser names its syntax", "--enable-reasoning", ""),
    ("reasoning is found by the chat template; --reasoning-parser names its syntax", "", "--reasoning-format -rea"),
    ("prompts are always computed in chunks", "--enable-chunked-prefill --enable-mixed-chunk", "-ub --ubatch-size"),
    (
        "requests always join a running batch",
        "-cb --cont-batching --async-scheduling --no-scheduler-reserve-full-isl",
        "",
    ),
    ("requests always join a running batch", "--enable-overlap --disable-overlap-schedule", "--num-scheduler-steps"),
    ("requests always join a running batch", "", "--max-num-partial-prefills --schedule-conservativeness"),
    ("metrics are always served at /metrics", "--metrics --enable-metrics --slots --props --disable-log-stats", ""),
    ("metrics are always served at /metrics", "--enable-server-load-tracking --enable-cache-report", ""),
    ("prompts and answers are never logged", "--disable-uvicorn-access-log --log-disable", "--max-log-len"),
    ("the log has its own form: --log-level, --log-format", "-v --verbose --log-colors", "-lv --verbosity --log-file"),
    ("the log has its own form: --log-level, --log-format", "--log-prefix --log-timestamps", "--log-requests-level"),
    ("each request has its own seed", "", "-s --seed --random-seed"),
    ("it is a field of each request", "--ignore-eos", "-n --predict --n-predict --presence-penalty"),
    ("it is a field of each request", "", "--frequency-penalty --repeat-last-n --stop-token-ids"),
    ("the gateway shows its page at /", "--webui --ui", ""),
    (
        "weights are mapped and packed as needed",
        "--mmap --mlock --warmup --repack --skip-server-warmup",
        "--numa --prio",
    ),
    ("weights are mapped and packed as needed", "--use-tqdm-on-load --check-tensors", "--poll --cpu-strict"),
    ("weights are mapped and packed as needed", "", "--model-loader-extra-config --max-parallel-loading-workers"),
    ("a grammar is compiled by one library", "", "--guided-decoding-backend --grammar-backend"),
    ("a grammar is compiled by one library", "--enable-in-reasoning", "--structured-outputs-config"),
    ("the ranks of a model are processes", "", "--sharded"),
    ("limits of a request are those of its field", "", "--max-best-of --max-stop-sequences --max-top-n-tokens"),
    ("limits of a request are those of its field", "--enable-prefill-logprobs", "--max-client-batch-size"),
    ("requests always join a running batch", "", "--waiting-served-ratio --max-waiting-tokens --validation-workers"),
    ("steps of a GPU are compiled by its kernels", "--disable-custom-kernels", "--cuda-graphs"),
    ("the log has its own form: --log-level, --log-format", "--json-output -e --env", "--otlp-service-name"),
    ("nothing is reported to others", "", "--usage-stats"),
    ("the ranks of a model are processes", "--enable-expert-parallel --disable-custom-all-reduce", "--ep-size"),
    ("the ranks of a model are processes", "--worker-use-ray", "--distributed-executor-backend"),
    ("steps of a GPU are compiled by its kernels", "--enable-torch-compile -O0 -O1 -O2 -O3", "-O --compilation-config"),
    ("steps of a GPU are compiled by its kernels", "", "--max-seq-len-to-capture --cuda-graph-sizes -cc"),
    ("steps of a GPU are compiled by its kernels", "", "--cuda-graph-max-bs --torch-compile-max-bs"),
    ("the model's files say which task it has", "--embedding --embeddings --is-embedding --rerank", "--task --convert"),
    ("the model's files say which task it has", "--reranking", "--pooling --config-format"),
    ("texts only are served", "--language-model-only --mmproj-auto --language-only", "--limit-mm-per-prompt"),
    ("texts only are served", "--disable-mm-preprocessor-cache", "--mm-processor-kwargs --allowed-local-media-path"),
    ("the tokenizer comes from the model's files", "", "--tokenizer-mode --tokenizer-revision --code-revision"),
    (
        "a context that is full ends an answer",
        "--context-shift --swa-full",
        "--keep --cache-reuse --slot-prompt-similarity",
    ),
    (
        "the cache's size is --kv-cache-gib",
        "-kvu --kv-unified --cache-idle-slots",
        "-cram --cache-ram -ctv --cache-type-v",
    ),
    ("threads are set once: --num-threads", "--disable-frontend-multiprocessing", "-tb --threads-batch --threads-http"),
    ("identifiers of requests are always sent", "--enable-request-id-headers", ""),
    ("any method and header of the API is allowed", "--allow-credentials", "--allowed-methods --allowed-headers"),
    ("scales of the cache are computed", "--calculate-kv-scales", "--quantization-param-path"),
    ("states of recurrent layers are always float32", "", "--mamba-cache-dtype --mamba-ssm-cache-dtype"),
    ("states of recurrent layers are always float32", "", "--mamba-ssm-dtype"),
    (
        "states are saved where prompts and answers end, in the memory of --state-cache-gib",
        "",
        "--mamba-cache-mode --mamba-block-size --mamba-scheduler-strategy --mamba-radix-cache-strategy",
    ),
    (
        "states are saved where prompts and answers end, in the memory of --state-cache-gib",
        "",
        "--mamba-track-interval -ctxcp --ctx-checkpoints --swa-checkpoints --checkpoint-every-nb",
    ),
)
"""Why an option has no effect, such options without a value, and with one."""

_TLS = "TLS ends at a proxy before the gateway, which then needs --api-key"
_REFUSED: tuple[tuple[str, str, str], ...] = (
    (_TLS, "--enable-ssl-refresh", "--ssl-keyfile --ssl-certfile --ssl-ca-certs"),
    (_TLS, "", "--ssl-cert-reqs --ssl-key-file --ssl-cert-file"),
    ("a proxy before the gateway adds a path", "", "--root-path --api-prefix --path"),
    ("the gateway listens at --host and --port", "", "--uds --fd"),
    ("set the variable HF_HUB_CACHE", "", "--download-dir --huggingface-hub-cache --weights-cache-override"),
    ("prompt and answer share --max-model-len", "", "--max-input-tokens --max-input-length"),
    ("the KV cache's size is --num-kv-blocks or --kv-cache-gib", "", "--max-batch-total-tokens"),
    ("texts are not watermarked", "", "--watermark-gamma --watermark-delta"),
    ("a tunnel or proxy before the gateway", "--ngrok", "--ngrok-authtoken --ngrok-edge"),
    ("a schema of a request is always kept", "--disable-grammar-support", ""),
    ("set the variable HF_TOKEN", "", "-hft --hf-token"),
    ("set the variable HF_HUB_OFFLINE=1", "--offline", ""),
    ("set PENSTOCK_GATEWAY_API_KEY_FILE to the file", "", "--api-key-file"),
    (
        "it is in the GGUF file, or in the model's folder",
        "--skip-tokenizer-init",
        "--tokenizer --tokenizer-path --tokenizer-config-path",
    ),
    ("change config.json in the model's folder", "", "--hf-overrides --rope-scaling --rope-theta --rope-scale"),
    (
        "change config.json in the model's folder",
        "",
        "--rope-freq-base --rope-freq-scale --yarn-orig-ctx --rope-factor",
    ),
    ("change config.json in the model's folder", "", "--hf-config-path --override-kv --json-model-override-args"),
    ("speculation has no draft model: --speculative ngram", "", "-md --model-draft --speculative-model -hfd"),
    ("speculation has no draft model: --speculative ngram", "", "--speculative-draft-model-path --spec-draft-model"),
    ("images, audio and video are not served", "", "-mm --mmproj -mmu --mmproj-url --mm-encoder-tp-mode"),
    ("ranks on other hosts: --remote-ranks and `penstock rank`", "--headless", "--nnodes --node-rank -n-nodes"),
    (
        "ranks on other hosts: --remote-ranks and `penstock rank`",
        "",
        "--dist-init-addr --master-addr --master-port --shard-uds-path",
    ),
    ("ranks on other hosts: --remote-ranks and `penstock rank`", "", "--data-parallel-address --rpc --nccl-init-addr"),
    ("start more gateways on the same Redis", "", "--api-server-count -asc"),
    ("the KV cache stays in its node", "", "--kv-transfer-config --slot-save-path --disaggregation-mode"),
    ("each model has its own `penstock node`", "", "--models-dir --models-preset --models-max --lora-scaled"),
    ("give it in a request's chat_template_kwargs", "", "--chat-template-kwargs --default-chat-template-kwargs"),
    ("each setting is also a variable, PENSTOCK_NODE_<NAME>", "", "--config --json-arg"),
    ("no code of others runs in a server", "", "--middleware --tool-parser-plugin --logits-processors"),
    ("a model runs until its node ends", "--enable-sleep-mode", "--sleep-idle-seconds --load-mode"),
    ("a request's limit is --max-model-len, that of all --num-kv-blocks", "", "--max-total-tokens"),
    ("the KV cache's size is --num-kv-blocks or --kv-cache-gib", "", "--swap-space-bytes"),
    ("the states' memory is --state-cache-gib", "", "--max-mamba-cache-size --mamba-full-memory-ratio"),
    ("offload weights with --cpu-offload-gb", "", "--n-cpu-moe -ncmoe --override-tensor -ot"),
)
"""What to do instead of an option, such options without a value, and with one."""

SAMPLING = {
    "--temp": "temperature",
    "--temperature": "temperature",
    "--top-k": "top_k",
    "--top-p": "top_p",
    "--min-p": "min_p",
    "--repeat-penalty": "repetition_penalty",
}
"""llama-server's options for requests that do not set these fields; here they are --generation-config."""


def _speculative(text: str) -> Words | str:
    """Return our options for vLLM's --speculative-config."""
    try:
        config = json.loads(text)
        method, count = str(config.get("method", "")), config.get("num_speculative_tokens")
    except (ValueError, AttributeError):
        return 'its value must be JSON, such as \'{"method": "ngram", "num_speculative_tokens": 5}\''
    if method not in ("ngram", "[ngram]", "ngram_gpu", "suffix"):
        return "speculation has no draft model: --speculative ngram"
    return [("--speculative", "ngram"), *([("--max-draft-tokens", str(count))] if count else [])]


def _speculative_algorithm(text: str) -> Words | str:
    if text.lower() in ("none", ""):
        return [("--speculative", "off")]
    return _speculative('{"method": "ngram"}' if text.lower().startswith("ngram") else "{}")


def _adapters(text: str) -> Words | str:
    return [("--lora-modules", one) for one in text.split(",") if one]


def _speculate(text: str) -> Words | str:
    return [("--speculative", "ngram"), ("--max-draft-tokens", text)] if text != "0" else [("--speculative", "off")]


def _origins(text: str) -> Words | str:
    """Return our options for a list of origins: vLLM's is JSON, llama-server's has commas."""
    try:
        return [("--cors-origin", str(one)) for one in json.loads(text)]
    except (ValueError, TypeError):
        return [("--cors-origin", one) for one in text.split(",") if one]


def _aliases(text: str) -> Words | str:
    return [("--served-model-name", one) for one in text.split(",") if one]


def _gpu_layers(text: str) -> Words | str:
    """Return our options for llama-server's number of layers on a GPU: none means the CPU."""
    return [("--device", "cpu")] if text == "0" else []


def _model_impl(text: str) -> Words | str:
    """Return our options for vLLM's --model-impl, which names what computes: its own code or transformers."""
    if text.lower() == "transformers":
        return [("--runner", "transformers")]
    return [] if text.lower() in ("auto", "vllm") else f"{text} computes no model here; --runner names what does"


def _kv_cache_bytes(text: str) -> Words | str:
    number = _count(text)[0]
    if number is None or not number.isdecimal():
        return "its value must be a number of bytes; here it is --kv-cache-gib"
    return [("--kv-cache-gib", f"{int(number) / 2**30:.6g}")]


def _entries() -> Iterator[tuple[str, Peer]]:
    for flag, names in _SAME.items():
        is_flag = flag in _FLAGS_OF_OURS or flag.startswith(("--no-", "--enable-", "--log-jobs"))
        for name in names.split():
            yield name, Peer("none" if is_flag else "one", flag=flag)
    for reason, alone, valued in _WITHOUT_EFFECT:
        yield from ((name, Peer("none", needless=reason)) for name in alone.split())
        yield from ((name, Peer("maybe", needless=reason)) for name in valued.split())
    for reason, alone, valued in _REFUSED:
        yield from ((name, Peer("none", instead=reason)) for name in alone.split())
        yield from ((name, Peer("maybe", instead=reason)) for name in valued.split())
    for name in SAMPLING:
        yield name, Peer("one")
    layers = Peer("one", words=_gpu_layers, needless="a node computes on one kind of device: --device")
    yield from ((name, layers) for name in ("-ngl", "--n-gpu-layers", "--gpu-layers"))
    for name in ("-fa", "--flash-attn"):
        yield name, Peer("maybe", needless="attention is chosen by the device")
    yield from (
        (name, Peer("one", words=_origins)) for name in ("--allowed-origins", "--cors-origins", "--cors-allow-origin")
    )
    yield "--model-impl", Peer("one", words=_model_impl, needless="--runner names what computes")
    yield "--speculate", Peer("one", words=_speculate)
    yield "--lora-adapters", Peer("one", words=_adapters)
    yield "-a", Peer("one", words=_aliases)
    yield "--speculative-config", Peer("one", words=_speculative)
    yield "--speculative-algorithm", Peer("one", words=_speculative_algorithm)
    yield "--spec-type", Peer("one", words=_speculative_algorithm)
    yield "--kv-cache-memory-bytes", Peer("one", words=_kv_cache_bytes)


PEERS: Mapping[str, Peer] = dict(_entries())
"""Options of other servers by name."""
COMMANDS: Mapping[str, str] = {
    "run": "`penstock serve MODEL` serves a model, and `penstock chat` talks to it",
    "pull": "`penstock serve MODEL` downloads a model of the hub at its first start",
    "push": "nothing is uploaded to a hub",
    "create": "`penstock serve PATH` serves a folder or a .gguf file as it is; its options replace a Modelfile",
    **dict.fromkeys(("list", "ls", "ps"), "`penstock pools list` shows the served models"),
    "show": "`penstock pools list` shows served models, and `penstock plan MODEL` what a model takes",
    "stop": "a model runs until its `penstock serve` or `penstock node` ends: Ctrl-C or SIGTERM",
    "rm": "models of the hub are in HF_HUB_CACHE, or ~/.cache/huggingface/hub; `penstock pools forget` removes a pool",
    "cp": "`penstock serve MODEL --alias NAME` gives a model another name",
    "signin": "set the variable HF_TOKEN",
    **dict.fromkeys(
        ("complete", "generate", "cli"), "`penstock submit PROMPT` prints one answer, `penstock chat` talks"
    ),
    "run-batch": "`penstock batch run INPUT OUTPUT` answers a file of requests",
    "collect-env": "`penstock support-bundle` collects what a bug report needs, `penstock doctor` checks this machine",
    **dict.fromkeys(("launch_server", "server", "start", "launch"), "`penstock serve MODEL` starts a server"),
    "help": "`penstock --help` and `penstock COMMAND --help` show help",
    "version": "`penstock --version` prints the version",
}
"""Commands of other servers, and what they are here."""


# --- values as other servers write them: each function returns ours, or None to leave the option out, and why

Converted = tuple[str | None, str]
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kmgKMG])")


def _count(text: str) -> Converted:
    """Convert a number such as 32k (32,000) or 32K (32,768)."""
    if (match := _COUNT.fullmatch(text)) is None:
        return text, ""
    number = float(match[1]) * _UNITS[match[2]]
    return (str(int(number)) if number.is_integer() else text), ""


def _max_model_len(text: str) -> Converted:
    return (None, "") if text in ("auto", "-1") else _count(text)


def _named(names: Mapping[str, str], *, reason: str = "") -> Callable[[str], Converted]:
    """Return a function that replaces names. One that becomes "" leaves the option out."""

    def convert(text: str) -> Converted:
        ours = names.get(text.lower(), text)
        return (ours, "") if ours else (None, reason)

    return convert


def _lora(text: str) -> Converted:
    """Convert an adapter in vLLM's JSON form to NAME=PATH."""
    try:
        given = json.loads(text) if text.startswith("{") else None
    except ValueError:
        return text, ""
    return (f"{given['name']}={given['path']}" if given and {"name", "path"} <= given.keys() else text), ""


def _max_logprobs(text: str) -> Converted:
    """Leave out what vLLM's users give, which is a number for each token. Ours is for a whole request."""
    is_of_token = text == "-1" or (text.isdecimal() and 0 < int(text) <= _MAX_LOGPROBS_OF_TOKEN)
    return (None, "here it counts those of a whole request") if is_of_token else (text, "")


_MAX_LOGPROBS_OF_TOKEN = 1000
_FILES = dict.fromkeys(("safetensors", "pt", "hf", "gguf", "mistral", "fastsafetensors", "runai_streamer"), "auto")
_STORED = (
    "gguf",
    "awq",
    "awq_marlin",
    "gptq",
    "gptq_marlin",
    "compressed-tensors",
    "bitsandbytes",
    "mxfp4",
    "modelopt",
)
_TOOLS = {
    **dict.fromkeys(("qwen", "qwen25", "qwen2_5", "hermes2"), "hermes"),
    **dict.fromkeys(("llama3", "llama4_json"), "llama3_json"),
    **dict.fromkeys(("qwen3_xml", "step3p5", "nemotron3"), "qwen3_coder"),
    **dict.fromkeys(("glm47", "glm4_moe"), "glm45"),
    **dict.fromkeys(("granite4",), "hermes"),
    **dict.fromkeys(("openai", "gpt-oss"), "harmony"),
    **dict.fromkeys(("llama4_pythonic",), "pythonic"),
    **dict.fromkeys(("phi4_mini_json",), "functools"),
}
_REASONING = dict.fromkeys(("deepseek_r1", "deepseek-r1", "qwen3", "deepseek", "granite"), "think")

_POLICIES = "ours are fcfs, priority, sjf, fair and round_robin; every one finds cached prefixes"

VALUES: Mapping[str, Callable[[str], Converted]] = {
    "max_model_len": _max_model_len,
    "max_num_seqs": _count,
    "max_num_batched_tokens": _count,
    "max_prefill_beside_decode": _count,
    "lora": _lora,
    "max_logprobs": _max_logprobs,
    "dtype": _named({"half": "float16", "fp16": "float16", "f16": "float16", "bf16": "bfloat16", "float": "float32"}),
    "kv_cache_dtype": _named(
        {"fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "bf16": "bfloat16", "f16": "float16", "f32": "float32", "q8_0": "int8"}
    ),
    "quantization": _named(dict.fromkeys(_STORED, ""), reason="a quantized checkpoint runs as it is stored"),
    "load_format": _named(_FILES),
    "generation_config": _named({"vllm": "none"}),
    "tool_parser": _named(_TOOLS),
    "reasoning_parser": _named(_REASONING),
    "runner": _named(
        {"generate": "", "pooling": "", "draft": ""}, reason="the model's files say which task it has; --device is ours"
    ),
    "log_level": _named({"warn": "warning", "critical": "error", "trace": "debug"}),
    "scheduling_policy": _named({"lpm": "", "dfs-weight": "", "lof": "", "random": ""}, reason=_POLICIES),
}
"""Our setting → how its value is converted."""

_VARIABLES = {
    "OLLAMA_HOST": "PENSTOCK_GATEWAY_HOST and PENSTOCK_GATEWAY_PORT",
    "OLLAMA_NUM_PARALLEL": "PENSTOCK_NODE_MAX_NUM_SEQS",
    "OLLAMA_CONTEXT_LENGTH": "PENSTOCK_NODE_MAX_MODEL_LEN",
    "OLLAMA_KV_CACHE_TYPE": "PENSTOCK_NODE_KV_CACHE_DTYPE",
    "OLLAMA_MAX_QUEUE": "PENSTOCK_NODE_MAX_OPEN_JOBS",
    "OLLAMA_ORIGINS": "PENSTOCK_GATEWAY_CORS_ORIGINS",
    "VLLM_API_KEY": "PENSTOCK_GATEWAY_API_KEY",
    "VLLM_CPU_KVCACHE_SPACE": "PENSTOCK_NODE_KV_CACHE_GIB",
    "LLAMA_API_KEY": "PENSTOCK_GATEWAY_API_KEY",
    "LLAMA_ARG_MODEL": "PENSTOCK_NODE_MODEL",
    "LLAMA_ARG_CTX_SIZE": "PENSTOCK_NODE_MAX_MODEL_LEN",
    "LLAMA_ARG_THREADS": "PENSTOCK_NODE_NUM_THREADS",
    "LLAMA_ARG_N_PARALLEL": "PENSTOCK_NODE_MAX_NUM_SEQS",
    "LLAMA_ARG_HOST": "PENSTOCK_GATEWAY_HOST",
    "LLAMA_ARG_PORT": "PENSTOCK_GATEWAY_PORT",
}
"""Variables of other servers → ours."""


def unread_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of other servers that are set although ours are not, each with our name."""
    return {
        theirs: ours
        for theirs, ours in _VARIABLES.items()
        if environment.get(theirs) and not any(name in environment for name in ours.split(" and "))
    }
