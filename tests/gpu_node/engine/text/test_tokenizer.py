"""The tokenizer against transformers, and its byte table against whole decoding."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fakes.sentencepiece import write_sentencepiece_tokenizer
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from penstock.contract.errors import ConfigError, PromptTooLongError, RequestError, TooCostlyError
from penstock.gpu_node.engine.text.chat import ChatTemplate
from penstock.gpu_node.engine.text.tokenizer import Tokenizer

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "🌊"}, {"role": "user", "content": "?"}]


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer(tiny_model)


def test_encodes_as_transformers_does(tokenizer: Tokenizer, tiny_model: Path) -> None:
    theirs: Any = AutoTokenizer.from_pretrained(tiny_model)
    for text in ("the gate", "水門 🌊", "<|im_start|>user", ""):
        assert tokenizer.encode(text) == theirs(text).input_ids
    want = theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert tokenizer.encode_chat(CHAT) == want


def test_answers_tasks_as_transformers_does(model_copy: Path) -> None:
    backend: Any = Backend.from_file(str(model_copy / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    backend.save(str(model_copy / "tokenizer.json"))
    ours, theirs = Tokenizer(model_copy), AutoTokenizer.from_pretrained(model_copy)
    for text in ("the gate", "水門 🌊", "<|im_start|>user", ""):
        ids = theirs(text).input_ids
        assert ours.encode(text, framed=False) == theirs(text, add_special_tokens=False).input_ids
        assert ours.names_of(ids) == theirs.convert_ids_to_tokens(ids)
        assert ours.text_of(ids) == theirs.decode(ids)
        assert ours.text_of(ids) == "<|endoftext|>" + text
    closed = theirs.apply_chat_template(CHAT, add_generation_prompt=False, return_dict=False)
    assert ours.encode_chat(CHAT, None, '{"add_generation_prompt": false}') == closed
    assert ours.encode_chat(CHAT, None, '{"add_generation_prompt": false}', framed=True) == [0, *closed]


def test_text_of_an_unknown_token_is_refused_by_name(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match=f"token id {10**6} is not in the model's vocabulary of"):
        tokenizer.text_of([1, 10**6])


@pytest.mark.model
def test_encodes_as_transformers_does_with_the_demo_models_tokenizer(demo_model: Path) -> None:
    ours, theirs = Tokenizer(demo_model), AutoTokenizer.from_pretrained(demo_model)
    rng = random.Random(0)
    texts = ["", " ", "1234567", "<|im_start|>user\n", "水門 🌊\r\n\tx", "a<|endoftext|>b"]
    texts += ["".join(chr(rng.randrange(1, 0x3000)) for _ in range(40)) for _ in range(50)]
    for text in texts:
        assert ours.encode(text) == theirs(text).input_ids
        chat = [{"role": "user", "content": text}, {"role": "assistant", "content": text[::-1]}]
        for messages in (chat, [{"role": "system", "content": text}, *chat]):
            want = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            assert ours.encode_chat(messages) == want
    assert ours.eos_token_ids == {theirs.eos_token_id}


def _edit(folder: Path, name: str, **changes: Any) -> None:
    path = folder / name
    config = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({key: value for key, value in (config | changes).items() if value is not None}))


ADDED = {"content": "the gate", "lstrip": False, "normalized": False, "rstrip": True, "single_word": False}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("tokenizer_config.json", {"bos_token": "<new>", "eos_token": "the"}),
        ("tokenizer_config.json", {"bos_token": {"__type": "AddedToken", **ADDED}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"384": ADDED | {"special": False}}}),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"384": ADDED | {"special": True}}, "eos_token": "the gate"},
        ),
        ("tokenizer_config.json", {"additional_special_tokens": ["gate", "<unseen>"], "extra_special_tokens": None}),
        ("tokenizer_config.json", {"extra_special_tokens": {"image_token": "<image>"}}),
        ("tokenizer_config.json", {"add_bos_token": True, "bos_token": "<|im_start|>"}),
        ("tokenizer_config.json", {"split_special_tokens": True}),
        ("special_tokens_map.json", {"eos_token": "gate", "pad_token": ADDED}),
    ],
)
def test_tokens_of_the_configs_are_read_as_transformers_reads_them(
    name: str, changes: dict[str, Any], model_copy: Path
) -> None:
    _edit(model_copy, name, **changes)
    ours, theirs = Tokenizer(model_copy), AutoTokenizer.from_pretrained(model_copy)
    for text in ("the gate opens", "the gate  <new><unseen> x<image>", "<|im_end|>the<|im_start|>gate"):
        tokens = ours.encode(text)
        assert tokens == theirs(text).input_ids
        assert ours.decode(tokens) == theirs.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
    # The chat template ends turns with <|im_end|>, token 2, whatever the tokenizer says.
    assert ours.eos_token_ids == {theirs.eos_token_id, 2}


def test_tokens_of_a_post_processor_are_added_to_a_prompt_and_not_to_a_chat(model_copy: Path) -> None:
    backend: Any = Backend.from_file(str(model_copy / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    backend.save(str(model_copy / "tokenizer.json"))
    ours, theirs = Tokenizer(model_copy), AutoTokenizer.from_pretrained(model_copy)
    assert ours.encode("the gate") == theirs("the gate").input_ids
    assert ours.encode("the gate")[0] == 0
    assert 0 not in ours.encode_chat(CHAT)


TEMPLATES = {
    "variables": "{{ bos_token }}|{{ eos_token }}|{{ image_token }}|{{ messages[0].content }}",
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}<b>",
    "loop controls": "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}{{ m.role }}{% endfor %}",
    "blocks": "{% for m in messages %}\n  {% if m.role == 'user' %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}\n\n",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "tools": "{% if tools is none %}no tools{% endif %}{{ add_generation_prompt }}{{ tools is defined }}",
    "dates": "{{ strftime_now('%Y') | length }}",
}


@pytest.mark.parametrize("feature", TEMPLATES)
def test_templates_render_as_in_transformers(feature: str, model_copy: Path) -> None:
    (model_copy / "chat_template.jinja").write_text(TEMPLATES[feature])
    _edit(model_copy, "tokenizer_config.json", bos_token="<s>", image_token="<image>")
    theirs: Any = AutoTokenizer.from_pretrained(model_copy)
    want = theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert Tokenizer(model_copy).encode_chat(CHAT) == want


def test_the_default_one_of_many_templates_is_used(model_copy: Path) -> None:
    (model_copy / "chat_template.jinja").unlink()
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "the gate"}]
    _edit(model_copy, "tokenizer_config.json", chat_template=named)
    tokenizer = Tokenizer(model_copy)
    assert tokenizer.decode(tokenizer.encode_chat(CHAT)) == "the gate"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('only users may speak') }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages[9].content.x }}",
    ],
)
def test_error_of_a_template_is_a_request_error(template: str, model_copy: Path) -> None:
    (model_copy / "chat_template.jinja").write_text(template)
    with pytest.raises(RequestError, match="refuses these messages"):
        Tokenizer(model_copy).encode_chat(CHAT)


def test_bug_before_rendering_is_not_reported_as_a_refusal_by_the_template(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug of ours is none of the request's faults."""

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("penstock.gpu_node.engine.text.tokenizer.template_messages", broken)
    with pytest.raises(ZeroDivisionError):
        tokenizer.encode_chat(CHAT)


