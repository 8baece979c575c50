"""The clients and load tools that `make clients` runs, and what the script of each one checks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Client:
    """A client or load tool."""

    name: str
    title: str
    """Its name on the page of results."""
    script: str
    """A file in `python/`, in `node/`, or in the folder that `folder` names."""
    covers: str
    installs_in_seconds: bool = True
    """Whether `make check-full` runs it too."""
    python: str = ""
    """The interpreter that it needs, if it does not run with ours."""
    timeout_s: float = 600.0
    folder: str = "node"
    """Where the packages of a Node client are named: in `node/` with those of others, or in a folder of its own."""
    is_scripted: bool = False
    """Whether it runs against the scripted model (`fakes/scripted_model.py`) in place of the demo model."""
    is_for_encoders: bool = False
    """Whether it runs against all-MiniLM-L6-v2 and a small random cross-encoder in place of the demo model."""
    platform: str = ""
    """The only system and processor that its package is for, if there is only one."""
    without: tuple[str, ...] = ()
    """Packages that it requires but that break it here; they are uninstalled."""
    has_dependencies: bool = True
    """Whether the packages that its packages require are installed too."""

    @property
    def is_node(self) -> bool:
        """Whether its script is JavaScript."""
        return self.script.endswith(".mjs")

    @property
    def environment(self) -> str:
        """Its requirements file and its folder under build/clients/. Most Node clients share one."""
        return self.folder if self.is_node else self.name


_ALL = "all"
"""docs/CLIENTS.md says above its table what that is."""
_OF_OPENAI = f"chat, completions, responses, models, files, batches, webhooks: {_ALL}"
_LOAD = "a short load; every request succeeds, and the report has its latencies and token counts"
_LINUX = "Linux x86_64"
_TEI = "text-embeddings-inference"
_AGENT = "sessions over chat with a scripted model: files, commands, an MCP server, an agent"
CLIENTS = (
    Client("openai", "openai (Python)", "openai_checks.py", _OF_OPENAI),
    Client(
        "openai-suite",
        "openai (Python), its own tests",
        "openai_suite_checks.py",
        "the package's tests of chat, completions, responses, embeddings and models, with strict validation of answers",
    ),
    Client("openai-node", "openai (Node)", "openai_checks.mjs", _OF_OPENAI),
    Client(
        "ai-sdk", "Vercel AI SDK (Node)", "ai_sdk_checks.mjs", f"default model class (responses) and `.chat()`: {_ALL}"
    ),
    Client(
        "anthropic", "anthropic (Python)", "anthropic_checks.py", f"messages, count_tokens and message batches: {_ALL}"
    ),
    Client(
        "anthropic-node",
        "@anthropic-ai/sdk (Node)",
        "anthropic_checks.mjs",
        "messages, whole and streamed; message batches: create, list, retrieve, results, cancel, delete; errors",
    ),
    Client("langchain", "LangChain", "langchain_checks.py", f"`ChatOpenAI` over chat and responses: {_ALL}"),
    Client(
        "langgraph",
        "LangGraph",
        "langgraph_checks.py",
        "a graph of a model and its tools over chat and responses: a forced call, the second request, a thread",
    ),
    Client("pydantic-ai", "pydantic-ai", "pydantic_ai_checks.py", f"agents over chat and responses: {_ALL}"),
    Client("openai-agents", "openai-agents", "openai_agents_checks.py", f"agents over responses and chat: {_ALL}"),
    Client("autogen", "AutoGen", "autogen_checks.py", f"model client and `AssistantAgent`: {_ALL}"),
    Client(
        "litellm",
        "litellm",
        "litellm_checks.py",
        f"its OpenAI and Anthropic providers, the bridge to responses, context fallbacks: {_ALL}",
    ),
    Client(
        "instructor",
        "instructor",
        "instructor_checks.py",
        "records in each of its ten modes for OpenAI, partial streams, errors, cancellation",
    ),
    Client(
        "codex",
        "Codex CLI",
        "codex_checks.mjs",
        "sessions over responses with a scripted model: edits, an MCP server, a search for tools, code mode, a resumed "
        "session",
        folder="codex",
        is_scripted=True,
    ),
    Client(
        "claude-code",
        "Claude Code",
        "claude_code_checks.mjs",
        "sessions over messages with a scripted model: files, commands, a resumed session, a compacted one, an MCP "
        "server, a search for tools, an agent, structured output",
        folder="agents",
        is_scripted=True,
        platform=_LINUX,
    ),
    Client(
        "opencode",
        "OpenCode",
        "opencode_checks.mjs",
        f"{_AGENT}, a resumed session",
        folder="agents",
        is_scripted=True,
        platform=_LINUX,
    ),
    Client("cline", "Cline CLI", "cline_checks.mjs", _AGENT, folder="agents", is_scripted=True, platform=_LINUX),
    Client(
        "aider",
        "aider",
        "aider_checks.py",
        "sessions over chat with a scripted model: edits by blocks, a block that does not fit, whole files",
        installs_in_seconds=False,
        is_scripted=True,
    ),
    Client(
        "openai-embeddings",
        "openai (Python), embeddings",
        "openai_embeddings_checks.py",
        "embeddings of texts and of token ids, as base64 and as numbers, fewer dimensions, a batch file, errors",
        is_for_encoders=True,
    ),
    Client(
        "cohere",
        "cohere",
        "cohere_checks.py",
        "rerank of `ClientV2` and `Client`, whole and asynchronous, by a cross-encoder and by an embedder; errors",
        is_for_encoders=True,
    ),
    Client(
        "huggingface-hub",
        "huggingface_hub",
        "huggingface_hub_checks.py",
        "`InferenceClient`: feature extraction with all its options, similarity of sentences, labels, health",
        is_for_encoders=True,
    ),
    Client(
        "langchain-huggingface",
        "LangChain for Hugging Face",
        "langchain_huggingface_checks.py",
        "`HuggingFaceEndpointEmbeddings` with clients that have the URL; a store of vectors",
        is_for_encoders=True,
    ),
    Client(
        "llama-index",
        "LlamaIndex",
        "llama_index_checks.py",
        f"its classes for {_TEI}, embeddings and reranker, and for servers like OpenAI's; an index of vectors",
        is_for_encoders=True,
    ),
    Client(
        "haystack",
        "Haystack",
        "haystack_checks.py",
        f"embedders and ranker for {_TEI}, embedders for OpenAI, a pipeline of both",
        is_for_encoders=True,
    ),
    Client(
        "litellm-encoders",
        "litellm, encoders",
        "litellm_encoders_checks.py",
        "embeddings and rerank by its providers OpenAI, vLLM, Infinity, Hugging Face, Cohere and Jina",
        is_for_encoders=True,
    ),
    Client(
        "open-webui",
        "Open WebUI, retrieval",
        "open_webui_checks.py",
        "its functions that embed by an OpenAI URL, and its external reranker, without the application around them",
        is_for_encoders=True,
        installs_in_seconds=False,
        has_dependencies=False,
    ),
    Client(
        "http",
        "plain HTTP",
        "http_checks.py",
        "lines of events, event ids, HTTP/1.0, HEAD, request ids, limits, refusals, JSON schemas",
    ),
    Client("guidellm", "guidellm", "guidellm_checks.py", _LOAD, installs_in_seconds=False),
    Client("aiperf", "aiperf", "aiperf_checks.py", _LOAD, installs_in_seconds=False),
    Client(
        "inference-perf",
        "inference-perf",
        "inference_perf_checks.py",
        _LOAD,
        installs_in_seconds=False,
        python="python3.12",
    ),
    Client(
        "lm-eval",
        "lm-evaluation-harness",
        "lm_eval_checks.py",
        "tasks from local files over completions: choices by log-probabilities, and greedy answers",
        installs_in_seconds=False,
    ),
    Client(
        "vllm-bench",
        "`vllm bench serve`",
        "vllm_bench_checks.py",
        "a short load by each of its backends that needs neither images nor audio",
        installs_in_seconds=False,
        # Their builds for CUDA do not match a torch for CPUs.
        without=("torchvision", "torchaudio", "torchcodec"),
        timeout_s=1200.0,
    ),
)
BY_NAME = {client.name: client for client in CLIENTS}
