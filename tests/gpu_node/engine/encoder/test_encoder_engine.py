"""The engine of encoders gives what transformers computes for each text alone, whatever shares its steps."""

from __future__ import annotations

import json
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from fixtures.small_transformers import quiet
from fixtures.tiny_encoder import (
    HIDDEN,
    MAX_TOKENS,
    POSITIONS,
    logits_of,
    states_of,
    tokens_of,
    write_encoder,
    write_modules,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.contract.errors import (
    ConflictError,
    JobFailedError,
    PromptTooLongError,
    RequestError,
    UnsupportedKindError,
)
from penstock.contract.sampling import SamplingParams
from penstock.contract.tasks import Classify, Embed, Score
from penstock.gpu_node.engine.encoder.engine import EncoderEngine
from penstock.gpu_node.engine.records import EngineRequest, StepOutput
from penstock.gpu_node.engine.texts import EncoderTask
from penstock.gpu_node.model.encoders.runner import EncoderRunner
from penstock.gpu_node.model.text_protocol import TextBatch, TextResult
from tests.gpu_node.engine.encoder.conftest import Made

TEXTS = ["the cat sat on a mat", "Hello, world!", "a", "the dog ran far away " * 9, "query cat"]
PAIRS = [("query cat", text) for text in TEXTS]
NOTHING = SamplingParams()


def normalized(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def mean_of(made: Made, texts: list[str]) -> np.ndarray:
    """Return what sentence-transformers computes with the mean of the tokens and a normalization."""
    return normalized(np.stack([states.mean(axis=0) for states in states_of(made.module, made.folder, texts)]))


def request(engine: EncoderEngine, name: str, task: EncoderTask, prompt: str, **options: object) -> EngineRequest:
    texts = engine.texts.encode(task, prompt)
    return EngineRequest(name, (), NOTHING, seed=0, texts=texts, **options)  # type: ignore[arg-type]


def outputs_of(engine: EncoderEngine, *requests: EngineRequest) -> dict[str, StepOutput]:
    for one in requests:
        engine.add(one)
    found = dict[str, StepOutput]()
    while engine.has_work():
        engine.wait()
        found |= {output.request_id: output for output in engine.step()}
    return found


def rows_of(output: StepOutput) -> np.ndarray:
    assert output.texts is not None
    return np.frombuffer(output.texts.rows, "<f4").reshape(len(output.texts.num_tokens), -1)


def test_embeddings_are_those_of_sentence_transformers(embedder: Made) -> None:
    found = embedder.engine.embed(TEXTS, truncate_prompt_tokens=-1)
    assert found.shape == (len(TEXTS), HIDDEN)
    assert np.abs(found - mean_of(embedder, TEXTS)).max() < 1e-5


def test_a_cut_text_keeps_its_first_tokens_and_both_marks(embedder: Made) -> None:
    (whole,) = tokens_of(embedder.folder, TEXTS[3:4])
    packed = embedder.engine.texts.encode(Embed(truncate_prompt_tokens=MAX_TOKENS), TEXTS[3])
    assert packed.token_ids.tolist() == whole["input_ids"][0].tolist()
    first = embedder.engine.texts.encode(Embed(truncate_prompt_tokens=5), TEXTS[3])
    assert len(first) == 5
    assert first.token_ids.tolist() == [*packed.token_ids.tolist()[:4], packed.token_ids.tolist()[-1]]


@settings(max_examples=15, deadline=None)
@given(st.lists(st.text("abc th.", min_size=1, max_size=40), min_size=1, max_size=9), st.integers(1, 4), st.booleans())
def test_a_text_has_the_same_vector_alone_and_in_any_batch(
    embedder: Made, texts: list[str], per_job: int, background: bool
) -> None:
    alone = [embedder.engine.embed([text], truncate_prompt_tokens=-1)[0] for text in texts]
    requests = [
        request(
            embedder.engine,
            str(at),
            Embed(texts=tuple(texts[at + 1 : at + per_job]), truncate_prompt_tokens=MAX_TOKENS),
            texts[at],
            background=background and at % 2 == 0,
            level=4 if background and at % 2 == 0 else 1,
            tenant=f"tenant-{at % 3}",
        )
        for at in range(0, len(texts), per_job)
    ]
    outputs = outputs_of(embedder.engine, *requests)
    together = np.concatenate([rows_of(outputs[one.request_id]) for one in requests])
    assert np.abs(together - np.stack(alone)).max() < 1e-5
    assert not embedder.engine.stats().kv_tokens_used


def test_token_ids_are_taken_as_they_are(embedder: Made) -> None:
    (ids,) = (given["input_ids"][0].tolist() for given in tokens_of(embedder.folder, TEXTS[:1]))
    assert np.allclose(embedder.engine.embed([ids]), mean_of(embedder, TEXTS[:1]), atol=1e-5)


def test_fewer_dimensions_are_normalized_again(embedder: Made) -> None:
    whole, found = (embedder.engine.embed(TEXTS[:2], dimensions=size) for size in (None, 8))
    assert np.allclose(found, normalized(whole[:, :8]), atol=1e-6)


def test_scores_are_those_of_a_cross_encoder(scorer: Made) -> None:
    task = Score(texts=tuple(text for _, text in PAIRS), truncate_prompt_tokens=POSITIONS)
    output = outputs_of(scorer.engine, request(scorer.engine, "a", task, PAIRS[0][0]))["a"]
    logits = logits_of(scorer.module, scorer.folder, PAIRS)
    assert np.abs(rows_of(output) - 1 / (1 + np.exp(-logits))).max() < 1e-5
    assert output.usage is not None
    assert output.usage.prompt_tokens == sum(
        len(given["input_ids"][0]) for given in tokens_of(scorer.folder, PAIRS, POSITIONS)
    )


def test_one_label_has_a_probability_of_its_own(scorer: Made) -> None:
    logits = logits_of(scorer.module, scorer.folder, TEXTS)
    found = scorer.engine.classify(TEXTS, truncate_prompt_tokens=-1)
    raw = scorer.engine.classify(TEXTS, raw=True, truncate_prompt_tokens=-1)
    assert np.abs(raw - logits).max() < 1e-5
    assert np.abs(found - 1 / (1 + np.exp(-logits))).max() < 1e-5


def test_parts_of_a_text_are_those_of_transformers_pipeline(labeler: Made) -> None:

    import transformers

    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(labeler.folder / "tokenizer.json"), unk_token="[UNK]", pad_token="[PAD]"
    )
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.backend_tokenizer.no_truncation()
    pipe = transformers.pipeline("ner", model=labeler.module, tokenizer=tokenizer, aggregation_strategy="simple")
    text = "the cat sat far away, hello dog"
    expected = [one for one in pipe(text) if one["entity_group"] != "O"]
    task = Classify(texts=("a",))
    output = outputs_of(labeler.engine, request(labeler.engine, "a", task, text))["a"]
    assert output.texts is not None
    found = json.loads(output.texts.entities)
    assert len(found) == 2
    places = [(one["entity_group"], one["start"], one["end"]) for one in found[0]]
    assert places == [(one["entity_group"], one["start"], one["end"]) for one in expected]
    assert places
    assert np.allclose([one["score"] for one in found[0]], [one["score"] for one in expected], atol=1e-4)
    assert all(one["word"] == text[one["start"] : one["end"]] for one in found[0])


@pytest.mark.parametrize(
    ("task", "prompt", "error", "said"),
    [
        (
            Embed(texts=(TEXTS[3],), first=5),
            "a",
            PromptTooLongError,
            r"prompt\[6\]: 47 tokens, but this model takes 24 at most",
        ),
        (Embed(texts=("",)), "a", RequestError, r"prompt\[1\]: the text is empty"),
        (Embed(dimensions=HIDDEN + 1), "a", RequestError, f"embeddings have {HIDDEN}"),
        (Embed(prompt_name="query"), "a", RequestError, "prompts are: none"),
        (Embed(texts=((1 << 20,),)), "a", RequestError, r"prompt\[1\]: a token id is outside the vocabulary"),
        (Embed(truncate_prompt_tokens=2), TEXTS[0], RequestError, "leaves no token beside the marks"),
        (Score(texts=("a",)), "a", RequestError, "this model does not score; it can tokenize, detokenize, embed"),
    ],
    ids=["too long", "empty", "dimensions", "prompt", "token id", "marks alone", "kind"],
)
def test_what_the_model_cannot_take_is_refused_by_its_name(
    embedder: Made, task: EncoderTask, prompt: str, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        embedder.engine.texts.encode(task, prompt)


def test_a_text_that_is_refused_late_leaves_the_engine_without_work(embedder: Made) -> None:
    """Texts are tokenized while others are computed."""
    engine = embedder.engine
    many = TEXTS[:3] * (
        1 + engine.num_kv_tokens // sum(len(one["input_ids"][0]) for one in tokens_of(embedder.folder, TEXTS[:3]))
    )
    with pytest.raises(RequestError, match=rf"prompt\[{len(many)}\]: the text is empty"):
        engine.embed([*many, ""])
    assert engine.num_requests == 0
    assert np.abs(engine.embed(many) - np.tile(mean_of(embedder, TEXTS[:3]), (len(many) // 3, 1))).max() < 1e-5


def test_a_request_for_text_is_refused(embedder: Made) -> None:
    with pytest.raises(UnsupportedKindError, match="generates no text"):
        embedder.engine.add(EngineRequest("a", [1, 2], NOTHING, seed=0))
    embedder.engine.add(request(embedder.engine, "a", Embed(), "a"))
    with pytest.raises(ConflictError):
        embedder.engine.add(request(embedder.engine, "a", Embed(), "a"))
    embedder.engine.abort("a")
    assert not embedder.engine.has_work()


def test_only_the_text_fails_for_which_the_model_computes_nan(tmp_path: Path) -> None:
    with quiet():
        module = write_encoder(tmp_path)
        write_modules(tmp_path, "Pooling")
        token = tokens_of(tmp_path, ["mat"])[0]["input_ids"][0, 1]
        module.get_input_embeddings().weight.data[token] = float("nan")
        module.save_pretrained(tmp_path)
    engine = EncoderEngine(str(tmp_path), num_threads=1)
    requests = [request(engine, str(at), Embed(texts=("cat",), first=7), text) for at, text in enumerate(TEXTS[:3])]
    outputs = outputs_of(engine, *requests)
    failed, *others = (outputs[one.request_id] for one in requests)
    assert failed.error is not None
    assert (failed.finish_reason, failed.error.param, failed.error.code) == ("error", "prompt[7]", "model_error")
    assert [other.finish_reason for other in others] == ["stop", "stop"]
    with pytest.raises(JobFailedError, match="NaN"):
        engine.embed(["a mat"])


def test_a_text_at_which_steps_fail_ends_its_request_alone(embedder: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, submit = embedder.engine, EncoderRunner.submit
    token = tokens_of(embedder.folder, ["mat"])[0]["input_ids"][0, 1].item()

    def fail_at_token(runner: EncoderRunner, batch: TextBatch) -> Future[TextResult]:
        if token not in batch.token_ids:
            return submit(runner, batch)
        failed = Future[TextResult]()
        failed.set_exception(RuntimeError("a fault"))
        return failed

    monkeypatch.setattr(EncoderRunner, "submit", fail_at_token)
    for at, text in enumerate(TEXTS[:3]):
        engine.add(request(engine, str(at), Embed(texts=("cat", "dog")), text))
    found, num_failed = dict[str, StepOutput](), 0
    while engine.has_work():
        engine.wait()
        try:
            found |= {output.request_id: output for output in engine.step()}
        except RuntimeError:
            num_failed += 1
    assert num_failed == engine.stats().num_failed_steps
    assert [found[name].finish_reason for name in "012"] == ["error", "stop", "stop"]
    assert (error := found["0"].error) is not None
    assert (error.param, error.code) == ("prompt[0]", "model_error")
    assert np.allclose(rows_of(found["1"]), mean_of(embedder, [TEXTS[1], "cat", "dog"]), atol=1e-5)