def test_template_that_does_not_compile_is_a_config_error(model_copy: Path) -> None:
    (model_copy / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ConfigError, match="template"):
        Tokenizer(model_copy)


def test_incomplete_tokenizer_files_are_exported_by_transformers_once(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A class of its own builds normalizer and decoder itself; vocabulary and merges are no tokenizer.json."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    of_llama, of_gpt2 = tmp_path / "llama", tmp_path / "gpt2"
    write_sentencepiece_tokenizer(of_llama)
    _edit(of_llama, "tokenizer_config.json", tokenizer_class="LlamaTokenizer", unk_token="<unk>")
    of_gpt2.mkdir()
    model = json.loads((tiny_model / "tokenizer.json").read_text())["model"]
    (of_gpt2 / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [" ".join(pair) for pair in model["merges"]]
    (of_gpt2 / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    _edit(of_gpt2, "tokenizer_config.json", tokenizer_class="GPT2Tokenizer", eos_token="<|im_end|>")
    for folder in (of_llama, of_gpt2):
        ours, theirs = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
        for text in ("the gate", "gates", " the <|im_end|>"):
            assert ours.encode(text) == theirs(text).input_ids
        assert ours.eos_token_ids == {theirs.eos_token_id}
        assert "transformers" not in _modules_after(f"Tokenizer(Path({str(folder)!r}))")


def _modules_after(statement: str) -> set[str]:
    code = (
        "import sys; from pathlib import Path; from penstock.gpu_node.engine.text.tokenizer import Tokenizer;"
        f"{statement}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_saved_truncation_and_padding_do_not_apply_to_prompts(tiny_model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "copy"))
    backend: Any = Backend.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    backend.save(str(folder / "tokenizer.json"))
    ours, theirs = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in ("a", "the gate opens by pressure " * 9):
        assert ours.encode(text) == theirs(text, truncation=False, padding=False).input_ids
    assert ours.encode_chat(CHAT) == Tokenizer(tiny_model).encode_chat(CHAT)


def test_developer_messages_render_as_system_messages(tokenizer: Tokenizer) -> None:
    by_role = [tokenizer.encode_chat([{"role": role, "content": "x"}]) for role in ("developer", "system", "user")]
    assert by_role[0] == by_role[1] != by_role[2]


@given(text=st.text())
def test_any_text_round_trips(tokenizer: Tokenizer, text: str) -> None:
    special = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    if not any(name in text for name in special):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_any_tokens_decode_as_transformers_decodes_them(tokenizer: Tokenizer, tiny_model: Path) -> None:
    theirs: Any = AutoTokenizer.from_pretrained(tiny_model)
    rng = random.Random(0)
    for _ in range(200):
        token_ids = [rng.randrange(len(theirs)) for _ in range(rng.randrange(12))]
        assert tokenizer.decode(token_ids) == theirs.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


@pytest.mark.model
def test_the_demo_models_tokens_decode_as_transformers_decodes_them(demo_model: Path) -> None:
    ours, theirs = Tokenizer(demo_model), AutoTokenizer.from_pretrained(demo_model)
    rng = random.Random(0)
    for _ in range(200):
        token_ids = [rng.randrange(len(theirs)) for _ in range(20)]
        assert ours.decode(token_ids) == theirs.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


def test_byte_fallback_tokenizers_decode_as_transformers_decodes_them(tmp_path: Path) -> None:
    write_sentencepiece_tokenizer(tmp_path)
    ours, theirs = Tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    token_ids = [1, 2, 3, *(4 + byte for byte in " 🌊".encode()), 2]
    assert ours.decode(token_ids) == theirs.decode(token_ids) == "the gates 🌊 gate"


def test_a_model_without_a_template_refuses_messages(tmp_path: Path) -> None:
    write_sentencepiece_tokenizer(tmp_path)
    with pytest.raises(RequestError) as refusal:
        Tokenizer(tmp_path).encode_chat(CHAT)
    assert refusal.value.param == "messages"


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        Tokenizer(tmp_path)


def test_ids_past_the_tokenizer_have_no_text(tiny_model: Path) -> None:
    padded = Tokenizer(tiny_model, vocab_size=1000)
    assert padded.decode([999, *padded.encode("the"), 500]) == "the"


@pytest.mark.parametrize("num_rows", [262, 386])
@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_a_tokenizer_for_grammars_has_no_token_without_a_row(
    tiny_model: Path, tmp_path: Path, kind: str, num_rows: int
) -> None:
    folder = tmp_path / "tokenizer"
    if kind == "bytes":
        shutil.copytree(tiny_model, folder)
    else:
        write_sentencepiece_tokenizer(folder)
    plain = Tokenizer(folder)
    backend = Backend.from_str(plain.to_json())
    backend.add_special_tokens([f"<extra_{i}>" for i in range(4)])
    backend.save(str(folder / "tokenizer.json"))
    known = backend.get_vocab(with_added_tokens=True)
    kept = Backend.from_str(Tokenizer(folder).to_json(num_rows)).get_vocab(with_added_tokens=True)
    assert kept == {token: token_id for token, token_id in known.items() if token_id < num_rows}


def test_a_decoder_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    backend: Any = Backend(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    backend.decoder = decoders.WordPiece()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="WordPiece"):
        Tokenizer(tmp_path)


@given(text=st.text(max_size=200))
@example(text="<|im_start|>")
def test_no_text_has_fewer_tokens_than_its_bytes_allow(tokenizer: Tokenizer, text: str) -> None:
    assert len(text.encode()) <= tokenizer.max_token_bytes * len(tokenizer.encode(text))


@given(text=st.text(max_size=300), max_tokens=st.integers(1, 40))
@example(text="x" * 300, max_tokens=8)
def test_a_chat_is_refused_unencoded_only_if_it_has_more_tokens(
    tokenizer: Tokenizer, text: str, max_tokens: int
) -> None:
    chat = [{"role": "user", "content": text}]
    try:
        ids = tokenizer.encode_chat(chat, max_tokens=max_tokens)
    except PromptTooLongError:
        assert len(tokenizer.encode_chat(chat)) > max_tokens
    else:
        assert ids == tokenizer.encode_chat(chat)
        rendered = len(tokenizer.decode(ids).encode())
        assert rendered <= max_tokens * tokenizer.max_token_bytes, "a text that cannot fit was encoded"


def test_chat_that_renders_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{{ tools }}{% endfor %}", {})
    turns = [{"role": "user", "content": "x" * 100}] * 50
    assert len(template.render(turns, [])) == 50 * 102
    monkeypatch.setattr("penstock.gpu_node.engine.text.chat.MAX_RENDERED_CHARS", 5_000)
    with pytest.raises(TooCostlyError, match="messages: the rendered chat takes more than 5000 characters"):
        template.render(turns, [])
