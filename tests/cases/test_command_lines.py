"""Lines of the documents of vLLM, SGLang, llama-server, TGI and Ollama: `penstock` takes them or says its own name."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from fakes.command import run_command
from fakes.served_model import served
from typer.main import get_command

from penstock.cli.command_line import usage_line
from penstock.cli.main import ENTRIES, app
from penstock.cli.peers import COMMANDS, PEERS, SAMPLING, unread_variables
from penstock.contract.errors import ConfigError
from penstock.gateway.settings import GatewaySettings
from penstock.gpu_node.settings import NodeSettings


@dataclass(frozen=True)
class Parsed:
    """What a command line sets, as the node and the gateway read it."""

    model: str
    node: NodeSettings
    gateway: GatewaySettings
    log_level: str | None

    def has(self, name: str, value: object) -> bool:
        """Return whether a setting of either part has this value."""
        if name in ("model", "log_level"):
            return bool(getattr(self, name) == value)
        parts = [part for part in (self.node, self.gateway) if name in type(part).model_fields]
        return bool(parts) and all(getattr(part, name) == value for part in parts)


def parsed(line: str, command: str = "serve") -> Parsed:
    """Parse the words after `penstock serve`, as the command does before it starts anything."""
    root: Any = get_command(app)
    with root.make_context("penstock", ["serve"]) as above:
        given = root.get_command(above, command).make_context(command, shlex.split(line), parent=above).params
    node, gateway = (
        {name: given.get(name) for name in kind.model_fields if name not in ("model", "redis_url")}
        for kind in (NodeSettings, GatewaySettings)
    )
    model = given["model"] or "demo"
    settings = NodeSettings.load(model=model, redis_url="unix://x", **node)
    return Parsed(model, settings, GatewaySettings.load(**gateway), given["log_level"])


QWEN, LLAMA = "Qwen/Qwen3-0.6B", "meta-llama/Llama-3.1-8B-Instruct"
TAKEN: dict[str, dict[str, object]] = {
    # vLLM: docs of `vllm serve`, quick start, tool calling, reasoning, LoRA, engine arguments, recipes
    "meta-llama/Llama-2-7b-hf --port 8100": {"port": 8100},
    "NousResearch/Meta-Llama-3-8B-Instruct --dtype auto --api-key token-abc123": {"api_key": "token-abc123"},
    f"{LLAMA} --dtype auto --max-model-len 4096 --trust-remote-code": {"max_model_len": 4096},
    f"{LLAMA} --max-model-len 32k": {"max_model_len": 32_000},
    f"{LLAMA} --max-model-len 32K --max-num-batched-tokens 1k": {
        "max_model_len": 32_768,
        "max_num_batched_tokens": 1000,
    },
    f"{LLAMA} --max-model-len auto": {"max_model_len": None},
    "facebook/opt-13b --tensor-parallel-size 4": {"tensor_parallel_size": 4},
    f"{LLAMA} --data-parallel-size 4 --tensor-parallel-size 2": {"replicas": "4", "tensor_parallel_size": 2},
    "gpt2 --tensor-parallel-size 4 --pipeline-parallel-size 2 --distributed-executor-backend mp": {
        "pipeline_parallel_size": 2
    },
    "mistralai/Mistral-7B-v0.1 --gpu-memory-utilization 0.95 --max-model-len 8192": {"gpu_memory_utilization": 0.95},
    f"{QWEN} --max-num-seqs 256 --max-num-batched-tokens 8192 --enable-chunked-prefill": {"max_num_seqs": 256},
    "TheBloke/Llama-2-13B-AWQ --quantization awq": {"quantization": "auto"},
    "./tinyllama.gguf --load-format gguf --quantization gguf": {"load_format": "auto", "quantization": "auto"},
    f"{LLAMA} --kv-cache-dtype fp8 --calculate-kv-scales": {"kv_cache_dtype": "fp8"},
    f"{LLAMA} --kv-cache-dtype fp8_e4m3 --enable-prefix-caching": {"kv_cache_dtype": "fp8"},
    f"{QWEN} --max-num-seqs 8 --mamba-cache-mode align --mamba-ssm-cache-dtype float32": {"max_num_seqs": 8},
    f"{QWEN} --max-num-seqs 8 --mamba-scheduler-strategy extra_buffer --ctx-checkpoints 32": {"max_num_seqs": 8},
    "meta-llama/Llama-2-7b-hf --enable-lora --lora-modules sql-lora=/l/sql": {"lora": ("sql-lora=/l/sql",)},
    """m --enable-lora --lora-modules a=/a '{"name": "b", "path": "/b", "base_model": "m"}' --max-lora-rank 64""": {
        "lora": ("a=/a", "b=/b"),
        "max_lora_rank": 64,
    },
    "m --enable-lora --max-loras 4 --max-cpu-loras 8 --fully-sharded-loras": {"max_loras": 4},
    f"{LLAMA} --enable-auto-tool-choice --tool-call-parser llama3_json": {"tool_parser": "llama3_json"},
    f"{QWEN} --enable-auto-tool-choice --tool-call-parser=hermes --chat-template tool.jinja": {
        "tool_parser": "hermes",
        "chat_template": "tool.jinja",
    },
    f"{QWEN} --reasoning-parser qwen3": {"reasoning_parser": "think"},
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B --enable-reasoning --reasoning-parser deepseek_r1": {
        "reasoning_parser": "think"
    },
    """Qwen/Qwen3-4B --port 8000 --speculative_config '{"method": "ngram", "num_speculative_tokens": 5}'""": {
        "speculative": "ngram",
        "max_draft_tokens": 5,
    },
    "gradientai/Llama-3-8B --swap-space 16 --disable-log-requests --tensor_parallel_size 1 --max_model_len 65000": {
        "swap_space_gib": 16,
        "log_jobs": False,
        "max_model_len": 65_000,
    },
    "--model m --served-model-name llama3-8b-lora --max-model-len=4096 --trust-remote-code": {
        "model": "m",
        "aliases": ("llama3-8b-lora",),
    },
    "m --served-model-name one two --host 0.0.0.0 --uvicorn-log-level warning": {
        "aliases": ("one", "two"),
        "host": "0.0.0.0",
        "log_level": "warning",
    },
    "Qwen/Qwen3-1.7B --dtype bfloat16 --seed 0 --no-enable-prefix-caching --block-size 16 --enforce-eager": {
        "enable_prefix_caching": False,
        "enforce_eager": True,
    },
    f"{LLAMA} --cpu-offload-gb 10 --dtype half": {"cpu_offload_gib": 10, "dtype": "float16"},
    f"{LLAMA} --generation-config vllm --max-logprobs 20": {"generation_config": "none", "max_logprobs": 1 << 18},
    f"{LLAMA} --revision main --max-seq-len-to-capture 8192 -O3 --disable-log-stats": {"revision": "main"},
    "intfloat/e5-mistral-7b-instruct --runner pooling --trust-remote-code": {"runner": "auto"},
    "m -tp 2 -pp 1 --device cuda --num-gpu-blocks-override 512": {"runner": "gpu", "num_kv_blocks": 512},
    """m --allowed-origins '["https://a.example"]' --allow-credentials""": {"cors_origins": ("https://a.example",)},
    "m --kv-cache-memory-bytes 2G --scheduling-policy priority": {"kv_cache_gib": 2, "scheduling_policy": "priority"},
    # SGLang: docs of its server arguments
    "--model-path meta-llama/Meta-Llama-3-8B --tp 2 --mem-fraction-static 0.7": {
        "tensor_parallel_size": 2,
        "gpu_memory_utilization": 0.7,
    },
    "--model-path m --port 30000 --host 127.0.0.1 --context-length 16384 --page-size 16 --disable-radix-cache": {
        "max_model_len": 16_384,
        "enable_prefix_caching": False,
    },
    "--model-path m --max-running-requests 8 --chunked-prefill-size 4096 --disable-cuda-graph --log-level warning": {
        "max_num_seqs": 8,
        "enforce_eager": True,
    },
    "--model-path m --lora-paths a=/a b=/b --attention-backend triton --random-seed 1": {"lora": ("a=/a", "b=/b")},
    # llama-server: its README and guides
    "-m models/7B/ggml-model.gguf -c 2048": {"model": "models/7B/ggml-model.gguf", "max_model_len": 2048},
    "-m model.gguf --host 0.0.0.0 --port 8080 --ctx-size 4096 -t 4 --parallel 1 --metrics": {
        "max_model_len": 4096,
        "num_threads": 4,
        "max_num_seqs": 1,
    },
    "-hf bartowski/Llama-3.2-3B-Instruct-GGUF:Q8_0": {"model": "bartowski/Llama-3.2-3B-Instruct-GGUF:Q8_0"},
    "-hf ggml-org/gpt-oss-20b-GGUF -c 0 -fa --jinja": {"model": "ggml-org/gpt-oss-20b-GGUF", "max_model_len": None},
    "--hf-repo ggml-org/m-GGUF --hf-file m-q4_0.gguf -ngl 99 -fa on -c 8192": {
        "model": "ggml-org/m-GGUF:m-q4_0.gguf",
        "max_model_len": 8192,
    },
    "-m m.gguf -ngl 0 --no-mmap --mlock --no-webui -b 2048 -ub 512 -cb": {
        "runner": "cpu",
        "max_num_batched_tokens": 2048,
    },
    "-m m.gguf --jinja --temp 0.7 --top-p 0.95 --top-k 20 --min-p 0 --repeat-penalty 1.05": {
        "generation_config": '{"temperature": 0.7, "top_p": 0.95, "top_k": 20, "min_p": 0, "repetition_penalty": 1.05}'
    },
    "-m m.gguf --alias small --api-key one,two --threads -1 --chat-template-file t.jinja": {
        "aliases": ("small",),
        "api_key": "one,two",
        "num_threads": None,
    },
    "-m m.gguf -ctk q8_0 -ctv q8_0 --n-gpu-layers 33 --embedding --no-context-shift": {"kv_cache_dtype": "int8"},
    "--model m --model-impl transformers": {"runner": "transformers"},
    "--model m --model-impl auto": {"runner": "auto"},
    # TGI: docs of its launcher, and its guides
    "--model-id HuggingFaceH4/zephyr-7b-beta --num-shard 2 --port 8080": {
        "model": "HuggingFaceH4/zephyr-7b-beta",
        "tensor_parallel_size": 2,
        "port": 8080,
    },
    "--model-id m --quantize bitsandbytes --max-batch-prefill-tokens 4096 --hostname 0.0.0.0 -p 80 --sharded true": {
        "max_num_batched_tokens": 4096,
        "host": "0.0.0.0",
        "port": 80,
    },
    "--model-id m --speculate 3 --cuda-memory-fraction 0.8 --max-concurrent-requests 9 --cors-allow-origin https://a": {
        "speculative": "ngram",
        "max_draft_tokens": 3,
        "gpu_memory_utilization": 0.8,
        "max_open_jobs": 9,
        "cors_origins": ("https://a",),
    },
    "--model-id m --lora-adapters a=/a,b=/b --max-best-of 2 --max-stop-sequences 4 --json-output": {
        "lora": ("a=/a", "b=/b")
    },
    # our own names, in one command for both parts
    "m --drain-s 20 --require-keys --max-open-jobs 5 --cors-origin https://a.example": {
        "drain_s": 20,
        "require_keys": True,
        "max_open_jobs": 5,
    },
}
REFUSED = {
    "m --ssl-keyfile k.pem --ssl-certfile c.pem": "TLS ends at a proxy before the gateway, which then needs ",
    "m --root-path /api": "no option --root-path: a proxy before the gateway adds a path",
    "m --download-dir /models": "no option --download-dir: set the variable HF_HUB_CACHE",
    "./m.gguf --tokenizer TinyLlama/TinyLlama-1.1B": "no option --tokenizer: it is in the GGUF file, or in the model's",
    """m --speculative-config '{"model": "d", "num_speculative_tokens": 5}'""": "no draft model: --speculative ngram",
    "-m m.gguf -md draft.gguf": "no option -md: speculation has no draft model: --speculative ngram",
    "-m m.gguf --mmproj mm.gguf": "no option --mmproj: images, audio and video are not served",
    """m --hf-overrides '{"architectures": ["X"]}'""": "no option --hf-overrides: change config.json in the model's",
    "--model-path m --tp 4 --nnodes 2 --node-rank 0 --dist-init-addr h:1": "--remote-ranks and `penstock rank`",
    "-m m.gguf --api-key-file keys": "set PENSTOCK_GATEWAY_API_KEY_FILE to the file",
    "m --config serve.yaml": "each setting is also a variable, PENSTOCK_NODE_<NAME>",
    "--model-id m --max-input-tokens 1024 --max-total-tokens 2048": (
        "--max-input-tokens (prompt and answer share --max-model-len), --max-total-tokens (a request's limit is "
    ),
    "m --max-num-seq 3 --root-path /x --frobnicate": (
        "no options --max-num-seq (did you mean --max-num-seqs?), "
        "--root-path (a proxy before the gateway adds a path), --frobnicate"
    ),
}


@pytest.mark.parametrize(("line", "expected"), TAKEN.items(), ids=TAKEN)
def test_a_documented_line_is_taken(line: str, expected: dict[str, object]) -> None:
    found = parsed(line)
    assert {name for name, value in expected.items() if not found.has(name, value)} == set()


@pytest.mark.parametrize(("line", "said"), REFUSED.items(), ids=REFUSED)
def test_a_documented_line_is_refused_with_our_name(line: str, said: str) -> None:
    with pytest.raises(typer.TyperException) as refused:
        parsed(line)
    assert said in usage_line(refused.value)


def test_a_format_of_calls_that_we_lack_is_refused_with_ours() -> None:
    with pytest.raises(ConfigError, match="'xlam' is not one of none, hermes, "):
        parsed("m --tool-call-parser xlam")


def test_what_has_no_effect_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    parsed("m --trust-remote-code --enable-lora -ngl 99 --jinja -fa on --quantization gptq --schedule-policy lpm")
    said = capsys.readouterr().err
    assert said.startswith(
        "penstock: without effect: --trust-remote-code (code that comes with a checkpoint never runs), "
    )
    assert said.count("\n") == 1
    assert "ours are fcfs" in said
    assert all(name in said for name in ("--enable-lora", "-ngl", "--jinja", "-fa", "--quantization gptq"))


def test_every_name_of_another_server_leads_to_an_option_of_ours() -> None:
    root: Any = get_command(app)
    with root.make_context("penstock", ["serve"]) as above:
        params = root.get_command(above, "serve").params
    ours = {name for one in params for name in (*one.opts, *one.secondary_opts)} | {"MODEL"}
    assert {peer.flag for peer in PEERS.values() if peer.flag} <= ours
    assert not [
        name
        for name, peer in PEERS.items()
        if not (peer.flag or peer.words or peer.needless or peer.instead or name in SAMPLING)
    ]
    assert not PEERS.keys() & ours, "the entry of an option that serve has itself is never read"


@pytest.mark.parametrize(
    ("command", "line", "said"),
    [
        ("node", "m --port 8000", "no option --port: --port is an option of `penstock gateway`"),
        ("gateway", "-c 4096", "no option -c: --max-model-len is an option of `penstock node`"),
        ("jobs list", "--limt 3 --stat x", "no options --limt (did you mean --limit?), --stat (did you mean --state?)"),
        ("serve", "m --gpu-memory-utilization 0.9 --device cpu", "--gpu-memory-utilization: needs a GPU; on the CPU, "),
        ("serve", "m --cpu-offload-gb 4 --device cpu", "--cpu-offload-gib: needs a GPU; on the CPU, all weights "),
        ("serve", "m --port 0 --replicas 2 --num-threads 4096", "num_threads 4096: each of 2 replicas has "),
        ("serve", "m --speculative-config ngram", "no option --speculative-config: its value must be JSON"),
        ("serve", "m --chat-template chatml", "--chat-template: cannot read chatml (No such file or directory); "),
        ("serve", "m --temp warm", "no option --temp: it needs a number"),
        ("serve", "m --api-key pk-0123456789abcdef-x", "--api-key: has a key of `penstock keys add`"),
    ],
)
def test_a_wrong_line_is_one_sentence(command: str, line: str, said: str) -> None:
    done = run_command(*command.split(), *shlex.split(line))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert said in done.stderr


ALL_WRONG = {
    "serve /nope --port x --dtype float3 --max-num-seqs 0 --frob 3 --lora a=/none --root-path /v --temp": (
        *("--frob", "--root-path", "--temp", "--port: must be an integer", "--dtype: 'float3' is not one of"),
        *("--max-num-seqs: must be at least 1", "adapter a: there is no folder /none", "there is no folder /nope"),
    ),
    "node --dtype x --replicas y --log-level loud": ("MODEL is missing", "--dtype: ", "--replicas: ", "--log-level: "),
    "node m.gguf --lease-ms 1 --max-num-seqs 0 --redis-url unix://x": (
        *("--lease-ms: must be at least 3000", "--max-num-seqs: must be at least 1", "there is no file m.gguf"),
    ),
    "gateway --model m --port 99999 --max-sockets -1 --drain-s": (
        *("--model: a gateway has no model", "--drain-s needs a value", "--port: ", "--max-sockets: "),
    ),
    "submit hi --temperature warm --top-p 7 --frob": ("--frob", "--temperature: ", "--top-p: "),
    "batch run a b --in-flight x --frob": ("--frob", "--in-flight: "),
    "keys add t --max-open-jobs x --weight y --frob": ("--max-open-jobs: ", "--weight: ", "--frob"),
    "keys add t --max-open-jobs -1 --weight 5000 --redis-url unix://x": ("--max-open-jobs: ", "--weight: "),
    "tenants delete --dry --redis": ("--dry", "--redis"),
    "jobs list --limit 0 --since x --tenannt x": ("--limit: ", "--tenannt"),
    "plan m --tp 2 --memory x": ("--tp; did you mean --tensor-parallel-size?", "--memory: "),
}


@pytest.mark.parametrize(("line", "said"), ALL_WRONG.items(), ids=ALL_WRONG)
def test_all_that_is_wrong_in_a_line_is_said_at_once(line: str, said: tuple[str, ...]) -> None:
    done = run_command(*shlex.split(line))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert [one for one in said if one not in done.stderr] == [], done.stderr


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("run llama3.2", "no command 'run': `penstock serve MODEL` serves a model, and `penstock chat` talks to it"),
        ("pull gemma3:1b", "no command 'pull': `penstock serve MODEL` downloads a model"),
        ("create mario -f ./Modelfile", "no command 'create': `penstock serve PATH` serves a folder or a .gguf file"),
        ("list", "`penstock pools list` shows the served models"),
        ("ps", "`penstock pools list` shows the served models"),
        ("rm llama3.2", "HF_HUB_CACHE"),
        ("complete --quick hi", "`penstock submit PROMPT`"),
        ("run-batch -i in.jsonl -o out.jsonl --model m", "`penstock batch run INPUT OUTPUT`"),
        ("launch_server --model-path m", "`penstock serve MODEL` starts a server"),
        ("--model-id m --num-shard 2", "penstock serve --model-id …"),
        ("-m model.gguf -c 2048", "penstock serve -m …"),
        ("-hf ggml-org/gemma-3-1b-it-GGUF", "penstock serve -hf …"),
        ("--model-path m --port 30000", "penstock serve --model-path …"),
    ],
)
def test_a_command_of_another_server_leads_to_ours(line: str, said: str) -> None:
    done = run_command(*shlex.split(line))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert said in done.stderr


def test_the_commands_of_others_are_none_of_ours() -> None:
    assert not COMMANDS.keys() & ENTRIES.keys(), "such an entry is never read"


def test_help_is_short_and_names_where_the_rest_is() -> None:
    short, full = run_command("serve", "--help").stdout, run_command("serve", "--help-all").stdout
    assert "--help-all" in short
    assert len(short.splitlines()) < 160 < 300 < len(full.splitlines())
    assert "--lease-ms" not in short
    assert "--lease-ms" in full and "--max-sockets" in full


def test_variables_of_other_servers_are_named_with_ours() -> None:
    environment = {"OLLAMA_NUM_PARALLEL": "4", "VLLM_API_KEY": "secret", "PENSTOCK_NODE_MAX_NUM_SEQS": "4"}
    assert unread_variables(environment) == {"VLLM_API_KEY": "PENSTOCK_GATEWAY_API_KEY"}


KEY = "token-abc123-of-an-operator"


@pytest.fixture(scope="module")
def keyed(demo_file: Path) -> Iterator[httpx.Client]:
    """A client of a server with a key of its operator, and with a template that ignores the chat."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_GATEWAY_API_KEY", f"{KEY} another-key-of-the-operator")
        with (
            served(demo_file, chat_template="{{ 'Name a river.' }}") as url,
            httpx.Client(base_url=url, timeout=60) as client,
        ):
            yield client


@pytest.mark.parametrize(
    ("header", "value", "status"),
    [
        ("Authorization", f"Bearer {KEY}", 200),
        ("Authorization", "Bearer another-key-of-the-operator", 200),
        ("x-api-key", KEY, 200),
        ("Authorization", f"Bearer {KEY}x", 401),
        ("Authorization", "Bearer pk-0123456789abcdef-x", 401),
        ("X-Nothing", "x", 401),
    ],
)
def test_requests_need_a_given_key(keyed: httpx.Client, header: str, value: str, status: int) -> None:
    answer = keyed.get("/v1/models", headers={header: value})
    assert answer.status_code == status
    assert KEY not in answer.text


def test_a_given_template_writes_the_chats(keyed: httpx.Client, demo_file: Path) -> None:
    def prompt_tokens(text: str) -> int:
        body = {
            "model": demo_file.stem.replace(".", "-"),
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 1,
        }
        answer = keyed.post("/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=60)
        return int(answer.json()["usage"]["prompt_tokens"])

    assert prompt_tokens("Hello!") == prompt_tokens("A much longer question, of which the template takes nothing.") < 8
